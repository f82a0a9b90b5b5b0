"""All groups of a generation: who drafts for which rows, who is told what, and whose drafter it was
that raised. Knows neither what is kept of a round nor how it is written down.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from ..core.contract import Draft, RowOutcome
from ..draft.base import Target
from ..model.compute.cache import KVCache
from ..model.compute.call import HalfObserver
from ..model.compute.cpu.rounds import Round
from ..model.compute.hidden_states import StateCollector
from ..model.layered import LayeredModel, Scored
from .group import Group
from .row import Request, Row
from .streak import streak


class Groups:
    """Of the rows of one cache that have drafters."""

    def __init__(self, model: LayeredModel, cache: KVCache) -> None:
        self._target = Target(model, cache)
        self.all: list[Group] = []
        self.culprits: Sequence[Row] = ()
        """The rows whose drafter or controller raised. None: nobody knows."""

    def admit(self, row: Row) -> None:
        if row.request.drafter is not None:
            self._for(row.request).admit(row)

    def _for(self, request: Request) -> Group:
        for group in self.all:
            if group.drafter == request.drafter and group.controller == request.controller:
                return group
        assert request.drafter is not None
        group = Group(request.drafter, request.controller, self._target)
        self.all.append(group)
        return group

    def drop(self, row: Row) -> None:
        for group in [group for group in self.all if row in group.rows]:
            group.drop(row)
            if not group.rows:
                self.all.remove(group)

    def close(self) -> None:
        """After a round that was interrupted."""
        for group in self.all:
            group.close()

    @property
    def rest(self) -> bool:
        """Whether all leave the next round alone, if no prompts are read, and hear of it later."""
        return all(group.rests for group in self.all)

    @property
    def drafting(self) -> float:
        """Seconds that this round's drafts took."""
        return sum(group.draft_seconds for group in self.all)

    @property
    def ranks(self) -> int:
        """How many of the likeliest tokens at a node somebody will ask for."""
        return max((group.session.ranks for group in self.all), default=1)

    @property
    def collectors(self) -> list[StateCollector]:
        return [each for group in self.all for each in group.session.collectors]

    def observer_of(self, row: Row) -> HalfObserver | None:
        return next((g.session.observer for g in self.all if row in g.rows), None)

    def streak(self, rows: Sequence[Row]) -> Sequence[Round]:
        """Rounds of these rows that our kernels ran by themselves, if they could."""
        if len(rows) > 1 or self.collectors or any(group.rows != rows for group in self.all):
            return ()
        group, target = self.all[0] if self.all else None, self._target
        with self._blamed(rows if group else ()):
            return streak(target.model, target.cache, group, rows[0])

    def draft(self, rows: Sequence[Row], reading: int) -> dict[Row, Draft]:
        """A draft for every row. One without a drafter has nothing to verify but its last token.
        `reading`: rows whose prompts are not read yet."""
        drafts = {row: Draft.chain(row.tokens) for row in rows if row.request.drafter is None}
        for group in self.all:
            group.draft_seconds = 0.0
            if mine := [row for row in group.rows if row in rows]:
                with self._blamed(group.rows):
                    made = group.draft(mine, len(rows) - len(mine), reading)
                    drafts.update(zip(mine, made, strict=True))
        return drafts

    def learn(
        self,
        outcomes: Mapping[Row, RowOutcome],
        places: Mapping[Row, Sequence[int]],
        scored: Scored,
        start: float,
        verify: float,
    ) -> None:
        """Each group is told of its own rows. `places`: where each row's nodes are among all.
        `start`: of the round. `verify`: seconds of its pass."""
        begin, again = start + self.drafting, self._target.cache.again
        for group in self.all:
            if any(row in group.rows for row in outcomes):
                with self._blamed(group.rows):
                    group.learn(outcomes, places, scored, begin, verify, again)

    def drafted(self, seconds: float, number: int) -> None:
        """As `Group.drafted` hears it."""
        for group in self.all:
            group.drafted(seconds, number)

    def passed_over(
        self, rows: Sequence[Row], scored: Scored, seconds: float, failed: bool
    ) -> None:
        """As `Group.passed_over` hears it."""
        for group in self.all:
            group.passed_over(rows, scored.logits, scored.best, seconds, failed)

    @contextmanager
    def _blamed(self, rows: Sequence[Row]) -> Iterator[None]:
        """Notes whose drafter or controller it was that raised."""
        try:
            yield
        except Exception:
            self.culprits = list(rows)
            raise
