"""How often something happens, lately: of all tries, and place by place in a draft.

What happened longer ago counts for less. What to expect while little is known is told from outside.
Knows no costs.
"""

from __future__ import annotations

from collections.abc import Iterable

# What a round weighs in comparison with the next one: in a request, and in what later ones begin
# with. That had better not follow the last text.
FADING, LASTING = 0.97, 0.99
# How many tries an expectation weighs: a guess, and what earlier requests found. Chances of a few
# rounds are mostly luck, and of many lengths the luckiest would be chosen.
TRUST, BELIEVED = 4.0, 8.0
FALLOFF = 0.75  # of a place's chance, the next one's while nothing is known of either
LARGE = 1e100  # a weight from which on all are made small again


class Share:
    """How often something happens, lately."""

    def __init__(self, fading: float = FADING) -> None:
        self._fading, self._hits, self._tries = fading, 0.0, 0.0

    def fade(self) -> None:
        self._tries *= self._fading
        self._hits *= self._fading

    def add(self, hit: bool) -> None:
        self._tries += 1
        self._hits += hit

    def expected(self, otherwise: float, trust: float = TRUST) -> float:
        """`otherwise` is what to expect while little is known."""
        return (trust * otherwise + self._hits) / (trust + self._tries)


class Places:
    """How often something is true of the first, second, ... place of a draft, lately.

    Later rounds weigh more, which comes to the same as if earlier ones faded, and touches no place
    but those of the round.
    """

    def __init__(self, first: float, fading: float = FADING, prior: Places | None = None) -> None:
        """`first`: what to expect of the first place while nothing is known."""
        self._first, self._fading, self._prior = first, fading, prior
        self._weight = 1.0
        self._hits: list[float] = []
        self._tries: list[float] = []
        self._expected: list[float] = []  # answers since the last round

    def count(self, rows: Iterable[tuple[int, Iterable[int]]]) -> None:
        """One round. Of each row how many places there were, and those of them, from 1 on, of which
        it is true."""
        self._weight /= self._fading
        self._expected = []
        if self._weight > LARGE:
            self._hits = [hits / self._weight for hits in self._hits]
            self._tries = [tries / self._weight for tries in self._tries]
            self._weight = 1.0
        for count, true in rows:
            missing = count - len(self._tries)
            if missing > 0:
                self._hits += [0.0] * missing
                self._tries += [0.0] * missing
            for place in range(count):
                self._tries[place] += self._weight
            for place in true:
                self._hits[place - 1] += self._weight

    def __getitem__(self, place: int) -> float:
        """How likely it is of a place, from 0 on."""
        while len(self._expected) <= place:
            self._expected.append(self._of(len(self._expected)))
        return self._expected[place]

    def _of(self, place: int) -> float:
        """The same, once the places before are known. Unknown places fall off from the one before,
        as those before them did on average if that is less."""
        if self._prior:
            expected = self._prior[place]
        elif place:
            before = self._expected[place - 1]
            expected = before * max(FALLOFF, before ** (1 / place))
        else:
            expected = self._first
        if place >= len(self._tries):
            return expected
        trust = self._weight * (BELIEVED if self._prior else TRUST)
        return (trust * expected + self._hits[place]) / (trust + self._tries[place])
