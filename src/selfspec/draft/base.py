"""What a drafter is. A new method is one new file beside this one: its options are its fields, its
work is `propose`.

A drafter can only be fast or slow, right or wrong; it cannot change what is generated, since every
token it proposes is verified by the full model. State belongs to one generation and lives in the
`Drafting`, so one LLM serves many at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..core.contract import Budget, Draft, Outcome
from ..core.sampling import Sampler
from ..model.compute.cache import KVCache
from ..model.compute.hidden_states import StateCollector
from ..model.layered import LayeredModel
from ..model.passes import HalfObserver

if TYPE_CHECKING:
    from ..control.base import ControlSession


@dataclass(frozen=True)
class Target:
    """What a drafter may use: the model, the generation's cache, and of each row the prompt, how
    its tokens are chosen, and the tokens that end it (no entries: none are known)."""

    model: LayeredModel
    cache: KVCache
    prompts: Sequence[Sequence[int]]
    samplers: Sequence[Sampler]
    ends: Sequence[frozenset[int]] = ()


class DraftSession(ABC):
    """A drafter at work on one generation."""

    control: ControlSession | None = None  # of one that decides itself how much it drafts
    observer: HalfObserver | None = (
        None  # shown the residual stream around every half during the prefill
    )
    collectors: Sequence[
        StateCollector
    ] = ()  # gather hidden states, of the prefill and of every verification

    @abstractmethod
    def propose(self, rows: Sequence[int], texts: Sequence[Sequence[int]], budget: Budget) -> Draft:
        """Guess what follows each of `texts` (full ids of the unfinished rows `rows`), at most
        `budget.tokens[i]` tokens each.

        All of a text but its last token is in the cache. Slots beyond that may be written freely;
        they are written over.
        """

    def observe(self, outcome: Outcome) -> None:  # noqa: B027  (most drafters learn nothing)
        """Told after every round what became of the draft."""


class Drafter(ABC):
    """A way to draft. A frozen dataclass: its fields are the options, each with a docstring; the
    defaults work as they are."""

    name: ClassVar[str]
    trees: ClassVar[bool] = False  # whether it proposes trees

    @property
    def learns_across_requests(self) -> bool:
        """Whether what one request taught it speeds up the next, which a benchmark has to say."""
        return False

    @abstractmethod
    def start(self, target: Target) -> DraftSession:
        """Begin a generation. Raises OptionError if the options do not fit the model."""
