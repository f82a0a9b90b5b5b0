"""GGUF files: expanded once to the values they hold, kept, and refused with a reason when that
cannot be done."""

from __future__ import annotations

import os
import warnings

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from selfspec.errors import BrokenCheckpoint, OptionError, ResourceError, UnsupportedModel
from selfspec.model.from_transformers import from_transformers
from selfspec.model.load import checkpoint, gguf_file
from selfspec.model.load.loading import load
from selfspec.testing import tiny_tokenizer
from tests.model.gguf_files import write

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of this test's own."""
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gguf"


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
