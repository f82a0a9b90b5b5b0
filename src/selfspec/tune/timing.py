"""Ways of drafting, timed in turns with plain decoding on prompts that nobody tuned on."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

from ..bench.suite_stats import bootstrap
from ..bench.timing import Ratio
from ..llm import LLM
from ..profile import Way

BUSY = 1.5  # the slowest plain turn over the median from which on the machine was busy


class Trials:
    """Plain decoding and some ways, prompt by prompt and turn by turn."""

    def __init__(self, llm: LLM, prompts: Sequence[Sequence[int]], tokens: int) -> None:
        self._llm, self._prompts, self._tokens = llm, prompts, tokens
        self._plain: list[float] = []  # seconds a token, one for each prompt and turn
        self._taken: dict[str, list[float]] = {}
        self.exact = True
        self.turns = 0

    def turn(self, ways: Sequence[Way], tick: Callable[[], None] = lambda: None) -> None:
        """Each prompt once by plain decoding and by every way; the first turn warms up too."""
        for number, ids in enumerate(self._prompts):
            expected, seconds = self._answer(ids, None)
            self._plain.append(seconds)
            shift = (number + self.turns) % max(1, len(ways))
            for way in [*ways[shift:], *ways[:shift]]:
                tokens, seconds = self._answer(ids, way)
                self.exact &= tokens == expected
                self._taken.setdefault(str(way), []).append(seconds)
                tick()
        self.turns += 1

    def _answer(self, ids: Sequence[int], way: Way | None) -> tuple[list[int], float]:
        options = way.options if way else {"draft": None}
        result = self._llm.generate(list(ids), max_new_tokens=self._tokens, eos=[], **options)
        return result.tokens, result.stats.decode_seconds / max(1, result.stats.decoded)

    @property
    def plain_seconds(self) -> float:
        """Of a token, in the median."""
        return median(self._plain)

    @property
    def busy(self) -> bool:
        """Whether plain decoding itself was so uneven that something else must have run."""
        count = len(self._prompts)
        turns = [sum(self._plain[at : at + count]) for at in range(0, len(self._plain), count)]
        return len(turns) > 1 and max(turns) > BUSY * median(turns)

    def gain(self, way: Way) -> Ratio:
        """Its speed over plain decoding's: mean times over all prompts and turns."""
        mine = self._taken[str(way)]
        pairs = list(zip(self._plain, mine, strict=False))

        def of(sample: Sequence[tuple[float, float]]) -> float:
            return sum(plain for plain, _ in sample) / sum(own for _, own in sample)

        def draw(chance: random.Random) -> float:
            return of(chance.choices(pairs, k=len(pairs)))

        return bootstrap(of(pairs), draw, [len(pairs)])

    def timed(self, way: Way) -> Way:
        """The way with what was measured of it."""
        gain = self.gain(way)
        return replace(way, measured=gain.value, low=gain.low, high=gain.high)


def host_seconds(llm: LLM, ids: Sequence[int], tokens: int = 24) -> float:
    """What a round of plain decoding takes beside its pass."""
    stats = llm.generate(list(ids), max_new_tokens=tokens, draft=None, eos=[]).stats
    return stats.host_seconds / max(1, stats.rounds)
