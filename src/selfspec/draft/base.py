"""What a drafter is. A new method is one new file: its options are its fields, its work is
`propose`.

A drafter can only be fast or slow, right or wrong; it cannot change what is generated, since every
token it proposes is verified by the full model. State belongs to one generation and lives in the
session, so one LLM serves many at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..control.base import ControlSession
from ..core.contract import Budget, Draft, Outcome
from ..core.sampling import Sampler
from ..model.compute.cache import KVCache
from ..model.compute.hidden_states import StateCollector
from ..model.layered import LayeredModel
from ..model.passes import HalfObserver


@dataclass(frozen=True)
class Target:
    """What is drafted for: the model, and the cache of its rows."""

    model: LayeredModel
    cache: KVCache


class DraftSession(ABC):
    """A drafter at work on the rows of one generation. Rows come and go; a row's number may be
    another text's once it was dropped."""

    control: ControlSession | None = None
    """Of a drafter that decides itself how much it drafts."""
    observer: HalfObserver | None = None
    """Shown the residual stream around every half while prompts are read."""
    collectors: Sequence[StateCollector] = ()
    """Gather hidden states, of prompts and of every verification."""

    def admit(  # noqa: B027  (some drafters need to know nothing of a row)
        self,
        row: int,
        prompt: Sequence[int],
        sampler: Sampler,
        ends: frozenset[int] = frozenset(),
    ) -> None:
        """A row begins: what it has so far, how its tokens are chosen, and which tokens end it."""

    def drop(self, row: int) -> None:  # noqa: B027
        """The row has ended, and whatever is kept of it may go."""

    @abstractmethod
    def propose(
        self, rows: Sequence[int], texts: Sequence[Sequence[int]], budget: Budget
    ) -> Sequence[Draft]:
        """Guess what follows each of `texts` (the full ids of these rows), at most
        `budget.tokens[i]` tokens each.

        All of a text but its last token is in the cache. Slots beyond that may be written freely.
        They are written over.
        """

    def observe(self, outcome: Outcome) -> None:  # noqa: B027  (most drafters learn nothing)
        """Told after every round what became of the drafts."""


class Drafter(ABC):
    """A way to draft. A frozen dataclass: its fields are the options, each with a docstring. The
    defaults work as they are."""

    name: ClassVar[str]
    trees: ClassVar[bool] = False
    """Whether it proposes trees."""
    decides_how_much: ClassVar[bool] = False
    """Whether it brings a controller of its own."""

    @property
    def learns_across_requests(self) -> bool:
        """Whether what one request taught it speeds up the next, which a benchmark has to say."""
        return False

    @abstractmethod
    def start(self, target: Target) -> DraftSession:
        """Begin a generation. Raises OptionError if the options do not fit the model."""
