"""Ways of drafting, timed in turns with plain decoding on prompts that nobody tuned on."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from ..bench.suite_stats import bootstrap
from ..bench.timing import Ratio
from ..core.sampling import SamplingParams
from ..draft.base import Drafter
from ..draft.registry import resolve
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
        before: Trials | None = None,
    ) -> None:
        """`before`: an earlier look. `auto` goes on with what it learned there."""
        self._llm, self._tokens, self._temperature = llm, tokens, temperature
        count = len(prompts)
        self._prompts = [
            [list(prompts[(first + row) % count]) for row in range(batch)]
            for first in range(0, count, batch)
        ]
        self._plain: list[float] = []  # seconds a token, one for each group of prompts and turn
        self._taken: dict[str, list[float]] = {}
        self._before = before
        self._kept: dict[str, Drafter | None] = before._kept if before else {}
        self._answered = 0  # prompts, or groups of them, by everyone
        self.exact = True
        self.turns = 0

    def turn(self, ways: Sequence[Way]) -> None:
        """Each prompt once by plain decoding and by every way; the first turn warms up too."""
        for _ in self.answers(ways):
            pass

    def answers(self, ways: Sequence[Way]) -> Iterator[None]:
        """A turn prompt by prompt, so that somebody may look at it as it goes."""
        for number, asked in enumerate(self._prompts):
            expected, seconds = self._answer(asked, None)
            self._plain.append(seconds)
            shift = (number + self.turns) % max(1, len(ways))
            for way in [*ways[shift:], *ways[:shift]]:
                tokens, seconds = self._answer(asked, way)
                self.exact &= tokens == expected
                self._taken.setdefault(str(way), []).append(seconds)
            self._answered += 1
            yield
        self.turns += 1

    def drop_begun(self) -> None:
        """Forget prompts that were interrupted: ways are compared over the same answers."""
        for seconds in (self._plain, *self._taken.values()):
            del seconds[self._answered :]

    def _answer(self, prompts: list[list[int]], way: Way | None) -> tuple[list[list[int]], float]:
        options = self._told(way) if way else {"draft": None}
        if self._temperature:
            options |= {"sampling": SamplingParams(temperature=self._temperature, seed=0)}
        results = self._llm.generate(prompts, max_new_tokens=self._tokens, eos=[], **options)
        stats = results[0].call
        tokens = [result.tokens for result in results]
        return tokens, stats.decode_seconds / max(1, stats.decoded)

    def _told(self, way: Way) -> dict[str, Any]:
        """What `LLM.generate` is told. `auto` is the same from answer to answer, as it is in use:
        it goes on with what it learned."""
        if way.draft != "auto":
            return way.options
        kept = self._kept.get(str(way)) or resolve(**way.options)[0]
        self._kept[str(way)] = kept
        return {"draft": kept}

    @property
    def plain_seconds(self) -> float:
        """Of a token, in the median."""
        return median(self._plain)

    @property
    def spread(self) -> float:
        """The slowest turn of plain decoding over the median one; of a single turn, the slowest
        answer's seconds a token over the median ones."""
        count = len(self._prompts) if self.turns > 1 else 1
        ends = range(count, len(self._plain) + 1, count)
        turns = [sum(self._plain[end - count : end]) for end in ends]
        return max(turns) / median(turns) if turns else 1.0

    @property
    def busy(self) -> bool:
        """Whether plain decoding itself was so uneven that something else must have run."""
        return self.spread > BUSY

    def gain(self, way: Way | None, over: Way | None = None) -> Ratio:
        """A way's speed over another's, None being plain decoding: mean times over all prompts and
        turns that both had."""
        mine, theirs = (self._taken[str(each)] if each else self._plain for each in (way, over))
        pairs = list(zip(theirs, mine, strict=False))

        def of(sample: Sequence[tuple[float, float]]) -> float:
            return sum(their for their, _ in sample) / sum(own for _, own in sample)

        def draw(chance: random.Random) -> float:
            return of(chance.choices(pairs, k=len(pairs)))

        return bootstrap(of(pairs), draw, [len(pairs)])

    def speed(self, way: Way) -> float:
        """The same as a number, 0 if nothing is known."""
        return self.gain(way).value if self._taken.get(str(way)) else 0.0

    def timed(self, way: Way) -> Way:
        """The way with what was measured of it, if anything was. An earlier look over fewer answers
        counts only where there is nothing else: it cannot be compared with these."""
        if not self._taken.get(str(way)):
            return self._before.timed(way) if self._before and not self._answered else way
        gain = self.gain(way)
        return replace(way, measured=gain.value, low=gain.low, high=gain.high)
