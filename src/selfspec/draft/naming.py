"""Candidates for exits: a drafter that only names what may come next, and never drafts itself.

Does not know what the candidates are for.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import OptionError
from .base import DraftSession, Target, Texts
from .registry import drafter_class, make_drafter


def start_naming(source: str, target: Target) -> DraftSession:
    """A session whose `named` can be asked. `source`: a drafter that works from the text, or
    quantised, whose copy then reads the text into a cache of its own."""
    if not drafter_class(source).names:
        raise OptionError(
            f"candidates from {source!r}: it names no choice of next tokens without the model's "
            "own cache, so no exit could be looked for; use 'recycle', 'ngram', 'hybrid' or "
            "'quantised'"
        )
    drafter = make_drafter(source, {})
    assert drafter is not None
    return drafter.start_naming(target)


def names(session: DraftSession, rows: Sequence[int], texts: Texts, count: int) -> list[list[int]]:
    """Of each row up to `count` candidates for its next token, the likeliest first, none twice."""
    named = session.named(rows, texts, count)
    return [list(dict.fromkeys(some))[:count] for some in named]
