"""Loading: what is accepted, what is refused before a weight is read, and what a damaged checkpoint
says. Tiny random models."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from selfspec.errors import (
    BrokenCheckpoint,
    ModelError,
    OptionError,
    ResourceError,
    Unavailable,
    UnsupportedModel,
)
from selfspec.model.compute import memory
from selfspec.model.load import checkpoint, source
from selfspec.model.load.loading import estimate_bytes, load
from selfspec.testing import tiny_model

CPU = torch.device("cpu")


def tiny(tied: bool = False, **options: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=48,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
        **options,
    )
    return LlamaForCausalLM(config)


def words() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untied model in bfloat16, with a tokenizer."""
    folder = tmp_path_factory.mktemp("saved") / "llama"
    tiny().to(torch.bfloat16).save_pretrained(folder)
    words().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(saved, tmp_path / "llama"))


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def shard(folder: Path) -> None:
    LlamaForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="4KB")
    (folder / "model.safetensors").unlink()


def no_weights_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on, asking transformers for weights fails the test."""

    def fail(*_: Any, **__: Any) -> None:
        pytest.fail("weights were read before the refusal")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)


# What is accepted


def test_folder_gives_the_saved_weights_ready_to_run(saved: Path) -> None:
    """Catches a model left in training mode, with gradients, or with weights other than the
    file's."""
    loaded = load(saved)
    stored = load_file(saved / "model.safetensors")
    weights = loaded.model.state_dict()
    assert set(stored) <= set(weights)
    assert all(torch.equal(weights[name], tensor.float()) for name, tensor in stored.items())
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert loaded.model.config._attn_implementation == "sdpa"
    assert loaded.owned
    assert loaded.name == str(saved)
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.convert_tokens_to_ids("b") == 1


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("auto", torch.float32),
        ("float32", torch.float32),
        ("bfloat16", torch.bfloat16),
        (torch.bfloat16, torch.bfloat16),
        ("float16", torch.float16),
    ],
)
def test_dtype(saved: Path, option: str | torch.dtype, expected: torch.dtype) -> None:
    """Catches "auto" taking the checkpoint's bfloat16 on the CPU, where exactness is promised, and
    an option not passed on."""
    assert {
        parameter.dtype for parameter in load(saved, dtype=option, device="cpu").model.parameters()
    } == {expected}


def test_a_family_without_sdpa_loads(tmp_path: Path) -> None:
    """transformers refuses to load Gemma 2 with SDPA, which knows no soft caps; asking for it by
    name kept the family out."""
    tiny_model("gemma2").save_pretrained(tmp_path)
    assert load(tmp_path).model.config._attn_implementation == "eager"


def test_tied_head_is_not_a_missing_weight(tmp_path: Path) -> None:
    """A tied checkpoint stores no lm_head; the check for missing weights must know that."""
    tiny(tied=True).save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    model = load(tmp_path).model
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_shards_load(folder: Path) -> None:
    """Catches a check that only knows single files."""
    before = load_file(folder / "model.safetensors")
    shard(folder)
    assert len(checkpoint.weight_files(folder)) > 1
    assert torch.equal(
        load(folder).model.state_dict()["lm_head.weight"], before["lm_head.weight"].float()
    )


def test_old_rotary_buffers_are_harmless(folder: Path) -> None:
    """Checkpoints of old Llamas store inv_freq; refusing them would refuse many good models."""
    edit_weights(
        folder,
        lambda tensors: tensors.update(
            {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
        ),
    )
    assert load(folder).owned


def test_without_tokenizer_files_there_is_no_tokenizer(tmp_path: Path) -> None:
    """A model without a tokenizer runs on token ids; it must not fail, nor get an invented
    tokenizer."""
    tiny().save_pretrained(tmp_path)
    assert load(tmp_path).tokenizer is None


def test_tokenizer_argument_wins(saved: Path, tmp_path: Path) -> None:
    """Catches the argument being ignored, as an object or as a name."""
    given = words()
    assert load(saved, tokenizer=given).tokenizer is given
    tiny().save_pretrained(tmp_path)
    named = load(tmp_path, tokenizer=saved).tokenizer
    assert named is not None
    assert named.convert_tokens_to_ids("b") == 1
    with pytest.raises(OptionError, match=r"tokenizer\.json"):
        load(saved, tokenizer=tmp_path)


def test_demo_is_the_demo_folder(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches "demo" being looked up on the hub or in the current folder."""
    monkeypatch.setattr(source, "demo_folder", lambda: saved)
    loaded = load("demo")
    assert (loaded.name, loaded.owned) == ("demo", True)


def test_transformers_is_as_loud_afterwards_as_before(saved: Path) -> None:
    """Catches a verbosity that stays changed for the whole process, also after an error, and one
    that overrides the user's."""
    hf_logging = transformers.utils.logging
    before = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    with pytest.raises(KeyError), checkpoint.quiet_transformers(bars=False):
        assert hf_logging.get_verbosity() > before[0]
        assert not hf_logging.is_progress_bar_enabled()
        raise KeyError
    assert (hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()) == before
    hf_logging.set_verbosity_info()
    try:
        with checkpoint.quiet_transformers(bars=True):
            assert hf_logging.get_verbosity() < before[0]
    finally:
        hf_logging.set_verbosity(before[0])


# A live model


def test_live_model_is_left_alone(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches eval(), requires_grad_() or a copy on a model that belongs to the user, and claiming
    to own it."""
    model = tiny().train()
    monkeypatch.chdir(saved)
    loaded = load(model)
    assert loaded.model is model
    assert not loaded.owned
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert loaded.tokenizer is None  # its name_or_path is empty, which is not the current folder
    found = load(LlamaForCausalLM.from_pretrained(saved)).tokenizer
    assert found is not None
    assert found.convert_tokens_to_ids("b") == 1


def test_live_model_options_that_contradict_it() -> None:
    """Catches options for a live model that are silently ignored."""
    model = tiny()
    assert load(model, dtype="float32", device="cpu").model is model
    with pytest.raises(OptionError, match="contradicts"):
        load(model, dtype="bfloat16")
    with pytest.raises(OptionError, match="revision"):
        load(model, revision="main")
    with pytest.raises(OptionError, match="not a Linear"):
        load(torch.nn.Linear(1, 1))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "device", [{"": "cpu"}, {"": torch.device("cpu")}, {"model.layers": "cpu", "lm_head": "cpu"}]
)
def test_device_maps_to_one_place(saved: Path, device: dict[str, Any]) -> None:
    """Refusing what is no split at all, as transformers' users write it."""
    assert load(saved, device=device).model.device == CPU


@pytest.mark.parametrize(
    ("device", "says"),
    [
        ("balanced", "whole on one"),
        ("disk", "keeps it on disk"),
        ({"": "disk"}, "keeps it on disk"),
        ({"model.layers": 0, "lm_head": "cpu"}, "spreads a model over several places"),
        ({"": 99}, "'cuda:99'.*device='cpu'"),
    ],
)
def test_device_maps_that_split_a_model(device: Any, says: str) -> None:
    """A mistyped device, where a map was meant; or a model silently put on one of its places."""
    with pytest.raises(OptionError, match=says):
        load("demo", device=device)


def test_live_model_that_is_nowhere_or_has_no_head() -> None:
    """Catches a base model or an empty shell failing deep inside a forward."""
    with pytest.raises(UnsupportedModel, match="no language-model head"):
        load(LlamaModel(tiny().config))
    with torch.device("meta"):
        empty = tiny()
    with pytest.raises(
        UnsupportedModel, match=r"meta .offloaded, or never loaded.*device_map='cpu'"
    ):
        load(empty)


# Options


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"dtype": "bfloat"}, "bfloat16"),
        ({"dtype": torch.int8}, "int8"),
        ({"device": "cudda"}, "cuda"),
        ({"device": "mps"}, "cpu and cuda"),
        ({"device": "cuda:99"}, "device='cpu'"),
        ({"revision": "v1"}, "revision"),
    ],
)
def test_bad_options(saved: Path, options: dict[str, Any], says: str) -> None:
    """Catches an unknown option that falls back to a default."""
    with pytest.raises(OptionError, match=says):
        load(saved, **options)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("", "is empty"),
        ("./such", "no folder such"),
        ("/nosuch", "no folder /nosuch"),
        ("~/nosuch", "no folder /.*nosuch"),
        ("a/b/c", "no folder a/b/c"),
        (Path("no"), "no folder no"),
        ("x.gguf", "no file x.gguf"),
        ("what is this?", "cannot be a hub name"),
    ],
)
def test_a_path_that_is_not_there(
    name: str | Path, says: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Catches a mistyped path being asked of a hub, and the current folder standing in for an empty
    name."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OptionError, match=says):
        load(name)


def test_a_file_is_not_a_folder(saved: Path) -> None:
    """Catches config.json or a weight file taken for a model."""
    with pytest.raises(OptionError, match=r"folder that holds config\.json.*\.gguf"):
        load(saved / "model.safetensors")


# Kinds of models that are refused, before any weight is read


def test_refuses_other_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an encoder or encoder-decoder that loads and writes nonsense."""
    small = {"num_layers": 1, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_heads": 2, "vocab_size": 16}
    T5ForConditionalGeneration(T5Config(**small)).save_pretrained(tmp_path / "t5")
    bert = BertConfig(
        vocab_size=16,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
    )
    BertForMaskedLM(bert).save_pretrained(tmp_path / "bert")
    LlamaModel(tiny().config).save_pretrained(tmp_path / "base")
    transformers.CLIPConfig().save_pretrained(tmp_path / "eyes")
    transformers.CLIPVisionConfig().save_pretrained(tmp_path / "vision")
    no_weights_read(monkeypatch)
    for name, says in {
        "t5": "encoder-decoder model .t5.",
        "bert": "is an encoder .bert.",
        "base": "LlamaModel",
        "eyes": "no causal language model",
        "vision": "no causal language model",
    }.items():
        with pytest.raises(UnsupportedModel, match=says) as caught:
            load(tmp_path / name)
        assert "decoder-only" in str(caught.value)


def test_refuses_a_live_encoder_decoder() -> None:
    """Catches the check being made for folders only."""
    with pytest.raises(UnsupportedModel, match="encoder-decoder"):
        load(
            T5ForConditionalGeneration(
                T5Config(num_layers=1, d_model=8, d_kv=4, d_ff=8, num_heads=2, vocab_size=16)
            )
        )


def test_unknown_type_and_remote_code(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches running a checkpoint's code without consent, and a type unknown to transformers
    ending in its own traceback."""
    no_weights_read(monkeypatch)
    edit_config(folder, model_type="llama9")
    with pytest.raises(UnsupportedModel, match="'llama9'"):
        load(folder)
    edit_config(
        folder, auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    )
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    with pytest.raises(UnsupportedModel, match="trust_remote_code=True"):
        load(folder)
    assert not (folder / "ran").exists()


def test_trusted_code_is_run(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Catches trust_remote_code not reaching transformers."""
    monkeypatch.setattr(
        transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    monkeypatch.setattr(sys, "path", [*sys.path])
    (folder / "mine.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class MyConfig(LlamaConfig):\n    model_type = 'mine'\n"
        "class MyForCausalLM(LlamaForCausalLM):\n    config_class = MyConfig\n"
    )
    edit_config(
        folder,
        model_type="mine",
        auto_map={"AutoConfig": "mine.MyConfig", "AutoModelForCausalLM": "mine.MyForCausalLM"},
    )
    assert type(load(folder, trust_remote_code=True).model).__name__ == "MyForCausalLM"


def test_pickles_and_adapters_are_refused(folder: Path) -> None:
    """Catches unpickling, which runs any code, and an adapter folder that would load as its base
    model alone."""
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(UnsupportedModel, match="safetensors"):
        load(folder)
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(UnsupportedModel, match="merge_and_unload"):
        load(folder)


# Damaged checkpoints


@pytest.mark.parametrize("left", [0, 5, 100, -1])
def test_truncated_safetensors(folder: Path, left: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file cut anywhere (nothing, header, data) is named before loading; a check of the header
    alone passes the last one."""
    no_weights_read(monkeypatch)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(BrokenCheckpoint, match=r"model\.safetensors is truncated"):
        load(folder)


def test_corrupt_header_trailing_bytes_and_lfs_pointer(folder: Path) -> None:
    """Catches a header that is not JSON, a file that is too long, and the text file that git leaves
    without lfs."""
    path = folder / "model.safetensors"
    good = path.read_bytes()
    path.write_bytes(good + b"more")
    with pytest.raises(BrokenCheckpoint, match="corrupt"):
        load(folder)
    path.write_bytes(good[:8] + b"?" + good[9:])
    with pytest.raises(BrokenCheckpoint, match="corrupt header"):
        load(folder)
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(BrokenCheckpoint, match="git lfs pull"):
        load(folder)


def test_shards_and_index_damaged(folder: Path) -> None:
    """Catches a missing shard, whose weights transformers would otherwise look for itself, and a
    broken index."""
    shard(folder)
    last = checkpoint.weight_files(folder)[-1]
    last.rename(folder / "away")
    with pytest.raises(BrokenCheckpoint, match=last.name):
        load(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {')
    with pytest.raises(BrokenCheckpoint, match="not valid JSON"):
        load(folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(BrokenCheckpoint, match="weight_map"):
        load(folder)


def test_config_missing_or_broken(folder: Path) -> None:
    """Catches a raw traceback from transformers or json for a damaged config.json."""
    path = folder / "config.json"
    edit_config(folder, num_attention_heads="two")
    with pytest.raises(BrokenCheckpoint, match=r"config\.json.*not a whole number"):
        load(folder)
    for text in (path.read_text()[:40], "[]"):
        path.write_text(text)
        with pytest.raises(BrokenCheckpoint, match=r"config\.json"):
            load(folder)
    path.unlink()
    with pytest.raises(BrokenCheckpoint, match=r"config\.json is missing"):
        load(folder)


def test_no_weights_at_all(folder: Path) -> None:
    """Catches a folder of small files that gives a random model."""
    (folder / "model.safetensors").unlink()
    with pytest.raises(BrokenCheckpoint, match="no weights"):
        load(folder)


NORM = "model.layers.1.input_layernorm.weight"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda tensors: tensors.pop(NORM), f"lacks 1 weights, first {NORM}"),
        (
            lambda tensors: tensors.update({NORM: torch.ones(3)}),
            rf"{NORM} \(3,\) instead of \(16,\)",
        ),
        (
            lambda tensors: tensors.update({"model.layers.2.extra": torch.ones(3)}),
            r"without a place .* model\.layers\.2\.extra",
        ),
    ],
)
def test_weights_that_do_not_fit_the_model(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], object], says: str
) -> None:
    """transformers fills missing and misshapen weights with random numbers and drops surplus ones:
    the output would be noise."""
    edit_weights(folder, change)
    with pytest.raises(BrokenCheckpoint, match=says):
        load(folder)


def test_config_with_fewer_layers_than_weights(folder: Path) -> None:
    """Catches a shortened config.json that would quietly run a part of the model."""
    edit_config(folder, num_hidden_layers=1)
    with pytest.raises(BrokenCheckpoint, match=r"model\.layers\.1"):
        load(folder)


def test_broken_tokenizer(folder: Path) -> None:
    """Catches a model that silently loses its tokenizer because the file is damaged."""
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(BrokenCheckpoint, match="tokenizer"):
        load(folder)


# Memory


def test_estimate_is_the_weights_and_the_largest_once_more(saved: Path) -> None:
    """Catches an estimate that ignores the dtype asked for, counts a tied head twice, or forgets
    the copy being converted."""
    stored = load_file(saved / "model.safetensors")
    count, largest = (
        sum(t.numel() for t in stored.values()),
        max(t.numel() for t in stored.values()),
    )
    assert estimate_bytes(saved, None) == 2 * count + 2 * largest
    assert estimate_bytes(saved, torch.float32) == 4 * count + 2 * largest
    config = tiny().config
    assert estimate_bytes(config, torch.float32) == 4 * count + 4 * largest
    assert estimate_bytes(config, torch.float16) == 2 * count + 2 * largest
    assert (
        estimate_bytes(tiny(tied=True).config, torch.float32) == 4 * (count - 48 * 16) + 4 * largest
    )


def test_integer_tensors_keep_their_size(folder: Path) -> None:
    """Quantised weights are integers: a dtype option does not make them larger."""
    before = estimate_bytes(folder, torch.float32)
    edit_weights(
        folder, lambda tensors: tensors.update({"codes": torch.zeros(100, dtype=torch.int8)})
    )
    assert estimate_bytes(folder, torch.float32) == before + 100


def test_too_little_memory(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a model that is loaded until the system kills the process. One byte decides."""
    needed = estimate_bytes(saved, torch.float32)
    monkeypatch.setattr(checkpoint, "available_memory", lambda device: needed)
    assert load(saved).owned
    no_weights_read(monkeypatch)
    monkeypatch.setattr(checkpoint, "available_memory", lambda device: needed - 1)
    with pytest.raises(ResourceError, match=r"(?s)GB of memory on cpu.*smaller dtype"):
        load(saved)


def test_memory_respects_a_container_limit(tmp_path: Path) -> None:
    """Inside a container the machine's free memory is not ours; cache that can be dropped is."""
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 150\n")
    (tmp_path / "memory.max").write_text("1000\n")
    assert memory.cgroup_left(tmp_path) == 450
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.cgroup_left(tmp_path) is None
    assert memory.cgroup_left(tmp_path / "absent") is None
    assert checkpoint.available_memory(CPU) > 0


# Hub names: an offline hub cache, in a process of its own because the libraries read these
# variables once

HUB_SCRIPT = """
import sys
from selfspec.model.load.loading import load
from selfspec.errors import SelfspecError
for name in sys.argv[1:]:
    try:
        loaded = load(name)
        print("loaded", loaded.name, loaded.tokenizer is not None)
    except SelfspecError as error:
        print(type(error).__name__, error)
"""


def test_hub_names_offline(saved: Path, tmp_path: Path) -> None:
    """A cached hub model loads without a network; one that is not there, or only partly, says the
    command that fetches it."""
    for name in ("whole", "part"):
        repository = tmp_path / "hub" / f"models--owner--{name}"
        shutil.copytree(saved, repository / "snapshots" / ("0" * 40))
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text("0" * 40)
    (
        tmp_path / "hub" / "models--owner--part" / "snapshots" / ("0" * 40) / "model.safetensors"
    ).unlink()
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    environment.pop("HF_HUB_CACHE", None)
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", HUB_SCRIPT, "owner/whole", "owner/part", "owner/absent"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    whole, part, absent = done.stdout.splitlines()
    assert whole == "loaded owner/whole True"
    assert part.startswith("Unavailable owner/part is cached without model.safetensors")
    assert "`hf download owner/part`" in part
    assert absent.startswith("Unavailable owner/absent")
    assert "`hf download owner/absent`" in absent


def test_hub_errors_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a wrong revision or a gated model reported as a missing network, whose remedy would
    not help."""
    from huggingface_hub import errors as hub_errors

    asked: list[dict[str, Any]] = []
    failure: Exception = hub_errors.RevisionNotFoundError.__new__(hub_errors.RevisionNotFoundError)

    def fail(name: str, **options: Any) -> str:
        asked.append(options)
        raise failure

    monkeypatch.setattr(source.huggingface_hub, "snapshot_download", fail)
    with pytest.raises(OptionError, match="no revision 'v9'"):
        load("owner/name", revision="v9", token="secret")
    assert (asked[0]["revision"], asked[0]["token"]) == ("v9", "secret")
    failure = hub_errors.GatedRepoError.__new__(hub_errors.GatedRepoError)
    with pytest.raises(Unavailable, match="hf auth login"):
        load("owner/name")
    failure = ConnectionError("no route")
    with pytest.raises(Unavailable, match=r"no route.*`hf download owner/name --revision v1`"):
        load("owner/name", revision="v1")


def test_hub_model_too_large_is_refused_before_its_download(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches gigabytes being fetched for a model that cannot be held."""
    asked: list[list[str]] = []

    def fake(name: str, allow_patterns: list[str], **_: Any) -> str:
        asked.append(allow_patterns)
        return str(saved)

    monkeypatch.setattr(source.huggingface_hub, "snapshot_download", fake)
    monkeypatch.setattr(checkpoint, "available_memory", lambda device: 1000)
    with pytest.raises(ResourceError):
        load("owner/name")
    assert len(asked) == 1
    assert not any("safetensors" in pattern for pattern in asked[0])
    monkeypatch.setattr(checkpoint, "available_memory", lambda device: 10**9)
    assert load("owner/name").name == "owner/name"
    assert asked[-1] == ["model.safetensors"]


def test_transformers_own_failures_are_model_errors(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a traceback from inside transformers reaching the user."""

    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("first line\nsecond line")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(ModelError, match=r"first line$"):
        load(saved)
