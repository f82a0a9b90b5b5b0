"""What rows cost, and all of a generation together: seconds, passes and tokens so far."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from ..core.contract import Stats
from ..model.compute.cache import KVCache
from .row import Row


class Books:
    """Of one generation."""

    def __init__(self) -> None:
        self.all = Stats()  # of all rows together; and the tokens of those that left

    def prompts(self, rows: Sequence[Row], seconds: float) -> None:
        """A chunk of these rows' prompts was read."""
        for stats in self._of(rows):
            stats.prefill_seconds += seconds
            stats.forward_passes += 1

    def round(self, rows: Sequence[Row], begin: float, drafting: float, verify: float) -> None:
        """A round that began then has ended, in which these rows took part."""
        seconds = time.perf_counter() - begin
        for stats in self._of(rows):
            stats.decode_seconds += seconds
            stats.draft_seconds += drafting
            stats.verify_seconds += verify
            stats.forward_passes += 1
            stats.rounds += 1

    def leave(self, row: Row, cache: KVCache) -> None:
        """The row is not among the others any more."""
        _count_layers(row, cache)
        self.all.add_tokens(row.stats)

    def total(self, rows: Sequence[Row], cache: KVCache) -> Stats:
        """All so far, with what these rows have done that did not leave."""
        own = self.all
        total = replace(own, drafted_at=[*own.drafted_at], accepted_at=[*own.accepted_at])
        for row in rows:
            _count_layers(row, cache)
            total.add_tokens(row.stats)
        return total

    @property
    def progress(self) -> tuple[float, float, int]:
        """Seconds of reading prompts, of rounds, and how many rounds there were."""
        return self.all.prefill_seconds, self.all.decode_seconds, self.all.rounds

    def _of(self, rows: Sequence[Row]) -> list[Stats]:
        return [self.all, *(row.stats for row in rows)]


def _count_layers(row: Row, cache: KVCache) -> None:
    computed = int(cache.computed[row.slot].sum())
    row.stats.layer_tokens = computed - row.computed_before
