"""Memory for weights in pages of 2 MB, where the system has them.

A processor's own prefetcher stops where a page ends. On a Zen 4 it reads weights in large pages a
fifth faster than anything that asks for small ones ahead. Weights lie side by side in chunks, as
most matrices are no multiple of such a page. Nothing is taken that is not written to. Where the
system has no such pages, this is usual memory.

Some systems keep files in such pages too, if they are written in whole ones (Linux with XFS, and
from 6.16 on with ext4). What such a file holds is used where it lies, at once and by all processes.
Now and then such a system keeps one in small pages all the same, from start to start: then it has
to forget the file and to read it anew.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
import threading
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

PAGE = 1 << 21
CHUNK = 32 * PAGE
SMALLEST = 1 << 16  # bytes: what is smaller is read in no time
_ALIGNED = 64
_SMALL = 0.25  # of a file's pages may be small ones
_ADVICE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux only


class _Chunk:
    """The chunk that is filled now. It lives as long as a weight in it does."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: weakref.ref[mmap.mmap] | None = None
        self._at = self._end = 0

    def take(self, size: int) -> Tensor:
        """So many bytes."""
        with self._lock:
            held = self._held() if self._held is not None else None
            if held is None or self._at + size > self._end:
                held = self._new(size)
            at = self._at
            self._at += -(-size // _ALIGNED) * _ALIGNED
        return torch.frombuffer(held, dtype=torch.uint8, count=size, offset=at)

    def _new(self, size: int) -> mmap.mmap:
        room = max(size, CHUNK)
        # private, as what several processes may share gets no large pages; a page more, to begin
        # where one begins
        held = mmap.mmap(-1, room + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        address = torch.frombuffer(held, dtype=torch.uint8).data_ptr()
        self._at = -address % PAGE
        self._end = self._at + room
        self._held = weakref.ref(held)
        # of a single large matrix no page beyond its last whole one, which would be memory unused
        whole = room // PAGE * PAGE
        assert _ADVICE is not None
        with suppress(OSError):  # a system without large pages
            held.madvise(_ADVICE, self._at, whole)
        return held


_chunk = _Chunk()


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Memory for weights, not filled."""
    size = math.prod(shape) * dtype.itemsize
    if _ADVICE is None or size < SMALLEST:
        return torch.empty(tuple(shape), dtype=dtype)
    return _chunk.take(size).view(dtype).view(tuple(shape))


def moved(weights: Tensor) -> Tensor:
    """The same weights there."""
    return empty(weights.shape, weights.dtype).copy_(weights)


def write(file: BinaryIO, pieces: Iterable[Any]) -> None:
    """Write a file so that the system can keep it in large pages: many whole ones at a time.
    `pieces`: bytes, or what has some."""
    block = bytearray()
    for piece in pieces:
        block += piece
        if len(block) >= CHUNK:
            whole = len(block) // PAGE * PAGE
            file.write(memoryview(block)[:whole])
            del block[:whole]
    file.write(block)


def mapped(file: BinaryIO, size: int) -> Tensor | None:
    """A file's bytes where the system keeps them, at once; what is written there stays out of the
    file. None: they hardly lie in large pages."""
    if _ADVICE is None or size < PAGE:
        return None
    try:
        held = mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE)
        held.madvise(_ADVICE)
    except OSError:  # a file system that maps none, or a system without large pages
        return None
    data = torch.frombuffer(held, dtype=torch.uint8)
    _faults_of(data[::PAGE])
    small = _faults_of(data[PAGE // 2 :: PAGE])  # none where its page is here since the line above
    return data if small <= _SMALL * size / PAGE else None


def keep_files(folder: Path) -> bool:
    """Whether files there are kept in large pages."""
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            write(file, [bytes(PAGE)])
            file.flush()
            return mapped(file, PAGE) is not None
    return False


def forget(file: BinaryIO) -> None:
    """Let the system forget a file's bytes, so that they come into large pages when they are
    mapped anew. What another process uses, or is not written yet, stays as it is."""
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _faults_of(data: Tensor) -> int:
    """How many pages were not at hand when this is read."""
    from resource import RUSAGE_THREAD, getrusage  # where there are large pages

    before = getrusage(RUSAGE_THREAD).ru_minflt
    for each in data:
        int(each)
    return getrusage(RUSAGE_THREAD).ru_minflt - before
