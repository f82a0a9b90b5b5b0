"""Prompt lookup: what followed the last time that the text ended like this? Costs no model at all.

Source: prompt-lookup decoding (Saxena 2023). The small tree and the order by estimated chance are
ours. Every n-gram of a row's prompt and output is entered once, so a step does not scan the text.
Does not know what the model finds likely, only what was written.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar, NamedTuple

from ...errors import OptionError
from ...model.compute.cpu.lookups import WITHDRAWN
from ..base import Drafter, DraftSession, Target, Texts
from ..growing import Guesses, grow
from ..voting import REACH, Context, Voter, VotingSession

# How often the token after a match of 1, 2, ... tokens was right, in 30 answers of
# SmolLM2-135M-Instruct to Spec-Bench prompts. Used for `least`, and the order of guesses.
CHANCES = (0.27, 0.52, 0.63, 0.64, 0.75, 0.75, 0.75, 0.91)
# Beside other sources: how many times likelier a match of 1, 2, ... tokens makes what followed it,
# and that it followed the last token never, once, twice, ... lately. Fitted, see `voting.py`.
MATCHED = (0.71, 1.0, 2.2, 3.5, 4.7, 5.0, 6.8, 24.0)
FOLLOWED = (1.0, 2.2, 4.3, 4.9, 6.2)
LOOK_BACK = 16  # how many places of one n-gram are looked at, the latest first
NOWHERE = -1  # no place


@dataclass(frozen=True)
class NGram(Drafter):
    """Draft what followed the longest earlier match of the text's end."""

    name: ClassVar[str] = "ngram"
    trees: ClassVar[bool] = True
    names: ClassVar[bool] = True

    longest: int = 4
    """Most tokens to compare at the text's end. Shorter matches are tried after longer ones."""
    shortest: int = 1
    """Fewest tokens that count as a match."""
    branches: int = 3
    """How many continuations of matches to draft as a tree. 1 drafts a chain."""
    least: float = 0.0
    """Leave out guesses whose estimated chance, multiplied along their path, is below this. 0 uses
    the whole budget."""

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.longest:
            raise OptionError(
                f"shortest={self.shortest} and longest={self.longest} leave no n-gram to look for; "
                "use 1 <= shortest <= longest"
            )
        if self.branches < 1:
            raise OptionError(
                f"branches={self.branches} would draft nothing; use 1 for a chain, more for a tree"
            )
        if not 0 <= self.least < 1:
            raise OptionError(
                f"least={self.least} is no chance that drafts could reach; use 0 to below 1"
            )

    @property
    def looks_up(self) -> bool:
        return True

    def start(self, target: Target) -> DraftSession:
        return LookingUp(self)


class LookingUp(VotingSession):
    """At work on rows of texts. Needs no model, so other engines can ask it too."""

    def __init__(self, options: NGram) -> None:
        self._options, self.least = options, options.least
        self._index: dict[int, _Index] = {}

    def drop(self, row: int) -> None:
        self._index.pop(row, None)

    def _entered(self, row: int, text: Sequence[int]) -> _Index:
        """The row's index, up to the end of its text."""
        options = self._options
        index = self._index.setdefault(row, _Index(options.shortest, options.longest))
        index.enter(text)
        return index

    def named(self, rows: Sequence[int], texts: Texts, count: int) -> Sequence[Sequence[int]]:
        pairs = zip(rows, texts, strict=True)
        places = [self._entered(row, text).continuations(text, count) for row, text in pairs]
        return [[text[at] for _, at in some] for text, some in zip(texts, places, strict=True)]

    def voter(self, row: int, text: Sequence[int]) -> Voter:
        return _Matches(self._entered(row, text), text, self._options.branches)

    def native(self) -> Mapping[str, Any] | None:
        options = self._options
        if options.shortest > REACH:
            return None
        return {
            "shortest": options.shortest,
            "longest": min(options.longest, REACH),  # nobody asks for longer ones
            "branches": options.branches,
            "look_back": LOOK_BACK,
            "matched": MATCHED,
            "followed": FOLLOWED,
        }

    def fill(self, tree: Guesses, row: int, text: Sequence[int]) -> None:
        options, index = self._options, self._entered(row, text)

        def following(place: _Place | None) -> Iterator[tuple[float, int, _Place]]:
            if place is not None:  # a path that reaches the text's end goes on with its own guesses
                at, matched, guesses = place
                token = text[at] if at < len(text) else guesses[at - len(text)]
                yield _chance(matched), token, _Place(at + 1, matched + 1, (*guesses, token))
                return
            left = 1.0
            for matched, at in index.continuations(text, options.branches):
                chance = left * _chance(matched)
                left -= chance
                yield chance, text[at], _Place(at + 1, matched + 1, (text[at],))

        grow(tree, None, following, options.least)


class _Place(NamedTuple):
    """Behind a guess: what comes `at` there in the text and then in `guesses`, may come next."""

    at: int
    matched: int
    """How many tokens before it are also the last of text and guesses."""
    guesses: tuple[int, ...]


class _Index:
    """Where each n-gram of a row's text was followed last, and before that, and so on. Numbers
    only: many small lists would make Python look through all of its memory again and again."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest, self._longest = shortest, longest
        self._latest: dict[tuple[int, ...], int] = {}  # positions of what followed
        # by size, of each place the one before, or NOWHERE
        self._earlier: defaultdict[int, list[int]] = defaultdict(list)
        self._entered: list[int] = []  # the text whose n-grams are here

    def enter(self, text: Sequence[int]) -> None:
        """Enter what is new, and take back what is not part of the text any more: its end may
        have been another drafter's guess."""
        known = self._entered
        recent = range(max(0, len(known) - WITHDRAWN), len(known))
        if known[recent.start :] != list(text[recent.start : recent.stop]):
            changed = (at for at in recent if at >= len(text) or text[at] != known[at])
            first = next(changed)
            for place in range(len(known) - 1, first - 1, -1):
                for gram in self._before(known, place):
                    earlier = self._earlier[len(gram)].pop()
                    if earlier == NOWHERE:
                        del self._latest[gram]
                    else:
                        self._latest[gram] = earlier
            del known[first:]
        latest = self._latest
        sizes = range(self._shortest, min(self._longest, len(text) - 1) + 1)
        for size in sizes:  # one after the other, so that the loop over a long prompt is short
            first, befores = max(size, len(known)), self._earlier[size]
            columns = (text[first - back : len(text) - back] for back in range(size, 0, -1))
            for place, gram in enumerate(zip(*columns, strict=True), first):
                befores.append(latest.get(gram, NOWHERE))
                latest[gram] = place
        known += text[len(known) :]

    def _before(self, text: Sequence[int], place: int) -> Iterator[tuple[int, ...]]:
        """The n-grams that end before a place."""
        for size in range(self._shortest, min(self._longest, place) + 1):
            yield tuple(text[place - size : place])

    def continuations(self, text: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
        """(length of the match, position of what followed), longest and latest match first."""
        seen: set[int] = set()
        for size in range(min(self._longest, len(text)), self._shortest - 1, -1):
            for place in islice(self._places(tuple(text[-size:])), LOOK_BACK):
                if len(seen) < most and text[place] not in seen:
                    seen.add(text[place])
                    yield _matched(text, place, size, text), place

    def followed(self, text: Sequence[int], context: Context, most: int) -> dict[int, list[int]]:
        """What followed the context's end in the text: by token, `most` of them, the length of the
        longest match and how often it followed the last token lately."""
        found: dict[int, list[int]] = {}
        for size in range(min(self._longest, len(context)), self._shortest - 1, -1):
            for place in islice(self._places(context[-size:]), LOOK_BACK):
                known = found.get(text[place])
                if known is None:
                    if len(found) < most:
                        matched = size
                        if size == self._longest:
                            matched = _matched(text, place, size, context)
                        found[text[place]] = [matched, int(size == 1)]
                elif size == 1:
                    known[1] += 1
        return found

    def _places(self, gram: tuple[int, ...]) -> Iterator[int]:
        """Where an n-gram was followed, the latest first."""
        place, size = self._latest.get(gram, NOWHERE), len(gram)
        while place != NOWHERE:
            yield place
            place = self._earlier[size][place - size]  # no n-gram ends before its own size


class _Matches(Voter):
    """What followed earlier matches of a context's end."""

    def __init__(self, index: _Index, text: Sequence[int], branches: int) -> None:
        self._index, self._text, self._branches = index, text, branches

    def votes(self, context: Context) -> list[tuple[int, float]]:
        found = self._index.followed(self._text, context, self._branches)
        longest, often = len(MATCHED), len(FOLLOWED) - 1
        return [
            (token, MATCHED[min(matched, longest) - 1] * FOLLOWED[min(times, often)])
            for token, (matched, times) in found.items()
        ]


def _matched(text: Sequence[int], place: int, size: int, context: Sequence[int]) -> int:
    """How many tokens before `place` are also the context's last, as far as CHANCES goes."""
    most = min(len(CHANCES), place, len(context))
    while size < most and text[place - size - 1] == context[-size - 1]:
        size += 1
    return size


def _chance(matched: int) -> float:
    return CHANCES[min(matched, len(CHANCES)) - 1]
