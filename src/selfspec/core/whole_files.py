"""Files that are there whole or not at all. Does not know what is in them."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def whole_file(path: Path, durable: bool = False) -> Iterator[BinaryIO]:
    """A file to write, which takes the place of `path` at the end unless something is raised.

    `durable`: on the disk before it does, so that not even a power cut leaves a torn one. What
    is made again for free, or checked when it is read, need not wait for a disk.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.new")
    try:
        with new.open("xb") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


def write_whole(path: Path, data: bytes, durable: bool = True) -> None:
    """Written whole or not at all."""
    with whole_file(path, durable) as file:
        file.write(data)
