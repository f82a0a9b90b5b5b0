"""What `LLM` hands out: a result, a piece of a stream, what was loaded. Plain values."""

from __future__ import annotations

from dataclasses import dataclass, field

from .core.contract import FinishReason, Stats
from .core.logprobs import TokenLogprob


@dataclass(frozen=True)
class Result:
    """What was generated for one prompt."""

    text: str
    tokens: list[int]  # new tokens only, an end-of-sequence token included
    finish_reason: FinishReason
    stats: Stats  # of this prompt's row
    call: Stats  # of all prompts of the call together
    logprobs: list[TokenLogprob] | None = None
    seed: int | None = None  # None for greedy


@dataclass(frozen=True)
class Piece:
    """What one step of a stream added. Text may lag behind tokens, as characters are whole."""

    text: str
    tokens: list[int]
    accepted: int = 0  # how many of the tokens, from the first on, were drafts
    rejected: list[int] = field(default_factory=list)  # drafts that were not kept
    row: int = 0  # which prompt of the call


@dataclass(frozen=True)
class ModelInfo:
    """What was loaded and how it runs here."""

    name: str
    family: str
    layers: int
    parameters: int
    context: int
    vocabulary: int
    weight_bytes: int
    kernel: str  # who computes
    weights: str  # how products are stored: a kind of our kernels', or torch's dtype
    notes: list[str]  # what is to be said of how the weights are stored
    alone: list[str]  # which halves are not in the one call of a pass, and why
    modules: list[str]  # kinds of modules that products are left to, quantised ones for example
    row_stable: bool
    dtype: str
    device: str
    threads: int
    recorded: str = "no"  # whether steps are replayed as CUDA graphs, or why not

    @property
    def halves(self) -> int:
        return 2 * self.layers
