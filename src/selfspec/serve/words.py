"""Single tokens as people and clients read them. A token may be part of a character."""

from __future__ import annotations

import functools
import re
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_BROKEN = "\N{REPLACEMENT CHARACTER}"


def token_text(words: Any, token: int) -> str:
    """A token's text, with a mark for what is no whole character. Without a tokenizer its id."""
    if words is None:
        return str(token)
    text: str = words.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text


def token_bytes(words: Any, token: int) -> bytes:
    """A token's bytes in UTF-8, of parts of characters too."""
    text = token_text(words, token)
    if _BROKEN not in text:
        return text.encode("utf-8", "replace")
    name = words.convert_ids_to_tokens(token)
    if not isinstance(name, str):
        return text.encode()
    if found := _BYTE.fullmatch(name):
        return bytes([int(found[1], 16)])
    alphabet = _byte_level()
    if all(each in alphabet for each in name):
        return bytes(alphabet[each] for each in name)
    return text.encode()


@functools.cache
def _byte_level() -> dict[str, int]:
    """What byte-level vocabularies write for each byte: itself where it can be seen, and the next
    characters from 256 on for the others."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [each for each in range(256) if each not in seen]
    return {chr(each): each for each in seen} | {
        chr(256 + number): each for number, each in enumerate(hidden)
    }
