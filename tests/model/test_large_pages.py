"""Memory for weights in large pages is memory like any other, and goes back with the weights."""

from __future__ import annotations

import gc
import io
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from selfspec.model.compute.cpu import large_pages, native
from selfspec.model.compute.cpu.kinds import KINDS
from selfspec.model.compute.cpu.linear import PackedLinear

sizes = st.lists(st.integers(0, 3 * large_pages.SMALLEST), max_size=12)


@given(sizes)
@settings(max_examples=20, deadline=None)
def test_no_weights_share_memory(wanted: list[int]) -> None:
    """A matrix that begins before another one ends, or in the middle of a cache line."""
    made = [large_pages.empty([size], torch.uint8) for size in wanted]
    for number, each in enumerate(made):
        each.fill_(number)
    assert [len(each) for each in made] == wanted
    assert all((each == number).all() for number, each in enumerate(made))
    large = [each for each in made if len(each) >= large_pages.SMALLEST]
    assert all(each.data_ptr() % 64 == 0 for each in large)


def test_shapes_and_numbers_are_kept() -> None:
    """Bytes taken for numbers, or rows for columns."""
    weights = torch.randn(300, 130).bfloat16()
    for each in (weights, weights.float(), weights.T):
        assert torch.equal(large_pages.moved(each), each)


@pytest.mark.skipif(large_pages._ADVICE is None, reason="this system has no such pages")
def test_memory_goes_back_with_the_last_weight_in_it() -> None:
    """A chunk that is held by who hands it out: each model loaded would add to the memory."""
    chunk = large_pages._Chunk()
    some, others = (chunk.take(large_pages.CHUNK // 2) for _ in range(2))
    assert some.data_ptr() + len(some) == others.data_ptr()
    held = chunk._held
    assert held is not None
    part = some[5:]
    del some, others
    gc.collect()
    assert held() is not None  # a part is left
    del part
    gc.collect()
    assert held() is None
    assert len(chunk.take(3 * large_pages.CHUNK)) == 3 * large_pages.CHUNK


@pytest.mark.skipif(large_pages._ADVICE is None, reason="this system has no such pages")
def test_a_large_matrix_begins_with_a_page() -> None:
    """Pages that begin elsewhere, of which the system makes none."""
    chunk = large_pages._Chunk()
    found = [chunk.take(size) for size in (large_pages.CHUNK + 4096, 2 * large_pages.CHUNK)]
    assert all(each.data_ptr() % large_pages.PAGE == 0 for each in found)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="only Linux says so")
def test_what_is_not_written_takes_nothing() -> None:
    """A chunk that is filled when it is made: 64 MB for each small model."""

    def resident() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))

    before = resident()
    held = large_pages._Chunk().take(4 * large_pages.CHUNK)
    assert len(held) == 4 * large_pages.CHUNK
    assert resident() - before < large_pages.CHUNK // 1024


def test_a_system_without_such_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load that fails on macOS or Windows."""
    monkeypatch.setattr(large_pages, "_ADVICE", None)
    weights = torch.randn(400, 100)
    assert torch.equal(large_pages.moved(weights), weights)


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"stored"}))
def test_weights_of_every_kind_lie_there(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kind that is packed into usual memory: as right, and slower."""
    try:
        native.library()
    except native.NoNative as reason:
        pytest.skip(str(reason))
    asked: list[int] = []
    usual = large_pages.empty

    def empty(shape: list[int], dtype: torch.dtype) -> torch.Tensor:
        made = usual(shape, dtype)
        asked.append(made.data_ptr())
        return made

    monkeypatch.setattr(large_pages, "empty", empty)
    linear: PackedLinear = KINDS[kind]([torch.randn(512, 256)], [None])
    assert asked == [linear.memory.data_ptr()]


pieces = st.lists(st.binary(max_size=9) | st.integers(0, 3 * 4096).map(bytes), max_size=9)


@given(pieces)
@settings(max_examples=30, deadline=None)
def test_a_file_holds_its_pieces(some: list[bytes]) -> None:
    """A rest that is not written, or written twice."""
    file = io.BytesIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large_pages, "PAGE", 8)
        patch.setattr(large_pages, "CHUNK", 32)
        large_pages.write(file, some)
    assert file.getvalue() == b"".join(some)


def test_a_file_is_used_where_it_lies(tmp_path: Path) -> None:
    """Other bytes than the file has, or a change that reaches it and so all other processes."""
    if not large_pages.keep_files(tmp_path):
        pytest.skip("this system keeps no files in large pages")
    numbers = torch.arange(3 * large_pages.PAGE // 8 + 5)
    path = tmp_path / "some"
    with path.open("wb") as file:
        large_pages.write(file, [numbers[:7].numpy().data.cast("B"), numbers[7:].numpy().data])
    with path.open("rb") as file:
        found = large_pages.mapped(file, numbers.nbytes)
    if found is None:
        pytest.skip("this system has no large pages left")
    assert torch.equal(found.view(torch.int64), numbers)
    found.zero_()
    assert torch.equal(torch.from_file(str(path), size=len(numbers), dtype=torch.int64), numbers)


def test_a_file_in_small_pages_is_read(tmp_path: Path) -> None:
    """Weights in small pages for as long as a process lives, where reading them once would do."""
    with (tmp_path / "some").open("w+b", buffering=0) as file:
        for _ in range(3 * large_pages.PAGE // 4096):
            file.write(bytes(4096))
        assert large_pages.mapped(file, 3 * large_pages.PAGE) is None


def test_a_forgotten_file_comes_into_large_pages(tmp_path: Path) -> None:
    """Half a gigabyte read at every start for as long as a system keeps a file in small pages."""
    if not large_pages.keep_files(tmp_path):
        pytest.skip("this system keeps no files in large pages")
    numbers = torch.arange(3 * large_pages.PAGE // 8)
    with (tmp_path / "some").open("w+b", buffering=0) as file:
        for part in numbers.split(512):
            file.write(part.numpy().data.cast("B"))
        assert large_pages.mapped(file, numbers.nbytes) is None
        os.fsync(file.fileno())
        large_pages.forget(file)
        found = large_pages.mapped(file, numbers.nbytes)
    if found is None:
        pytest.skip("this system has no large pages left, or its disk is memory")
    assert torch.equal(found.view(torch.int64), numbers)


def test_a_file_that_cannot_be_mapped_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error, and weights packed at every load, on a file system that maps no files."""

    def refuse(*_: object) -> None:
        raise OSError(19, "No such device")

    monkeypatch.setattr(large_pages.mmap, "mmap", refuse)
    (tmp_path / "some").write_bytes(bytes(large_pages.PAGE))
    with (tmp_path / "some").open("rb") as file:
        assert large_pages.mapped(file, large_pages.PAGE) is None


def test_a_folder_where_nothing_can_be_written(tmp_path: Path) -> None:
    """An error, where only time could be saved."""
    (tmp_path / "file").touch()
    assert not large_pages.keep_files(tmp_path / "file" / "below")
