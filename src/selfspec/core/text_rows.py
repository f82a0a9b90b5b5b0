"""Rows of text from where people keep them: JSONL, plain text, and datasets of `datasets`.

A source is a file (`.jsonl` or `.json`, also with `.gz`; any other file is one row `{"text":
...}`), a folder that `datasets` saved (`save_to_disk`), or a dataset on the hub: `hf:NAME`,
`hf:NAME@SPLIT`, `hf:NAME#CONFIG@SPLIT`. Each row comes with its place, for error messages. Does not
know what rows mean.
"""

from __future__ import annotations

import gzip
import importlib
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ..errors import DataError, Unavailable
from .json_text import from_json

HUB = "hf:"
Row = dict[str, Any]


def read_rows(source: str | Path) -> Iterator[tuple[str, Row]]:
    """The rows of a source, each with its place."""
    path = Path(source)
    if str(source).startswith(HUB) or path.is_dir():
        yield from _dataset_rows(str(source))
        return
    if path.with_suffix("" if path.suffix == ".gz" else path.suffix).suffix in (".jsonl", ".json"):
        rows = _objects(path)
    else:
        text = "".join(read_lines(path))
        rows = iter([(str(path), {"text": text})] if text.strip() else [])
    empty = True
    for row in rows:
        empty = False
        yield row
    if empty:
        raise DataError(f"{path} is empty, so there is nothing to read from it")


def require(sources: Iterable[str | Path]) -> None:
    """Fail now, not after minutes of other work, if a source is not there."""
    files = [str(source) for source in sources if not str(source).startswith(HUB)]
    missing = [file for file in files if not Path(file).exists()]
    if missing:
        raise DataError(f"there is no file {', '.join(missing)}; check the path")


def read_lines(path: Path) -> Iterator[str]:
    """The lines of a file. Only a line feed ends one, as JSON may hold a bare U+2028."""
    kind: Any = gzip.open if path.suffix == ".gz" else open
    try:
        if path.is_char_device() or path.is_block_device():  # a pipe may be read
            raise OSError("it is a device, which has no end")
        with kind(path, "rt", encoding="utf-8", newline="\n") as lines:
            yield from lines
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise DataError(
            f"{path} cannot be read as text ({error}); give JSONL or plain text in UTF-8"
        ) from error


def _objects(path: Path) -> Iterator[tuple[str, Row]]:
    for number, line in enumerate(read_lines(path), start=1):
        where = f"{path}:{number}"
        if not line.strip():
            continue
        try:
            value = from_json(line)
        except ValueError as error:
            raise DataError(
                f"{where} cannot be read as JSON ({error}); write one object a line"
            ) from error
        if not isinstance(value, dict):
            kind = type(value).__name__
            raise DataError(f"{where} is a JSON {kind}; write one object a line: {{'text': ...}}")
        yield where, value


def _dataset_rows(source: str) -> Iterator[tuple[str, Row]]:
    try:
        library: Any = importlib.import_module("datasets")
    except ImportError as error:
        raise Unavailable(
            f"{source} is read with `datasets`, which is not installed: pip install datasets"
        ) from error
    name, _, split = source.removeprefix(HUB).partition("@")
    name, _, config = name.partition("#")
    try:
        if source.startswith(HUB):
            rows = library.load_dataset(name, config or None, split=split or "train")
        else:
            rows = library.load_from_disk(source)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise DataError(
            f"the dataset {source} cannot be opened: {reason}. Write hf:NAME#CONFIG@SPLIT (config "
            "and split may be left out), or give a folder that `datasets` saved"
        ) from error
    if not hasattr(rows, "column_names") or isinstance(rows.column_names, dict):
        splits = ", ".join(map(str, rows))
        raise DataError(f"the dataset {source} has the splits {splits}; name one: hf:NAME@SPLIT")
    for number, row in enumerate(rows, start=1):
        yield f"{source}:{number}", dict(row)
