"""What lossy decoding hands out, and what it needs of an `LLM`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, Self

from ..core.contract import FinishReason, Stats
from ..core.logprobs import TokenLogprob
from ..exits.rules import Counts
from ..model.layered import LayeredModel


class Generates(Protocol):
    """What is needed of an `LLM`."""

    model: LayeredModel

    def view(self, model: LayeredModel) -> Self:
        """The same over another view of the model."""

    def generate(self, prompts: Any, **options: Any) -> Any:
        """Continue prompts."""


@dataclass(frozen=True)
class LossyResult:
    """A continuation that the whole model never checked. No `Result`: it must not pass for one."""

    text: str
    tokens: list[int]
    finish_reason: FinishReason
    layer: int  # how many layers wrote it: of tokens that left at different ones, the most
    stats: Stats
    call: Stats  # what all prompts of the call cost together
    logprobs: list[TokenLogprob] | None = None  # the exit's own
    seed: int | None = None
    exits: Sequence[int] = ()
    """After how many layers each token was said, where that differs. The first one follows the
    prompt, which the whole model reads."""
    looking: Counts = field(default_factory=Counts)
    """What looking for exits cost all prompts of the call together."""
    lossy: Literal[True] = True

    @property
    def average_layers(self) -> float:
        """Layers a decoded token; the first one belongs to the prompt."""
        decoded = self.exits[1:]
        return sum(decoded) / len(decoded) if decoded else float(self.layer)
