"""Several sources guess together: each says how many times likelier it makes a token, and what they
say of the same token is multiplied.

What two sources agree on is far likelier than either knows, and where they differ neither is to be
trusted as if it were alone. Factors were fitted together (docs/log.md): chances follow from them by
dividing by their sum, with 1 for all tokens of which nobody says anything. Does not know where
guesses come from.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from ..core.contract import Budget, Draft, Outcome
from ..core.price import Price, worthy
from ..core.sampling import Sampler
from ..core.tree import Tree
from ..model.compute.cpu.choosing import likeliest_known
from ..model.compute.cpu.lookups import Lookups, Rules, rules
from .base import DraftSession, Texts
from .growing import GrowingSession, Guesses, grow

Context = tuple[int, ...]

REACH = 8  # last tokens that sources look at
START = 0.129  # odds of a token, once somebody says something of it
# A share of the likeliest token's odds goes to all others. Nothing is certain, and behind ten
# guesses that were nearly certain the text most often went another way.
DOUBT = 0.05
# A guess whose successors nobody knows is worth as much more: if it is wrong, the model has said
# what would follow it.
TEACHES = 0.2
LEAST = 0.02  # likely, or it is no guess


class Voter(ABC):
    """What one source says of the text of one row."""

    @abstractmethod
    def votes(self, context: Context) -> Iterable[tuple[int, float]]:
        """Tokens that may come after these last ones, each with a factor on its odds. A token may
        have several."""

    heard: Container[Context] | None = None
    """Pairs of tokens of which it knows what the model says next, if it learns that."""


class VotingSession(GrowingSession):
    """Fills a tree alone, or has a say in one."""

    least: float = 0.0
    """No path of a tree that it has a say in is less likely."""

    @abstractmethod
    def voter(self, row: int, text: Sequence[int]) -> Voter:
        """What it says of a row's text, until the text goes on."""

    def native(self) -> Mapping[str, Any] | None:
        """Numbers by which kernels say the same, by their names in `lookups.py`. None: they do not
        know how."""
        return None


def guess_together(
    tree: Guesses, text: Sequence[int], voters: Sequence[Voter], least: float = 0.0
) -> None:
    """Fill the tree with what the voters find likeliest."""

    heard = [voter.heard for voter in voters if voter.heard is not None]

    def following(context: Context) -> list[tuple[float, int, Context]]:
        odds: dict[int, float] = {}
        for voter in voters:
            for token, factor in voter.votes(context):
                odds[token] = odds.get(token, START) * factor
        if not odds:
            return []
        every = 1 + DOUBT * max(odds.values())
        for odd in odds.values():  # `sum` rounds in another way in newer Pythons
            every += odd
        recent, last, enough, found = context[1 - REACH :], context[-1], LEAST * every, []
        for token, odd in odds.items():
            if odd >= enough:
                chance = odd / every
                for pairs in heard:
                    if (last, token) not in pairs:
                        chance *= 1 + TEACHES * (1 - chance)
                found.append((chance, token, (*recent, token)))
        return found

    grow(tree, tuple(text[-REACH:]), following, least)


def natively(*sessions: VotingSession) -> NativelyTogether | None:
    """These sessions' guesses by kernels, None where these do not know how. The sessions themselves
    see no row then."""
    votes = {"start": START, "doubt": DOUBT, "teaches": TEACHES, "least": LEAST, "reach": REACH}
    found = rules([votes, *(session.native() for session in sessions)])
    if found is None:
        return None
    least = max(session.least for session in sessions)
    return NativelyTogether(found, least, max(session.ranks for session in sessions))


class NativelyTogether(DraftSession):
    """Several sources at work by kernels: a pass empties the caches, and Python then takes three
    times as long for a round's many small questions."""

    weighs = True

    def __init__(self, rules: Rules, least: float, ranks: int) -> None:
        self._rules, self._least, self.ranks = rules, least, ranks
        self._rows: dict[int, Lookups] = {}

    def admit(
        self, row: int, prompt: Sequence[int], sampler: Sampler, ends: frozenset[int] = frozenset()
    ) -> None:
        self._rows[row] = Lookups(self._rules, prompt, self._least)

    def drop(self, row: int) -> None:
        del self._rows[row]

    def by_kernels(self, row: int) -> Lookups:
        return self._rows[row]

    def propose(self, rows: Sequence[int], texts: Texts, budget: Budget) -> Sequence[Draft]:
        asked, price = zip(rows, texts, budget.tokens, strict=True), budget.price
        bars = [array("d", bar) for bar in (price.floors, price.lowest)] if price else []
        return [self._draft(*each, price, bars) for each in asked]

    def _draft(
        self,
        row: int,
        text: Sequence[int],
        most: int,
        price: Price | None,
        bars: Sequence[array[float]],
    ) -> Draft:
        if not most:
            return Draft(Tree([text[-1]], [-1]), expected=0.0)
        parents, tokens, chances = self._rows[row].guess(text, most, *bars)
        count, expected = worthy(price, chances)
        tree = Tree([text[-1], *tokens[:count]], [-1, *parents[:count]])
        return Draft(tree, expected=expected)

    def observe(self, outcome: Outcome) -> None:
        best = iter(likeliest_known(outcome.best, outcome.logits, self.ranks))
        for row in outcome.rows:
            tree, begin = row.draft.tree, len(row.text) - len(row.kept)
            before = row.text[begin - 2] if begin > 1 else None
            said = list(islice(best, len(tree)))
            self._rows[row.row].learn(before, tree.tokens, tree.parents, said)
