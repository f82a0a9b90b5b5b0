"""Files that are written: whole or not at all, and with an error that says what to do."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from ..errors import OptionError, ResourceError


def write_whole(path: Path, data: bytes | str) -> None:
    """Written whole or not at all: a full disk or a kill leaves what was there before."""
    require_file(path)
    with writing(path), whole_file(path, durable=True) as file:
        file.write(data.encode() if isinstance(data, str) else data)


@contextmanager
def whole_file(path: Path, durable: bool = False) -> Iterator[BinaryIO]:
    """A file to write, which takes the place of `path` at the end unless something is raised.

    `durable`: on the disk before it does, so that not even a power cut leaves a torn one. What
    is made again for free, or checked when it is read, need not wait for a disk.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # what a killed process leaves behind is overwritten by none and found by its name
    new = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.new")
    try:
        with new.open("xb") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


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
