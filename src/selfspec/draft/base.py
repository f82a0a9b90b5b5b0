"""What a drafter is. A new one is one file: its options are its fields, its work is `propose`.

A drafter can be fast or slow, right or wrong. It cannot change what is generated, since the full
model verifies every token it proposes. Its state lives in the session of one generation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..control.base import ControlSession
from ..core.contract import Budget, Draft, Outcome
from ..core.sampling import Sampler
from ..model.compute.cache import KVCache
from ..model.compute.call import HalfObserver
from ..model.compute.cpu.lookups import Lookups
from ..model.compute.hidden_states import StateCollector
from ..model.layered import LayeredModel

Texts = Sequence[Sequence[int]]
"""The full ids of some rows, prompts included."""


@dataclass(frozen=True)
class Target:
    """What is drafted for: the model, and the cache of its rows."""

    model: LayeredModel
    cache: KVCache


class DraftSession(ABC):
    """A drafter at work on the rows of one generation. A dropped row's number may be used again."""

    control: ControlSession | None = None
    """Set by a drafter that decides itself how much it drafts."""
    observer: HalfObserver | None = None
    """Shown the residual stream around every half while prompts are read."""
    collectors: Sequence[StateCollector] = ()
    """Gather hidden states, of prompts and of every verification."""

    weighs: bool = False
    """Whether it leaves out guesses that are not worth their price (`Budget.price`)."""

    ranks: int = 1
    """How many of the likeliest tokens at every node it would like to know (`Outcome.best`)."""

    def admit(  # noqa: B027  (some drafters need to know nothing of a row)
        self, row: int, prompt: Sequence[int], sampler: Sampler, ends: frozenset[int] = frozenset()
    ) -> None:
        """A row begins: what it has so far, how its tokens are chosen, and which tokens end it."""

    def drop(self, row: int) -> None:  # noqa: B027
        """The row has ended, and whatever is kept of it may go."""

    @abstractmethod
    def propose(self, rows: Sequence[int], texts: Texts, budget: Budget) -> Sequence[Draft]:
        """Guess at most `budget.tokens[i]` tokens after each of `texts`.

        All of a text but its last token is in the cache. Slots behind that may be written freely.
        A text's last tokens may be others than at the last call: where a drafter guesses for
        another one, what that one keeps is a guess too.
        """

    def observe(self, outcome: Outcome) -> None:  # noqa: B027  (most drafters learn nothing)
        """Told after every round what became of the drafts."""

    def by_kernels(self, row: int) -> Lookups | None:
        """What proposes the same for this row, and learns the same, without Python. None: nothing
        does. Asked right before it is used instead of `propose`."""
        return None

    def named(self, rows: Sequence[int], texts: Texts, count: int) -> Sequence[Sequence[int]]:
        """Of each row tokens that may come next, the likeliest first: candidates for an exit. By
        default the first guesses of a tree."""
        drafts = self.propose(rows, texts, Budget([4 * count] * len(rows)))
        trees = [draft.tree for draft in drafts]
        return [
            [t.tokens[node] for node in range(1, len(t)) if t.parents[node] == 0] for t in trees
        ]


class Drafter(ABC):
    """A way to draft: a frozen dataclass. Its fields are the options, each with a docstring."""

    name: ClassVar[str]
    trees: ClassVar[bool] = False
    """Whether it proposes trees."""
    likely: ClassVar[float] = 0.4
    """How likely its first guess is kept: what a controller expects before it has seen any."""
    decides_how_much: ClassVar[bool] = False
    """Whether it brings a controller of its own."""
    names: ClassVar[bool] = False
    """Whether it can name candidates for the next token without touching the model's cache."""
    reads_states: ClassVar[bool] = False
    """Whether it names them from what the whole model's layers leave of the kept text."""

    @property
    def looks_up(self) -> bool:
        """Whether it runs no part of any model, so that asking it costs next to nothing."""
        return False

    @property
    def learns_across_requests(self) -> bool:
        """Whether one request speeds up the next. A benchmark has to say so."""
        return False

    def share(self, model: LayeredModel) -> float:
        """Of what a pass of the model reads, about what each draft reads. 0: little, or unknown."""
        return 0.0

    @abstractmethod
    def start(self, target: Target) -> DraftSession:
        """Begin a generation. Raises OptionError if the options do not fit the model."""

    def start_naming(self, target: Target) -> DraftSession:
        """Begin one in which it only names candidates: nothing is drafted with it."""
        return self.start(target)


class JoinedSession(DraftSession):
    """Several sessions at work on the same rows. All see every prompt and learn from every round.
    A subclass says which of them draft."""

    def __init__(self, sessions: Sequence[DraftSession]) -> None:
        self._sessions = sessions
        self.observer = _joined_observer(sessions)
        self.collectors = [each for session in sessions for each in session.collectors]
        self.ranks = max((session.ranks for session in sessions), default=1)

    def admit(
        self, row: int, prompt: Sequence[int], sampler: Sampler, ends: frozenset[int] = frozenset()
    ) -> None:
        for session in self._sessions:
            session.admit(row, prompt, sampler, ends)

    def drop(self, row: int) -> None:
        for session in self._sessions:
            session.drop(row)

    def observe(self, outcome: Outcome) -> None:
        for session in self._sessions:
            session.observe(outcome)


def _joined_observer(sessions: Sequence[DraftSession]) -> HalfObserver | None:
    """The observers of all sessions as one, None if there are none."""
    observers = [session.observer for session in sessions if session.observer]
    if len(observers) < 2:
        return observers[0] if observers else None

    def observe_half(layer: int, attention: bool, before: Tensor, after: Tensor) -> None:
        for observer in observers:
            observer(layer, attention, before, after)

    return observe_half
