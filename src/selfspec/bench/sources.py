"""Rows of questions out of files, JSONL, plain or gzipped, parquet and text, and out of the hub.

A line that cannot be read is an error with its number, or left out aloud. Knows no task.
"""

from __future__ import annotations

import importlib
from collections import UserDict
from pathlib import Path
from typing import Any

from ..core import text_rows as rows
from ..core.json_text import from_json
from ..errors import DataError, OptionError, Unavailable


class Row(UserDict[str, Any]):
    """A row that remembers where it stood."""

    def __init__(self, values: dict[str, Any], file: str, number: int) -> None:
        super().__init__(values)
        self.file, self.number = file, number


def read_text(path: Path) -> str:
    """A text file, gzipped or not."""
    if not path.is_file():
        raise OptionError(f"there is no file {path.name!r}; check the path after the task's '='")
    return "".join(rows.read_lines(path))


def read_rows(path: Path, skip_bad: bool, skipped: list[str]) -> list[Row]:
    """The rows of a JSONL or parquet file; with `skip_bad`, why a line was left out is added to
    `skipped`."""
    if path.suffix == ".parquet":
        return _parquet(path)
    found = []
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            value = from_json(line)
            if not isinstance(value, dict):
                raise ValueError(f"a {type(value).__name__}, not an object")
            found.append(Row(value, path.name, number))
        except ValueError as error:
            reason = f"{path.name}, line {number}: not a JSON object ({error})"
            if not skip_bad:
                raise OptionError(
                    f"{reason}; mend or remove it, or use the rest with --skip-bad"
                ) from error
            skipped.append(reason)
    return found


def _parquet(path: Path) -> list[Row]:
    if not path.is_file():
        raise OptionError(f"there is no file {path.name!r}; check the path after the task's '='")
    try:
        arrow: Any = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise Unavailable(
            f"{path.name} is read with `pyarrow`, which is not installed: pip install pyarrow; or "
            "give the rows as JSONL"
        ) from error
    try:
        rows = arrow.read_table(path).to_pylist()
    except (OSError, ValueError) as error:  # what pyarrow raises of files that it cannot read
        raise OptionError(
            f"{path.name} cannot be read as parquet ({error}); give a whole parquet file, or JSONL"
        ) from error
    return [Row(row, path.name, number) for number, row in enumerate(rows, start=1)]


def read_hub(source: str, task: str) -> list[Row]:
    """The rows of a data set of the hub, `hf:NAME#CONFIG@SPLIT`."""
    try:
        found = enumerate(rows.read_rows(source), start=1)
        return [Row(row, source, number) for number, (_, row) in found]
    except (DataError, Unavailable) as error:
        raise Unavailable(f"{error} Or give a file: {task}=PATH") from error
