"""A round in which nobody drafts: the model's next token of each row, and what the row makes of it.

The same as a round of empty drafts (keeping.py), in fewer steps: where a pass has gone through the
processor's caches, every function that is called costs some microseconds. Does not know what a
drafter learns of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ..core.contract import RowStep
from ..core.randomness import PLAIN, key
from ..core.sampling import not_finite
from ..model.compute.cpu.choosing import BROKEN
from .row import Row, RowState


class Gain(NamedTuple):
    """What a round adds to a row. It counts once the row has taken it over."""

    row: Row
    state: RowState
    step: RowStep


def suits(rows: Sequence[Row]) -> bool:
    """Whether the rows' tokens are found here: all by the likeliest, or all otherwise, and nobody
    asks how likely they were."""
    plain = rows[0].request.sampler.plain
    return all(row.request.logprobs is None and row.request.sampler.plain == plain for row in rows)


def gains(
    rows: Sequence[Row], logits: Tensor, best: Sequence[Sequence[int]] | None
) -> tuple[list[Gain], list[Row]]:
    """What each row gains, and the rows whose own code raised (they have an `error` now). `best`:
    the likeliest tokens, where these are chosen."""
    gained: list[Gain] = []
    failed: list[Row] = []
    for index, row in enumerate(rows):
        try:
            token = _drawn(row, logits[index]) if best is None else best[index][0]
            if token == BROKEN:
                raise not_finite()
            state, kept = row.after([token])
        except Exception as error:  # noqa: BLE001  (a user's criterion or processor: its row ends)
            row.error = error
            failed.append(row)
        else:
            gained.append(Gain(row, state, RowStep(row.index, kept, finish_reason=state.finish)))
    return gained, failed


def _drawn(row: Row, logits: Tensor) -> int:
    sampler, text = row.request.sampler, row.tokens
    return sampler.first(logits, text, key(sampler.seed, len(text), PLAIN))[0]
