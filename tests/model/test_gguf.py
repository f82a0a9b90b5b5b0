"""GGUF files: expanded once to the values they hold, kept, and refused with a reason when that
cannot be done."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter

from selfspec.errors import BrokenCheckpoint, OptionError, ResourceError, UnsupportedModel
from selfspec.model.from_transformers import from_transformers
from selfspec.model.load import checkpoint, gguf_file
from selfspec.model.load.loading import load
from selfspec.testing import tiny_model, tiny_tokenizer

NAMES = {  # llama.cpp's names of a Qwen2's parts
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.layers": "blk",
}
OPTIONS = {"vocab_size": 261, "num_hidden_layers": 2, "rms_norm_eps": 1e-6}
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of this test's own."""
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gguf"


def write(
    path: Path, kind=None, architecture="qwen2", seed=0, extra=None, kinds=None, **changes
) -> dict[str, torch.Tensor]:
    """A tiny Qwen2, or Llama, as llama.cpp would store it, and the weights that it holds; its
    matrices quantised to `kind`, or to what `kinds` gives for a name."""
    family = architecture if architecture == "llama" else "qwen2"
    model = tiny_model(family, seed, **{**OPTIONS, **changes})
    config, writer, held = model.config, GGUFWriter(path, architecture), {}
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    if family == "llama":
        writer.add_rope_dimension_count(config.head_dim)
    vocabulary = tiny_tokenizer().get_vocab()
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*sorted(vocabulary, key=lambda token: vocabulary[token]), "ab", "ba"])
    writer.add_token_merges(["a b", "b a"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    weights = model.state_dict()
    if config.tie_word_embeddings:
        del weights["lm_head.weight"]
    for name, tensor in weights.items():
        ours, order = name, rows_in_the_file(family, name, config)
        for theirs, short in NAMES.items():
            ours = ours.replace(theirs, short)
        values = (tensor[order] if len(order) else tensor).numpy()
        packing = (kinds or {}).get(ours.removesuffix(".weight"), kind)
        if packing is not None and values.ndim == 2:
            packed = gguf.quantize(values, packing)
            writer.add_tensor(ours, packed, raw_dtype=packing)
            values = gguf.dequantize(packed, packing)
        else:
            writer.add_tensor(ours, values)
        values = torch.from_numpy(np.array(values))
        held[name] = values[order.argsort()] if len(order) else values
    if extra is not None:
        writer.add_tensor("extra", extra)
    for step in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{step}_to_file")()
    writer.close()
    return held


def rows_in_the_file(family, name, config):
    """Llama's queries and keys have numbers that are rotated together side by side there."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    found = heads.get(name.split(".")[-2], 0) if family == "llama" else 0
    size = config.head_dim
    return torch.arange(found * size).view(found, 2, size // 2).transpose(1, 2).flatten()


def quietly(path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return load(path)


@pytest.mark.parametrize("kind", [None, GGMLQuantizationType.Q8_0])
def test_the_model_has_the_values_that_the_file_holds(tmp_path, kind):
    """Weights permuted, dropped or filled at random on the way, a tokenizer lost, a step that is
    not announced."""
    held = write(tmp_path / "tiny.gguf", kind)
    with pytest.warns(UserWarning, match="expanded to float32 once"):
        loaded = load(tmp_path / "tiny.gguf")
    weights = loaded.model.state_dict()
    assert set(held) == set(weights)
    assert all(torch.equal(weights[name], values) for name, values in held.items())
    assert (
        loaded.owned
        and loaded.tokenizer is not None
        and loaded.tokenizer.encode("a") == tiny_tokenizer().encode("a")
    )
    assert from_transformers(loaded.model).row_stable


def test_it_is_converted_once_and_again_only_when_the_file_changed(tmp_path, cache, monkeypatch):
    """Minutes at every start; or an old conversion served for a new file of the same name."""
    path, convert, runs = tmp_path / "tiny.gguf", gguf_file.convert_gguf, []
    monkeypatch.setattr(
        gguf_file, "convert_gguf", lambda *given: runs.append(given) or convert(*given)
    )
    write(path)
    first = quietly(path).model.state_dict()["lm_head.weight"].clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(load(path).model.state_dict()["lm_head.weight"], first)
    assert len(runs) == 1
    held = write(path, seed=1)
    os.utime(path, ns=(1, 1))
    assert (
        torch.equal(quietly(path).model.state_dict()["lm_head.weight"], held["lm_head.weight"])
        and len(runs) == 2
    )
    assert not list(cache.glob(".making*"))


def test_a_conversion_that_breaks_off_leaves_nothing_that_looks_whole(tmp_path, cache, monkeypatch):
    """Half a model found in the cache the next time."""

    def half(path, folder):
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    write(tmp_path / "tiny.gguf")
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(gguf_file, "convert_gguf", half)
        quietly(tmp_path / "tiny.gguf")
    assert not [entry for entry in cache.iterdir() if entry.is_dir()]
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(gguf_file, "convert_gguf", half)
        # killed: nothing tidies up
        patched.setattr(gguf_file.shutil, "rmtree", lambda *_, **__: None)
        quietly(tmp_path / "tiny.gguf")
    (left,) = [entry for entry in cache.iterdir() if entry.is_dir()]
    (left / "model.safetensors.index.json").write_text("{}")
    loaded = quietly(tmp_path / "tiny.gguf")
    assert loaded.owned and not left.exists()
    (folder,) = [entry for entry in cache.iterdir() if entry.is_dir()]
    assert not (folder / "model.safetensors.index.json").exists(), (
        "what a killed process left is in the model"
    )


def test_damaged_files(tmp_path):
    """A truncated download reported as an unsupported model, or a stray error out of a reader."""
    path = tmp_path / "tiny.gguf"
    write(path)
    whole = path.read_bytes()
    for damaged in (b"", b"ZIP!" + whole[4:], whole[:30], whole[: len(whole) // 2]):
        path.write_bytes(damaged)
        with pytest.raises(BrokenCheckpoint, match="truncated or corrupt"):
            load(path)


def test_what_cannot_be_expanded_is_refused_before_work_begins(tmp_path, monkeypatch):
    """An unknown quantisation or architecture found out after minutes, in someone else's words."""
    monkeypatch.setattr(
        gguf_file, "convert_gguf", lambda *_: pytest.fail("conversion began before the refusal")
    )
    write(tmp_path / "other.gguf", architecture="rwkv7")
    with pytest.raises(UnsupportedModel, match=r"'rwkv7'.*qwen2.*safetensors"):
        load(tmp_path / "other.gguf")
    path = tmp_path / "tiny.gguf"
    write(path, GGMLQuantizationType.Q8_0)
    whole, code = path.read_bytes(), int(GGMLQuantizationType.Q8_0).to_bytes(4, "little")
    name = b"blk.0.attn_q.weight"
    # the name, the number of dimensions and two of them
    at = whole.index(name) + len(name) + 4 + 2 * 8
    assert whole[at : at + 4] == code
    path.write_bytes(whole[:at] + (999).to_bytes(4, "little") + whole[at + 4 :])
    with pytest.raises(
        UnsupportedModel, match=r"way that the installed gguf package does not know.*999"
    ):
        load(path)
    write(path, extra=np.zeros((4, 4), dtype=np.float64))
    with pytest.raises(
        UnsupportedModel, match="quantised as F64, which the gguf package cannot expand"
    ):
        load(path)


def test_too_little_memory_or_disk(tmp_path, monkeypatch):
    """A conversion that is killed half-way, or fills a disk."""
    write(tmp_path / "tiny.gguf")
    with monkeypatch.context() as patched, pytest.raises(ResourceError, match="converting"):
        patched.setattr(checkpoint, "available_memory", lambda device: 1000)
        load(tmp_path / "tiny.gguf")
    usage = gguf_file.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(gguf_file.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(ResourceError, match=r"are free.*SELFSPEC_CACHE"):
        load(tmp_path / "tiny.gguf")


def test_a_revision_of_a_file_is_refused(tmp_path):
    """An option that would silently do nothing."""
    write(tmp_path / "tiny.gguf")
    with pytest.raises(OptionError, match="a GGUF file has none"):
        load(tmp_path / "tiny.gguf", revision="main")
