"""Packed weights kept in the user's cache, so that a later load only reads them.

A file holds the products of one model in one kind, in the order in which the model makes them. It
is never changed: a new one takes its place. Where the system keeps it in large pages it is used as
it lies there, by all processes at once; else it is read whole into large pages, as small ones are
slower in each pass. A header names what it was made of and has a hash. A sum over all its bytes
tells a torn or damaged file, and that one is made anew. The files that were used last are kept, up
to `$SELFSPEC_PACKED_GB`. Does not know models.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ....core.files import whole_file
from ....core.user_cache import cache_root
from ....errors import OptionError
from . import large_pages
from .linear import PackedLinear

LIMIT_VARIABLE = "SELFSPEC_PACKED_GB"
_LIMIT = 4.0
_HEADER, _ALIGNED = 64, 64  # for the header's length and its hash; where a product begins
_log = logging.getLogger(__name__)


class Shelf:
    """Products in the order in which a model makes them. This one has none ready."""

    def __init__(self) -> None:
        self.made: list[tuple[str, PackedLinear]] = []

    def take(self, kind: str, outputs: int, inputs: int) -> Tensor | None:
        """The next product's packed weights, if they are there."""
        return None

    def put(self, kind: str, linear: PackedLinear) -> None:
        """The next product was made."""
        self.made.append((kind, linear))

    def close(self) -> None:
        """All products were made and are to be used."""
        self.made = []


@dataclass(frozen=True)
class Packs:
    """Where the packed weights of one model are kept. `name`: of its files. `key`: what else they
    depend on."""

    name: str
    key: str

    def shelf(self, kind: str) -> KeptShelf:
        """The products in a kind: those of the file, if it is there and whole."""
        path = packed_folder() / f"{self.name}-{kind}.packed"
        found = _read(path, self.key) if limit() else None
        return KeptShelf(path, self.key, *(found or ((), None)))


class KeptShelf(Shelf):
    """Products that come from a file, or will be kept in it."""

    def __init__(
        self, path: Path, key: str, entries: Sequence[dict[str, Any]], data: Tensor | None
    ) -> None:
        super().__init__()
        self._path, self._key, self._entries, self._data = path, key, entries, data

    def take(self, kind: str, outputs: int, inputs: int) -> Tensor | None:
        number = len(self.made)
        entry = self._entries[number] if number < len(self._entries) else None
        if entry is None or entry["of"] != [kind, outputs, inputs] or self._data is None:
            return None
        shape, numbers = entry["shape"], getattr(torch, entry["numbers"])
        first, size = entry["at"], math.prod(shape) * numbers.itemsize
        return self._data[first : first + size].view(numbers).view(shape)

    def close(self) -> None:
        """Write the products, unless they come from the file. Where they cannot be written, the
        next load packs again."""
        self._keep()
        super().close()

    def _keep(self) -> None:
        size = sum(linear.memory.nbytes for _, linear in self.made)
        if self._data is not None or not size or size > limit() or not self._worth_it(size):
            return
        try:
            self._write()
            _forget(self._path)
        except OSError as error:  # a full disk, say
            _log.warning(
                "Packed weights could not be kept in %s (%s): every load packs them again. "
                "$%s=0 keeps none.", self._path, error, LIMIT_VARIABLE,
            )  # fmt: skip

    def _worth_it(self, size: int) -> bool:
        """Float32 is packed as fast as a file is read, and is kept where none need be read."""
        if any(kind != "float32" for kind, _ in self.made):
            return True
        return _could_lie_large(size, self._path.parent)

    def _write(self) -> None:
        entries, at = [], 0
        for kind, linear in self.made:
            of, shape = [kind, linear.outputs, linear.inputs], list(linear.memory.shape)
            numbers = str(linear.memory.dtype).removeprefix("torch.")
            entries.append({"of": of, "shape": shape, "numbers": numbers, "at": at})
            at += -(-linear.memory.nbytes // _ALIGNED) * _ALIGNED
        header = {"key": self._key, "bytes": at, "products": entries}
        header["sum"] = sum(_sum(_bytes(linear)) for _, linear in self.made) % (1 << 64)
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % _ALIGNED)
        with whole_file(self._path) as file:
            large_pages.write(file, self._pieces(text))
            os.fchmod(file.fileno(), 0o444)

    def _pieces(self, text: bytes) -> Iterator[bytes | memoryview]:
        """What the file consists of."""
        yield f"{len(text)} {_hash(text)}".encode().ljust(_HEADER) + text
        for _, linear in self.made:
            yield _bytes(linear).numpy().data
            yield b"\0" * (-linear.memory.nbytes % _ALIGNED)


def packed_folder() -> Path:
    """Where packed weights are kept."""
    return cache_root() / "packed"


def limit() -> int:
    """How many bytes are kept at most."""
    asked = os.environ.get(LIMIT_VARIABLE, "")
    try:
        size = float(asked or _LIMIT)
    except ValueError:
        size = -1
    if not size >= 0:
        raise OptionError(
            f"${LIMIT_VARIABLE}={asked!r} is how many GB of packed weights are kept in "
            f"{packed_folder()}: a number, and 0 keeps none"
        )
    return int(size * 1e9)


def kept_bytes() -> int:
    """How much is kept now."""
    return sum(size for _, size, _ in _kept())


def _kept() -> list[tuple[float, int, Path]]:
    """(last used, bytes, file), the last used first."""
    found = []
    for file in packed_folder().glob("*.packed"):
        with suppress(OSError):  # removed meanwhile
            found.append((file.stat().st_mtime, file.stat().st_size, file))
    return sorted(found, reverse=True)


def _forget(newest: Path) -> None:
    """Remove what was not used for longest, beyond the limit."""
    left = limit() - newest.stat().st_size
    for _, size, file in _kept():
        if file != newest:
            left -= size
            if left < 0:
                file.unlink(missing_ok=True)


def _read(path: Path, key: str) -> tuple[list[dict[str, Any]], Tensor] | None:
    """The products of a file and its bytes. None: it is not there, for something else or torn."""
    try:
        with path.open("rb") as file:
            digits, expected = file.read(_HEADER).split()
            length = int(digits)
            text = file.read(length)
            if _hash(text) != expected.decode():
                raise ValueError("its header is damaged")
            header = json.loads(text)
            size, first = header["bytes"], file.tell()
            if header["key"] != key or os.fstat(file.fileno()).st_size != first + size:
                return None
            data = _numbers(file, first, size)
        if _sum(data) != header["sum"]:
            _log.warning("%s is damaged, so weights are packed again.", path)
            return None
        os.utime(path)
        products: list[dict[str, Any]] = header["products"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        _log.warning("%s cannot be read (%s), so weights are packed again.", path, error)
        return None
    return products, data


def _numbers(file: BufferedReader, first: int, size: int) -> Tensor:
    """The bytes behind the header, which was read."""
    whole = large_pages.mapped(file, first + size)
    if whole is None and _could_lie_large(size, Path(file.name).parent):
        large_pages.forget(file)
        whole = large_pages.mapped(file, first + size)
    if whole is not None:
        return whole[first:]
    data = large_pages.empty([size], torch.uint8)
    if file.readinto(data.numpy().data) != size:
        raise ValueError("it was cut short meanwhile")
    return data


def _could_lie_large(size: int, folder: Path) -> bool:
    """Whether the system would keep a file of this size there in large pages, now."""
    return size >= large_pages.CHUNK and large_pages.keep_files(folder)


def _hash(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:40]


def _bytes(linear: PackedLinear) -> Tensor:
    return linear.memory.flatten().view(torch.uint8)


def _sum(data: Tensor) -> int:
    """The sum of 64-bit numbers; what fills no whole one counts as zeros behind it."""
    whole = data.numel() // 8 * 8
    rest = int.from_bytes(bytes(data[whole:].tolist()), "little")
    return (int(data[:whole].view(torch.int64).sum()) + rest) % (1 << 64)
