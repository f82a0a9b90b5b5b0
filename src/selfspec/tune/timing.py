"""Ways of drafting, timed in turns with plain decoding on prompts that nobody tuned on."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from ..bench.suite_stats import bootstrap
from ..bench.timing import Ratio
from ..core.sampling import SamplingParams
from ..llm import LLM
from ..profile import Way

BUSY = 1.5  # the slowest plain turn over the median from which on the machine was busy


class Trials:
    """Plain decoding and some ways, prompt by prompt and turn by turn. `batch` prompts are answered
    together, again from the first one on where there are fewer."""

    def __init__(
        self,
        llm: LLM,
        prompts: Sequence[Sequence[int]],
        tokens: int,
        batch: int = 1,
        temperature: float = 0.0,
    ) -> None:
        self._llm, self._tokens, self._temperature = llm, tokens, temperature
        count = len(prompts)
        self._prompts = [
            [list(prompts[(first + row) % count]) for row in range(batch)]
            for first in range(0, count, batch)
        ]
        self._plain: list[float] = []  # seconds a token, one for each group of prompts and turn
        self._taken: dict[str, list[float]] = {}
        self.exact = True
        self.turns = 0

    def turn(self, ways: Sequence[Way]) -> None:
        """Each prompt once by plain decoding and by every way; the first turn warms up too."""
        for number, asked in enumerate(self._prompts):
            expected, seconds = self._answer(asked, None)
            self._plain.append(seconds)
            shift = (number + self.turns) % max(1, len(ways))
            for way in [*ways[shift:], *ways[:shift]]:
                tokens, seconds = self._answer(asked, way)
                self.exact &= tokens == expected
                self._taken.setdefault(str(way), []).append(seconds)
        self.turns += 1

    def drop_begun(self) -> None:
        """Forget a turn that was interrupted: ways are compared over the same answers."""
        done = self.turns * len(self._prompts)
        for seconds in (self._plain, *self._taken.values()):
            del seconds[done:]

    def _answer(self, prompts: list[list[int]], way: Way | None) -> tuple[list[list[int]], float]:
        options = way.options if way else {"draft": None}
        if self._temperature:
            options |= {"sampling": SamplingParams(temperature=self._temperature, seed=0)}
        results = self._llm.generate(prompts, max_new_tokens=self._tokens, eos=[], **options)
        stats = results[0].call
        tokens = [result.tokens for result in results]
        return tokens, stats.decode_seconds / max(1, stats.decoded)

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
