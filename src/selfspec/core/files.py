"""Files that are written: whole or not at all, and with an error that says what to do."""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from ..errors import OptionError, ResourceError

_BEGUN = re.compile(r"\..+\.[0-9a-f]{8}\.new")


def write_whole(path: Path, data: bytes | str) -> None:
    """Written whole or not at all: a full disk or a kill leaves what was there before."""
    require_file(path)
    with writing(path), whole_file(path, durable=True) as file:
        file.write(data.encode() if isinstance(data, str) else data)


@contextmanager
def whole_file(path: Path, durable: bool = False) -> Iterator[BinaryIO]:
    """A file to write, which takes the place of `path` at the end unless something is raised."""
    with whole_path(path, durable) as new, new.open("xb") as file:
        yield file


@contextmanager
def whole_path(path: Path, durable: bool = False) -> Iterator[Path]:
    """Where to write a file, or a new folder, which takes the place of `path` at the end unless
    something is raised.

    `durable`: on the disk before it does, so that not even a power cut leaves a torn one. What
    is made again for free, or checked when it is read, need not wait for a disk.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.new")
    try:
        yield new
        if durable and new.is_dir():
            os.sync()
        elif durable:
            with new.open("rb") as file:
                os.fsync(file.fileno())
        os.replace(new, path)
    finally:
        _remove(new)


def clear_left_over(folder: Path, name: str = "") -> None:
    """Remove what killed processes had begun in a folder where nobody else writes now: of files
    with names that begin like this."""
    for stale in folder.glob(".*.new"):
        if _BEGUN.fullmatch(stale.name) and stale.name.startswith(f".{name}"):
            _remove(stale)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """What the system refuses while a file is written becomes an error about that file."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise ResourceError(
            f"{path} cannot be written ({reason}); what was there before is as it was. Make room, "
            "or name another place that can be written to"
        ) from error


def require_file(path: Path) -> None:
    """Raise if something that is no file stands where one is to be written. A device would be
    replaced, a pipe waited for, and what is read back from either may have no end."""
    try:
        if "\0" in str(path):
            raise ValueError("a zero byte")
        other = path.exists() and not path.is_file()
        kind = "a folder" if path.is_dir() else "a device or a pipe"
    except (OSError, ValueError) as error:
        raise OptionError(f"{str(path)!r} cannot name a file ({error}); name another") from error
    if other:
        raise OptionError(f"{path} is {kind}, and the output has to be a file; name a file")


def is_there(path: Path) -> bool:
    """Whether a file to be read is there. A name that no file can have is none, and a device has
    no end."""
    try:
        return path.is_file()
    except (OSError, ValueError):  # too long, or with a zero byte
        return False


def is_named(path: Path) -> bool:
    """Whether a file or folder is there. A name that none can have is none."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def require_output(path: Path) -> None:
    """Raise now, not after hours of work, if a file cannot be written there."""
    require_file(path)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise PermissionError(13, "it is read-only for you")
