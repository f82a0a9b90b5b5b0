"""`selfspec quantise`: the folder runs with the bits of the original in that kind, on any
processor, and what does not belong together is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from selfspec import LLM
from selfspec.errors import BrokenCheckpoint, OptionError, ResourceError, UnsupportedModel
from selfspec.model import quantising
from selfspec.model.compute.cpu.kinds import KINDS
from selfspec.model.compute.cpu.portable import PORTABLE, to_panels, to_rows
from selfspec.model.load import loading
from selfspec.model.load.checkpoint import QUANTISED
from selfspec.model.probing import probe_logits
from selfspec.model.quantised_folder import TENSORS
from selfspec.model.quantising import quantise
from selfspec.testing import tiny_model, tiny_tokenizer
from tests.model.variants import VARIANTS

SHAPES = ((64, 64), (70, 50), (33, 576), (1, 32))


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("SELFSPEC_PACKED_GB", "0")
    monkeypatch.setattr("selfspec.model.remembered.cache_root", lambda: tmp_path / "cache")
    return tmp_path / "cache"


def saved(folder: Path, variant: str = "llama", seed: int = 0) -> Path:
    family, options = VARIANTS[variant]
    tiny_model(family, seed, **options).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def change(folder: Path, **facts: Any) -> None:
    said = json.loads((folder / QUANTISED).read_text())
    (folder / QUANTISED).write_text(json.dumps({**said, **facts}))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", PORTABLE)
def test_rows_and_panels_hold_the_same_numbers(kind: str, shape: tuple[int, int]) -> None:
    """A unit of the wrong size, or the columns that fill the last panel, in one of the widths."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    packed = KINDS[kind]([weight], [None])
    rows = to_rows(kind, packed.memory, shape[0])
    again = KINDS[kind]([weight.to("meta")], [None], to_panels(kind, rows))
    x = torch.randn(3, shape[1])
    assert torch.equal(packed(x), again(x))
    assert torch.equal(packed.rows(torch.arange(shape[0])), again.rows(torch.arange(shape[0])))
    for width in (8, 16, 32):
        assert torch.equal(to_rows(kind, to_panels(kind, rows, width), shape[0], width), rows)


@pytest.mark.parametrize(
    ("kind", "variant"),
    [*((kind, "llama-tied") for kind in PORTABLE), ("int4", "qwen2"), ("int8", "gemma2"),
     ("int4", "olmo2")],
)  # fmt: skip
def test_the_same_bits_as_the_original(
    kind: str, variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bias, a norm or a tied embedding that is lost or rounded on the way through the folder."""
    original = LLM.from_pretrained(saved(tmp_path / "model", variant), weights=kind)
    folder = quantise(tmp_path / "model", kind, tmp_path / "small")
    monkeypatch.setattr(loading, "_load_weights", None)  # never needed again
    for _ in range(2):  # the first load on a machine compares, later ones do not
        llm = LLM.from_pretrained(folder)
        assert torch.equal(probe_logits(llm.model), probe_logits(original.model))
        ours, theirs = (each.generate("Hello", max_new_tokens=30) for each in (llm, original))
        assert (ours.tokens, ours.text) == (theirs.tokens, theirs.text)
        assert (llm.info.weights, llm.info.weight_bytes) == (kind, original.info.weight_bytes)
        assert llm.info.parameters == original.info.parameters


def test_it_is_small_and_no_part_is_left_behind(tmp_path: Path) -> None:
    """A float32 copy in the folder, or what is written on the way."""
    saved(tmp_path / "model")
    folder = quantise(tmp_path / "model", "int8", tmp_path / "new" / "small")
    sizes = [(each / TENSORS).stat().st_size for each in (folder,)]
    assert sizes[0] < 0.5 * (tmp_path / "model" / "model.safetensors").stat().st_size
    assert [each.name for each in (tmp_path / "new").iterdir()] == ["small"]
    names = {each.name for each in folder.iterdir()}
    assert {"config.json", "tokenizer.json", QUANTISED, TENSORS} <= names
    assert "model.safetensors" not in names


def test_what_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder overwritten, a model rounded twice, a full disk that leaves half a folder."""
    model = saved(tmp_path / "model")
    folder = quantise(model, "int8", tmp_path / "small")
    with pytest.raises(OptionError, match="there already"):
        quantise(model, "int4", folder)
    with pytest.raises(OptionError, match="quantised already"):
        quantise(folder, "int4", tmp_path / "other")
    with pytest.raises(OptionError, match=r"int9.*int8"):
        quantise(model, "int9", tmp_path / "other")
    with pytest.raises(UnsupportedModel, match="cannot be written"):
        quantise(saved(tmp_path / "unusual", "gpt2"), "int8", tmp_path / "other")
    with monkeypatch.context() as patched:
        free = shutil._ntuple_diskusage(1, 1, 0)  # type: ignore[attr-defined]
        patched.setattr(quantising.shutil, "disk_usage", lambda _: free)
        with pytest.raises(ResourceError, match="--out"):
            quantise(model, "int8", tmp_path / "other")

    def fills_up(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(quantising, "_write", fills_up)
    with pytest.raises(ResourceError, match="filled up"):
        quantise(model, "int8", tmp_path / "other")
    assert not [each for each in tmp_path.iterdir() if "other" in each.name]


def test_what_cannot_be_loaded(tmp_path: Path) -> None:
    """Options that would be ignored, and uses that need transformers' model."""
    folder = quantise(saved(tmp_path / "model"), "int8", tmp_path / "small")
    for options, words in (
        ({"weights": "int4"}, "quantised to int8"),
        ({"kernel": "plain"}, "our own kernels"),
        ({"dtype": "bfloat16"}, "float32 on a CPU"),
        ({"adapter": "live"}, "adapter"),
    ):
        with pytest.raises(OptionError, match=words):
            LLM.from_pretrained(folder, **options)
    assert LLM.from_pretrained(folder, weights="int8", dtype="float32").info.weights == "int8"
    with pytest.raises(UnsupportedModel, match="original"):
        loading.load(folder)


def test_what_does_not_belong_together(tmp_path: Path) -> None:
    """Files of two models or of a newer format, which would run as nonsense."""
    folder = quantise(saved(tmp_path / "model"), "int8", tmp_path / "small")
    other = quantise(saved(tmp_path / "model2", seed=1), "int8", tmp_path / "other")
    shutil.copy(other / TENSORS, folder / TENSORS)
    with pytest.raises(BrokenCheckpoint, match="does not belong"):
        LLM.from_pretrained(folder)
    change(other, format=99)
    with pytest.raises(UnsupportedModel, match="newer"):
        LLM.from_pretrained(other)
    change(other, format=1)
    (other / "config.json").write_text((other / "config.json").read_text() + " ")
    with pytest.raises(BrokenCheckpoint, match=r"config\.json"):
        LLM.from_pretrained(other)


def test_damage_is_noticed(tmp_path: Path) -> None:
    """A file cut short, and numbers that changed under an intact header."""
    folder = quantise(saved(tmp_path / "model"), "int8", tmp_path / "small")
    whole = (folder / TENSORS).read_bytes()
    (folder / TENSORS).write_bytes(whole[:-8])
    with pytest.raises(BrokenCheckpoint, match="truncated"):
        LLM.from_pretrained(folder)
    (folder / TENSORS).write_bytes(whole)
    tensors = load_file(folder / TENSORS)
    with safe_open(folder / TENSORS, "pt") as file:
        metadata = file.metadata()
    save_file({**tensors, "product.0": tensors["product.0"].flip(1)}, folder / TENSORS, metadata)
    with pytest.raises(BrokenCheckpoint, match="something else"):
        LLM.from_pretrained(folder)
