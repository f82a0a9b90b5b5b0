"""Candidates for exits: a drafter that only names what may come next, and never drafts itself; or
the pool of tokens of which a text's first look names them.

Does not know what the candidates are for.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..core.contract import Budget, Draft
from ..core.sampling import Sampler
from ..errors import OptionError
from ..exits.first_look import SOURCE, Named
from ..exits.part import Source
from ..model.partial_head import PartialHead
from .base import DraftSession, Target, Texts
from .registry import drafter_class, make_drafter


class _Pools(DraftSession):
    """Each row's pool: the tokens of a part, and its prompt's."""

    def __init__(self, pool: PartialHead) -> None:
        self._pool = pool
        self._rows: dict[int, PartialHead] = {}

    def admit(
        self, row: int, prompt: Sequence[int], sampler: Sampler, ends: frozenset[int] = frozenset()
    ) -> None:
        self._rows[row] = self._pool.joined_by([*prompt, *ends])

    def drop(self, row: int) -> None:
        del self._rows[row]

    def propose(self, rows: Sequence[int], texts: Texts, budget: Budget) -> Sequence[Draft]:
        raise NotImplementedError("the model's own states name candidates, and guess nothing")

    def pools(self, rows: Sequence[int]) -> list[PartialHead]:
        return [self._rows[row] for row in rows]


def start_naming(
    source: str, target: Target, pool: PartialHead | None = None, head: Source | None = None
) -> DraftSession:
    """A session whose `named` can be asked. `source`: a drafter that works from the text, or
    quantised, whose copy then reads the text into a cache of its own, or first-look, with the
    predictors' pool, or draft-head, to whose `collectors` come states of all kept text. `head`: its
    part."""
    if source == SOURCE:
        if pool is None:
            raise OptionError(
                f"candidates from {SOURCE!r}: these predictors came without the tokens to choose "
                "from; fit them with it: selfspec fit-exits MODEL --source first-look --pool IDS"
            )
        return _Pools(pool)
    kind = drafter_class(source)
    if head is not None and not (kind.names and kind.reads_states):
        raise OptionError(
            f"candidates from {source!r} read no head, and one was named; use "
            "candidates='draft-head', or leave the head out"
        )
    if not kind.names:
        raise OptionError(
            f"candidates from {source!r}: it names no choice of next tokens without the model's "
            "own cache, so no exit could be looked for; use 'recycle', 'ngram', 'hybrid', "
            "'quantised' or 'draft-head'"
        )
    drafter = make_drafter(source, {"part": head} if kind.reads_states else {})
    assert drafter is not None
    return drafter.start_naming(target)


def names(session: DraftSession, rows: Sequence[int], texts: Texts, count: int) -> list[Named]:
    """Of each row up to `count` candidates for its next token, the likeliest first, none twice; or
    its pool."""
    if isinstance(session, _Pools):
        return list(session.pools(rows))
    named = session.named(rows, texts, count)
    return [list(dict.fromkeys(some))[:count] for some in named]
