"""JSON from elsewhere: whatever is wrong with it is a ValueError."""

from __future__ import annotations

import json
from typing import Any


def from_json(text: str | bytes) -> Any:
    """The value of a JSON text. Nested too deep is wrong as well, and so is half of a pair."""
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply to be read") from error
    mark = b"\\ud" if isinstance(text, bytes) else "\\ud"
    if mark in text.lower():  # type: ignore[operator]
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = f"\\u{ord(error.object[error.start]):04x}"
            raise ValueError(f"{half} is half of a pair, and no character alone") from error
    return value
