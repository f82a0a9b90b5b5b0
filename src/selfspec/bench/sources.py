"""Rows of questions out of files, JSONL, plain or gzipped, and text, and out of the hub.

A line that cannot be read is an error with its number, or left out aloud. Knows no task.
"""

from __future__ import annotations

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
    """The rows of a JSONL file; with `skip_bad`, why a line was left out is added to `skipped`."""
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


def read_hub(source: str, task: str) -> list[Row]:
    """The rows of a data set of the hub, `hf:NAME#CONFIG@SPLIT`."""
    try:
        found = enumerate(rows.read_rows(source), start=1)
        return [Row(row, source, number) for number, (_, row) in found]
    except (DataError, Unavailable) as error:
        raise Unavailable(f"{error} Or give a file: {task}=PATH") from error
