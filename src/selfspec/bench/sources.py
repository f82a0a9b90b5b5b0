"""Rows out of files and out of the hub: JSONL, plain or gzipped, and text. The one place that imports `datasets`.

A line that cannot be read is an error with its number, or left out aloud. Knows no task.
"""

from __future__ import annotations

import gzip
import json
from collections import UserDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import OptionError, Unavailable


class Row(UserDict[str, Any]):
    """A row that remembers where it stood."""

    def __init__(self, values: dict[str, Any], file: str, number: int) -> None:
        super().__init__(values)
        self.file, self.number = file, number


@dataclass(frozen=True)
class Hub:
    """A data set of the Hugging Face hub."""

    name: str
    config: str | None = None
    split: str = "test"
    data: str | None = None
    """A file to read with the builder `name`."""


def read_text(path: Path) -> str:
    """A text file, gzipped or not."""
    if not path.is_file():
        raise OptionError(f"there is no file {path.name!r}; check the path after the task's '='")
    try:
        if path.suffix == ".gz":
            with gzip.open(path, "rt", encoding="utf-8") as file:
                return file.read()
        return path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError) as error:
        raise OptionError(f"{path.name} is not text in UTF-8 ({error}), so it has no questions; convert it") from error


def read_rows(path: Path, skip_bad: bool, skipped: list[str]) -> list[Row]:
    """The rows of a JSONL file; with `skip_bad`, why a line was left out is added to `skipped`."""
    rows = []
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            if not isinstance(value, dict):
                raise ValueError(f"a {type(value).__name__}, not an object")
            rows.append(Row(value, path.name, number))
        except ValueError as error:
            reason = f"{path.name}, line {number}: not a JSON object ({error})"
            if not skip_bad:
                raise OptionError(f"{reason}; mend or remove it, or use the rest with --skip-bad") from error
            skipped.append(reason)
    return rows


def read_hub(hub: Hub, task: str) -> list[Row]:
    """A split of a data set, fetched once by `datasets`."""
    try:
        import datasets
    except ImportError as error:
        raise Unavailable(
            f"the task {task!r} without a path comes from the Hugging Face hub, which needs the package datasets: "
            f"pip install 'selfspec[bench]', or give a file: {task}=PATH"
        ) from error
    files = {} if hub.data is None else {"data_files": hub.data}
    try:
        found = datasets.load_dataset(hub.name, hub.config, split=hub.split, **files)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise Unavailable(
            f"{hub.data or hub.name} could not be fetched ({type(error).__name__}: {str(error)[:200]}); "
            f"give a file instead: {task}=PATH"
        ) from error
    return [Row(dict(row), hub.name, number) for number, row in enumerate(found, start=1)]
