"""What a drafter is. A new method is one new file beside this one: its options are its fields, its work is `propose`.

A drafter can only be fast or slow, right or wrong; it cannot change what is generated, since every token it proposes is
verified by the full model. State belongs to one generation and lives in the `Drafting`, so one LLM serves many at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..contract import Budget, Draft, Outcome
from ..model.adapter import LayeredModel
from ..model.cache import KVCache
from ..model.passes import HalfWatch
from ..model.taps import Taps
from ..sampling import Sampler

if TYPE_CHECKING:
    from ..control.base import Controlling


@dataclass(frozen=True)
class Scene:
    """What a drafter may use: the model, the generation's cache, and of each row the prompt, how its tokens are chosen, and the
    tokens that end it (no entries: none are known)."""

    model: LayeredModel
    cache: KVCache
    prompts: Sequence[Sequence[int]]
    samplers: Sequence[Sampler]
    ends: Sequence[frozenset[int]] = ()


class Drafting(ABC):
    """A drafter at work on one generation."""

    control: Controlling | None = None  # of one that decides itself how much it drafts
    watch: HalfWatch | None = None  # shown the residual stream around every half during the prefill
    taps: Sequence[Taps] = ()  # gather hidden states, of the prefill and of every verification

    @abstractmethod
    def propose(self, rows: Sequence[int], texts: Sequence[Sequence[int]], budget: Budget) -> Draft:
        """Guess what follows each of `texts` (full ids of the unfinished rows `rows`), at most `budget.tokens[i]` tokens each.

        All of a text but its last token is in the cache. Slots beyond that may be written freely; they are written over.
        """

    def observe(self, outcome: Outcome) -> None:  # noqa: B027  (most drafters learn nothing)
        """Told after every round what became of the draft."""


class Drafter(ABC):
    """A way to draft. A frozen dataclass: its fields are the options, each with a docstring; the defaults work as they are."""

    name: ClassVar[str]
    trees: ClassVar[bool] = False  # whether it proposes trees

    @property
    def learns_across_requests(self) -> bool:
        """Whether what one request taught it speeds up the next, which a benchmark has to say."""
        return False

    @abstractmethod
    def start(self, scene: Scene) -> Drafting:
        """Begin a generation. Raises OptionError if the options do not fit the model."""
