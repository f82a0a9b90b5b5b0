"""What a skip set is worth, by costs and probe: on a few texts first, and on all where it seems to
be the best so far. Of thousands of sets some are always lucky with a few texts. Does not search.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..model.layered import LayeredModel
from .candidates import Candidate, Plain, skipping
from .probe import Probe
from .search import Halves, Tried, split
from .steps import Steps

FEW, ALL = 3, 0  # texts
CHAIN = 4  # drafts, of which it is told how many are kept


class SkipSets:
    """The sets of one model, each looked at once."""

    def __init__(self, model: LayeredModel, steps: Steps, probe: Probe, plain: Plain) -> None:
        self._model, self._steps, self._probe, self._plain = model, steps, probe, plain
        self._seen: dict[tuple[Halves, int], tuple[float, float]] = {}
        self._highest = 0.0  # of those that were looked at on all texts

    def candidate(self, halves: Halves) -> Candidate:
        """Drafting without these."""
        return skipping(self._model, self._steps, *split(halves, self._model.layers))

    def go_on(self, known: Iterable[Tried]) -> None:
        """Behind sets that an earlier search looked at: which are looked at on all texts depends on
        the best so far."""
        self._highest = max([self._highest, *(each.value for each in known)])

    def values(self, halves: Halves, early: bool = False) -> Iterator[float]:
        """The gain that is to be expected, at last with all that is known. `early`: also what one
        text says, for a search that prunes."""
        if early:
            yield self._look(halves, 1)[0]
        value = self._look(halves, FEW)[0]
        if value > self._highest:
            value = self._look(halves, ALL)[0]
            self._highest = max(self._highest, value)
        yield value

    def kept(self, halves: Halves) -> float:
        """How many drafts of a chain it keeps."""
        return self._look(halves, FEW)[1]

    def _look(self, halves: Halves, texts: int) -> tuple[float, float]:
        if (halves, texts) not in self._seen:
            candidate, everywhere = self.candidate(halves), self._probe.everywhere
            phases = everywhere[:1] if texts else everywhere[:: len(everywhere) // 2]
            agreement = self._probe.agreement(self._model, candidate.plan, phases, texts)
            layers = self._model.layers
            gain = candidate.predicted(agreement, self._steps, layers, self._plain).gain
            self._seen[halves, texts] = gain, agreement.expected(CHAIN)
        return self._seen[halves, texts]
