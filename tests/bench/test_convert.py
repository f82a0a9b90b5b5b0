"""Converted models carry the same numbers: read back by somebody else's code, never by ours."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader, GGUFWriter
from gguf.quants import dequantize
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from benchmarks.convert import (
    LlamaShape,
    converted,
    fingerprint,
    gguf_name,
    interleave,
    loss_of,
    reword_gguf,
    unpack_gguf,
    write_gguf,
)
from selfspec.errors import Unavailable, UnsupportedModel

TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "head_dim": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 12345.0},
}


def tiny_folder(folder: Path, **changes: object) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(
        AutoConfig.for_model("llama", **{**TINY, **changes})
    ).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_reads_back_the_very_weights(tmp_path: Path, tied: bool) -> None:
    """Catches a wrong tensor name, a wrong row order of q and k, a lost head. HF undoes llama.cpp's
    row order itself, so an error on our side cannot cancel out; q has 4 heads and k has 2, so a
    mix-up of their counts shows."""
    source = tiny_folder(tmp_path / "model", tie_word_embeddings=tied)
    write_gguf(source, tmp_path / "model.gguf")
    model = AutoModelForCausalLM.from_pretrained(source)
    read = load_gguf_checkpoint(
        str(tmp_path / "model.gguf"), return_tensors=True, model_to_load=model
    )
    expected = {
        name: weight
        for name, weight in model.state_dict().items()
        if not (tied and name == "lm_head.weight")
    }
    assert sorted(read["tensors"]) == sorted(expected)
    for name, weight in expected.items():
        assert torch.equal(read["tensors"][name], weight), f"{name} came back with other numbers"
    config = read["config"]
    assert (config["hidden_size"], config["num_key_value_heads"], config["rms_norm_eps"]) == (
        32,
        2,
        pytest.approx(1e-6),
    )
    assert config.get("rope_theta", config.get("rope_parameters", {}).get("rope_theta")) == 12345.0


def test_every_token_is_named_after_its_id_and_none_ends_the_text(tmp_path: Path) -> None:
    """Catches a vocabulary that an engine would stop at or suppress: its answer is read back as
    ids, and greedy decoding without end tokens must be able to write every one of them."""
    write_gguf(tiny_folder(tmp_path / "model"), tmp_path / "model.gguf")
    fields = GGUFReader(tmp_path / "model.gguf").fields
    assert fields["tokenizer.ggml.tokens"].contents() == [f"<{index}>" for index in range(64)]
    assert fields["tokenizer.ggml.model"].contents() == "rwkv", (
        "the only kind without an end token of its own"
    )
    assert not [name for name in fields if name.endswith("eos_token_id")]


def test_blocks_of_few_bits_keep_their_bytes_under_other_words(tmp_path: Path) -> None:
    """Catches blocks that are rounded again on the way into the file with made-up words, a kind of
    block in the wrong place, and an end token that comes along."""
    source = tiny_folder(tmp_path / "model", intermediate_size=64)
    write_gguf(source, tmp_path / "few.gguf", kind="Q4_0", head="Q8_0")
    reword_gguf(tmp_path / "few.gguf", tmp_path / "again.gguf")
    first, again = (GGUFReader(tmp_path / name) for name in ("few.gguf", "again.gguf"))
    kinds = {tensor.name: tensor.tensor_type.name for tensor in again.tensors}
    assert kinds["token_embd.weight"] == "Q8_0" and kinds["blk.0.attn_norm.weight"] == "F32"
    assert kinds["blk.1.ffn_down.weight"] == "Q4_0"
    for one, other in zip(first.tensors, again.tensors, strict=True):
        assert one.name == other.name and one.tensor_type == other.tensor_type
        assert np.array_equal(one.data, other.data)
    shape = {name: each.contents() for name, each in first.fields.items() if "llama." in name}
    assert shape == {
        name: each.contents() for name, each in again.fields.items() if "llama." in name
    }
    assert again.fields["tokenizer.ggml.tokens"].contents()[63] == "<63>"


def test_unpacked_blocks_are_the_same_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches other numbers than the blocks hold, lost words (a server is asked in text), and a
    file that still says how it was packed."""
    source = tiny_folder(tmp_path / "model", intermediate_size=64)
    packed = "general.file_type", 2
    monkeypatch.setattr(GGUFWriter, "add_file_type", lambda writer, _: writer.add_uint32(*packed))
    write_gguf(source, tmp_path / "few.gguf", kind="Q4_0", head="Q8_0")
    unpack_gguf(tmp_path / "few.gguf", tmp_path / "again.gguf")
    few, again = (GGUFReader(tmp_path / name) for name in ("few.gguf", "again.gguf"))
    assert {tensor.tensor_type.name for tensor in again.tensors} == {"F32"}
    for one, other in zip(few.tensors, again.tensors, strict=True):
        assert one.name == other.name and list(one.shape) == list(other.shape)
        assert np.array_equal(dequantize(one.data, one.tensor_type), other.data)
    assert not np.array_equal(again.tensors[1].data, 0 * again.tensors[1].data)
    names = [name for name in few.fields if not name.startswith("GGUF.")]
    assert "tokenizer.ggml.tokens" in names
    for name in names:
        wanted = 0 if name == "general.file_type" else few.fields[name].contents()
        assert again.fields[name].contents() == wanted, name


def test_the_loss_of_logits_is_torchs() -> None:
    """Catches a sum that overflows, a mean for a sum, and the likeliest token of another place."""
    logits = np.array([[1000.0, 1001.0, 0.0], [3.0, 1.0, 2.0]], dtype=np.float32)
    loss, said = loss_of(logits, [0, 2])
    wanted = torch.nn.functional.cross_entropy(
        torch.tensor(logits), torch.tensor([0, 2]), reduction="sum"
    )
    assert loss == pytest.approx(wanted.item()) and said == [1, 0]


def test_interleaving_turns_halves_into_neighbours() -> None:
    """Catches a row order that happens to survive a round trip: by hand, one head of six rows."""
    rows = np.arange(12, dtype=np.float32).reshape(12, 1)
    assert interleave(rows, heads=2).ravel().tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]


@pytest.mark.parametrize("key", ["rope_parameters", "rope_theta"])
def test_rope_theta_is_found_under_its_new_and_its_old_name(tmp_path: Path, key: str) -> None:
    """Catches the trap of transformers 5: a peer that silently runs with 10000 and writes something
    else."""
    folder = tiny_folder(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    config[key] = (
        {"rope_type": "default", "rope_theta": 7777.0} if key == "rope_parameters" else 7777.0
    )
    (folder / "config.json").write_text(json.dumps(config))
    assert LlamaShape.read(folder).rope_theta == 7777.0


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "qwen2"},
        {"attention_bias": True},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1.0}},
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": None},
    ],
)
def test_what_would_be_converted_wrongly_is_refused(
    tmp_path: Path, change: dict[str, object]
) -> None:
    """Catches a peer that is compared on another model than ours because something of the
    configuration was dropped."""
    folder = tiny_folder(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(UnsupportedModel, match="--peers"):
        write_gguf(folder, tmp_path / "model.gguf")


def test_a_tensor_without_a_place_is_refused() -> None:
    """Catches weights that are left out in silence."""
    assert gguf_name("model.layers.11.mlp.up_proj.weight") == "blk.11.ffn_up.weight"
    for name in (
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.self_attn.q_norm.weight",
        "score.weight",
    ):
        with pytest.raises(UnsupportedModel, match=name):
            gguf_name(name)


def test_a_folder_without_weights_says_so(tmp_path: Path) -> None:
    """Catches an empty GGUF file, which fails later and elsewhere."""
    folder = tiny_folder(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    with pytest.raises(Unavailable, match="safetensors"):
        write_gguf(folder, tmp_path / "model.gguf")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "peers"


def writing(text: str, fail: BaseException | None = None) -> Callable[[Path, Path], None]:
    def write(source: Path, target: Path) -> None:
        target.mkdir()
        (target / "weights").write_text(text)
        if fail is not None:
            raise fail

    return write


def test_a_model_is_converted_once(tmp_path: Path, cache: Path) -> None:
    """Catches a conversion at every start, and one form being taken for another."""
    source = tiny_folder(tmp_path / "model")
    first = converted(source, "kind", writing("one"))
    assert converted(source, "kind", writing("two")) == first
    assert (first / "weights").read_text() == "one"
    assert (converted(source, "other", writing("two")) / "weights").read_text() == "two"


def test_another_or_a_changed_model_is_converted_anew(tmp_path: Path, cache: Path) -> None:
    """Catches a stale copy: the peers would run yesterday's weights against today's."""
    source = tiny_folder(tmp_path / "model")
    before = fingerprint(source)
    weights = source / "model.safetensors"
    weights.write_bytes(weights.read_bytes() + b" ")
    changed = fingerprint(source)
    (source / "config.json").write_text((source / "config.json").read_text() + "\n")
    assert len({before, changed, fingerprint(source)}) == 3


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), OSError("disk full")])
def test_an_interrupted_conversion_leaves_nothing(
    tmp_path: Path, cache: Path, failure: BaseException
) -> None:
    """Catches half a model in the cache that the next run takes for a whole one."""
    source = tiny_folder(tmp_path / "model")
    with pytest.raises(type(failure)):
        converted(source, "kind", writing("half", failure))
    assert list(cache.iterdir()) == []
    assert (converted(source, "kind", writing("whole")) / "weights").read_text() == "whole"


def test_a_second_process_may_be_quicker(tmp_path: Path, cache: Path) -> None:
    """Catches a crash, or a copy pulled away from under a reader, when two runs convert at the same
    time."""
    source = tiny_folder(tmp_path / "model")

    def slow(source: Path, target: Path) -> None:
        writing("slow")(source, target)
        quick = cache / f"kind-{fingerprint(source)}"
        quick.mkdir()
        (quick / "weights").write_text("quick")

    assert (converted(source, "kind", slow) / "weights").read_text() == "quick"
    assert len(list(cache.iterdir())) == 1
