"""Packed weights that are kept: the same bits, unchanged, and never those of something else."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import BinaryIO

import pytest
import torch

from selfspec import LLM
from selfspec.core import files as whole_files
from selfspec.errors import OptionError
from selfspec.model.compute.cpu import few_bits, large_pages, packs
from selfspec.model.copies import copy_in
from selfspec.model.probing import probe_logits
from selfspec.testing import tiny_model

KINDS = ["int8", "int4", "bfloat16"]


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A model, and a cache of its own that has the compiled kernels."""
    for module in ("selfspec.model.remembered", "selfspec.model.compute.cpu.packs"):
        monkeypatch.setattr(f"{module}.cache_root", lambda: tmp_path / "cache")
    monkeypatch.delenv(packs.LIMIT_VARIABLE, raising=False)
    tiny_model("llama").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many matrices were packed."""
    counts: list[int] = []
    usual = few_bits.PanelBytes.pack

    def counted(self: few_bits.PanelBytes, weight: torch.Tensor) -> torch.Tensor:
        counts.append(len(weight))
        return usual(self, weight)

    monkeypatch.setattr(few_bits.PanelBytes, "pack", counted)
    return counts


def files() -> list[Path]:
    return sorted(packs.packed_folder().glob("*"))


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits_as_freshly_packed(
    kind: str, folder: Path, packed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A product that gets another's memory, or a tail that is not written."""
    fresh = LLM.from_pretrained(folder, weights=kind)
    made, (file,) = len(packed), files()
    before = hashlib.sha256(file.read_bytes()).digest()
    kept = LLM.from_pretrained(folder, weights=kind)
    assert made and len(packed) == made, "packed again"
    for one, other in zip(fresh.model.linears, kept.model.linears, strict=True):
        assert torch.equal(one.memory, other.memory)  # type: ignore[attr-defined]
    assert torch.equal(probe_logits(fresh.model), probe_logits(kept.model))
    kept.model.linears[0].memory.fill_(7)  # type: ignore[attr-defined]
    assert hashlib.sha256(file.read_bytes()).digest() == before, "a change reached the file"
    assert not os.access(file, os.W_OK) or not file.stat().st_mode & 0o222
    monkeypatch.setenv(packs.LIMIT_VARIABLE, "0")
    LLM.from_pretrained(folder, weights=kind)
    assert len(packed) == 2 * made, "switched off, and used all the same"


def test_a_copy_that_drafts_is_kept_too(folder: Path, packed: list[int]) -> None:
    """A copy made anew at each start, or taken for that of another kind, model or view."""
    copies = [copy_in(LLM.from_pretrained(folder).model, "int8") for _ in range(2)]
    made = len(packed)
    assert made == len(copies[0].linears), "packed again, or not at all"
    assert torch.equal(*(probe_logits(each) for each in copies))
    model = LLM.from_pretrained(folder).model
    turned = model.view(blocks=model.blocks[::-1])
    other = probe_logits(copy_in(turned, "int8"))
    assert len(packed) == 2 * made, "a view got the copy of the whole model"
    assert not torch.equal(other, probe_logits(copies[0]))
    four = copy_in(LLM.from_pretrained(folder, weights="int8").model, "int4")
    assert not torch.equal(probe_logits(four), probe_logits(copy_in(model, "int4")))


@pytest.mark.parametrize("damage", ["short", "zeros", "header", "place", "empty", "folder"])
def test_a_damaged_file_is_made_anew(damage: str, folder: Path, packed: list[int]) -> None:
    """What a full disk or a power cut leaves, used as weights or in the way for ever."""
    right = probe_logits(LLM.from_pretrained(folder, weights="int8").model)
    made, (file,) = len(packed), files()
    data = file.read_bytes()
    middle = len(data) * 2 // 3
    file.unlink()
    if damage == "folder":
        file.mkdir()
    else:
        broken = {
            "short": data[:-64], "zeros": data[:middle] + bytes(4096) + data[middle + 4096 :],
            "header": b"x" + data[1:], "empty": b"",
            # of another place, which the numbers themselves cannot tell
            "place": re.sub(rb'"at": [2-9]', b'"at": 1', data, count=1),
        }  # fmt: skip
        assert broken[damage] != data
        file.write_bytes(broken[damage])
    assert torch.equal(probe_logits(LLM.from_pretrained(folder, weights="int8").model), right)
    assert len(packed) == 2 * made
    assert torch.equal(probe_logits(LLM.from_pretrained(folder, weights="int8").model), right)
    assert len(packed) == (3 if damage == "folder" else 2) * made


@pytest.mark.parametrize("where", ["used where they lie", "read", "read, and small"])
def test_float32_is_kept_where_no_file_need_be_read(
    where: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a gigabyte on the disk that saves no time, or numbers taken for bytes."""
    monkeypatch.setattr(large_pages, "keep_files", lambda _: where != "read")
    monkeypatch.setattr(large_pages, "CHUNK", 1 << (30 if "small" in where else 10))
    fresh, kept = (LLM.from_pretrained(folder).model for _ in range(2))
    assert len(files()) == (where == "used where they lie")
    for one, other in zip(fresh.linears, kept.linears, strict=True):
        assert torch.equal(one.memory, other.memory)  # type: ignore[attr-defined]
    assert torch.equal(probe_logits(fresh), probe_logits(kept))
    for file in files():
        file.chmod(0o644)
        file.write_bytes(file.read_bytes()[:-64] + bytes(range(64)))  # a torn one is seen as well
    assert torch.equal(probe_logits(LLM.from_pretrained(folder).model), probe_logits(fresh))


def test_large_files_are_used_where_they_lie(
    folder: Path, packed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A header counted among the numbers, or a torn file that is used as it is."""
    monkeypatch.setattr(large_pages, "mapped", lambda file, size: whole(file))
    right = probe_logits(LLM.from_pretrained(folder, weights="int8").model)
    made, (file,) = len(packed), files()
    assert torch.equal(probe_logits(LLM.from_pretrained(folder, weights="int8").model), right)
    assert len(packed) == made
    file.chmod(0o644)
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2] + bytes(4096) + data[len(data) // 2 + 4096 :])
    assert torch.equal(probe_logits(LLM.from_pretrained(folder, weights="int8").model), right)
    assert len(packed) == 2 * made


@pytest.mark.parametrize("system", ["could", "could, and does not", "never does"])
def test_a_file_in_small_pages_is_read_anew_where_that_may_help(
    system: str, folder: Path, packed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is read from the disk at each start of a system that has no large pages, or one
    that is packed anew where its pages stay small."""
    forgotten: list[BinaryIO] = []

    def mapped(file: BinaryIO, size: int) -> torch.Tensor | None:
        return whole(file) if forgotten and system == "could" else None

    monkeypatch.setattr(large_pages, "mapped", mapped)
    monkeypatch.setattr(large_pages, "keep_files", lambda _: system != "never does")
    monkeypatch.setattr(large_pages, "forget", forgotten.append)
    monkeypatch.setattr(large_pages, "CHUNK", 1 << 10)
    right = probe_logits(LLM.from_pretrained(folder, weights="int8").model)
    made = len(packed)
    assert torch.equal(probe_logits(LLM.from_pretrained(folder, weights="int8").model), right)
    assert len(packed) == made
    assert len(forgotten) == (system != "never does")


def whole(file: BinaryIO) -> torch.Tensor:
    file.seek(0)
    return torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)


def test_other_weights_are_packed_anew(folder: Path, packed: list[int]) -> None:
    """The old packed weights for a folder whose file was replaced."""
    old = probe_logits(LLM.from_pretrained(folder, weights="int8").model)
    tiny_model("llama", seed=1).save_pretrained(folder)
    new = [probe_logits(LLM.from_pretrained(folder, weights="int8").model) for _ in range(2)]
    assert torch.equal(*new) and not torch.equal(new[0], old)
    assert len(files()) == 1, "the old one is in the way"


def test_no_more_than_the_limit_is_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A cache that grows without end, or the file in use thrown away first."""
    LLM.from_pretrained(folder, weights="int8")
    (old,) = files()
    monkeypatch.setenv(packs.LIMIT_VARIABLE, str(1.5 * old.stat().st_size / 1e9))
    LLM.from_pretrained(folder, weights="int4")
    (left,) = files()
    assert left != old and packs.kept_bytes() == left.stat().st_size
    monkeypatch.setenv(packs.LIMIT_VARIABLE, "much")
    with pytest.raises(OptionError, match="much"):
        LLM.from_pretrained(folder, weights="int4")


def test_a_full_disk_is_said_and_nothing_else(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An error, or half a file, where only time can be saved."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(whole_files.os, "replace", full)
    LLM.from_pretrained(folder, weights="int8")
    assert not files()
    assert "could not be kept" in caplog.text
