"""Two drafters in one: the second guesses where the first finds nothing, or fills its tree.

By default a lookup and token recycling, both free of model cost: one knows the text, the other what
the model said lately. These two guess one tree together (voting.py), which is ours, as is merging
two trees into one. That a lookup goes first and a costlier drafter second is common practice. Does
not know what its two drafters do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

from ..core.contract import Budget, Draft
from ..core.tree import TreeBuilder
from ..errors import OptionError
from .base import Drafter, DraftSession, JoinedSession, Target, Texts
from .growing import GrowingSession, Guesses
from .registry import make_drafter
from .voting import VotingSession, guess_together, natively

# Options of a named first drafter if the user gives none. A lookup whose tree is merged with one of
# layers stops where its guesses become unlikely. One that goes first alone must find nothing now
# and then, or the second would never be asked.
MERGING: Mapping[str, Mapping[str, Any]] = {"ngram": {"least": 0.15}}
GOING_FIRST: Mapping[str, Mapping[str, Any]] = {"ngram": {"shortest": 2}}


@dataclass(frozen=True)
class Hybrid(Drafter):
    """Draft with one drafter first, and another where that one finds nothing."""

    name: ClassVar[str] = "hybrid"
    trees: ClassVar[bool] = True
    names: ClassVar[bool] = True

    first: str | Drafter = "ngram"
    """The drafter that is asked first, by name or as an object."""
    then: str | Drafter = "recycle"
    """The drafter for where the first finds nothing, by name or as an object."""
    first_options: Mapping[str, Any] | None = None
    """Options of the named first. None suits a lookup: least=0.15 if it merges with a drafter that
    runs layers, shortest=2 if it does not merge."""
    then_options: Mapping[str, Any] | None = None
    """Options of the second, if it is named."""
    merge: bool | None = None
    """Guess one tree: two lookups together, else the second in the room that the first leaves. None
    does so if the second drafts trees."""

    def __post_init__(self) -> None:
        assert self._parts  # unknown names are errors now, not in the middle of a request

    @cached_property
    def _parts(self) -> tuple[Drafter, Drafter]:
        then = _made(self.then, self.then_options or {}, "then")
        options = self.first_options
        if options is None:
            options = {}
            if isinstance(self.first, str) and not (then.looks_up and self._merges(then)):
                fitting = MERGING if self._merges(then) else GOING_FIRST
                options = fitting.get(self.first, {})
        return _made(self.first, options, "first"), then

    def _merges(self, then: Drafter) -> bool:
        return then.trees if self.merge is None else self.merge

    @property
    def learns_across_requests(self) -> bool:
        return any(part.learns_across_requests for part in self._parts)

    @property
    def looks_up(self) -> bool:
        return all(part.looks_up for part in self._parts)

    def start(self, target: Target) -> DraftSession:
        return self._started(target, drafts=True)

    def start_naming(self, target: Target) -> DraftSession:
        return self._started(target, drafts=False)

    def _started(self, target: Target, drafts: bool) -> DraftSession:
        first, then = (part.start(target) for part in self._parts)
        for role, session in (("first", first), ("then", then)):
            if session.control:
                raise OptionError(
                    f"{role} brings a controller of its own, and a hybrid would never ask it; "
                    "combine drafters without one, not auto"
                )
        merge = self._merges(self._parts[1])
        if merge and isinstance(first, VotingSession) and isinstance(then, VotingSession):
            return (natively(first, then) if drafts else None) or _Together(first, then)
        return _Both(first, then, merge)


def _made(drafter: str | Drafter, options: Mapping[str, Any], role: str) -> Drafter:
    made = make_drafter(drafter, options)
    if made is None:
        raise OptionError(
            f"{role}={drafter!r} drafts nothing, so there is nothing to combine; name a drafter, "
            "or use the other alone"
        )
    return made


class _Two(JoinedSession):
    """Two sessions that see the same rows."""

    def named(self, rows: Sequence[int], texts: Texts, count: int) -> Sequence[Sequence[int]]:
        both = (each.named(rows, texts, count) for each in self._sessions)
        return [list(dict.fromkeys([*one, *other])) for one, other in zip(*both, strict=True)]


class _Together(_Two, GrowingSession):
    """Both fill one tree with what they find likeliest together."""

    def __init__(self, first: VotingSession, then: VotingSession) -> None:
        super().__init__([first, then])
        self._both, self._least = (first, then), max(first.least, then.least)

    def fill(self, tree: Guesses, row: int, text: Sequence[int]) -> None:
        voters = [session.voter(row, text) for session in self._both]
        guess_together(tree, text, voters, self._least)


class _Both(_Two):
    """A draft of each, one after the other."""

    def __init__(self, first: DraftSession, then: DraftSession, merge: bool) -> None:
        super().__init__([first, then])
        self._first, self._then, self._merge = first, then, merge

    def propose(self, rows: Sequence[int], texts: Texts, budget: Budget) -> Sequence[Draft]:
        drafts = list(self._first.propose(rows, texts, budget))
        asked = [
            index
            for index, (draft, most) in enumerate(zip(drafts, budget.tokens, strict=True))
            if (len(draft.guesses) < most if self._merge else not draft.guesses and most)
        ]
        if not asked:
            return drafts
        share = replace(budget, tokens=[budget.tokens[index] for index in asked])
        then = self._then.propose(
            [rows[index] for index in asked], [texts[index] for index in asked], share
        )
        for index, draft in zip(asked, then, strict=True):
            drafts[index] = _joined(drafts[index], draft, budget.tokens[index])
        return drafts


def _joined(first: Draft, then: Draft, most: int) -> Draft:
    """Both drafts as one tree. Layers that a merged drafter ran are run again."""
    if first.probs is not None or then.probs is not None:
        raise OptionError(
            "a hybrid cannot use a drafter that samples its drafts, since the other's are chosen "
            "outright; let it choose them (sample=False)"
        )
    if not first.guesses or not then.guesses:
        return first if first.guesses else then
    tree = TreeBuilder(first.tree.tokens[0], most)
    tree.merge(first.tree)
    tree.merge(then.tree)
    return Draft(tree.tree())
