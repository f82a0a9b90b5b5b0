"""The words the rooms share. Plain values: no torch module, no tokenizer and no model lives here.

A generation is rows; a *row* is one sequence with its own prompt, sampling, limits and stops. A *round* drafts some tokens
for every unfinished row, verifies them all in one pass, keeps what the model itself would have written, and tells the
drafter. Tokens are kept in order and checked one by one, so nothing after a stop ever becomes visible.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from .sampling import Sampler

FinishReason = Literal["eos", "stop", "length", "context"]


@dataclass(frozen=True)
class Draft:
    """What a drafter proposes for the unfinished rows of one round, in the order in which it was shown them."""

    tokens: Tensor  # (rows, n) long, padded
    counts: Sequence[int]  # how many of each row are meant

    @property
    def total(self) -> int:
        return sum(self.counts)


@dataclass(frozen=True)
class Outcome:
    """What became of a draft: for each row how many drafted tokens were kept, and every token that was kept, the model's own last."""

    accepted: Sequence[int]
    kept: Sequence[Sequence[int]]


@dataclass(frozen=True)
class Budget:
    """How many tokens each unfinished row may draft this round. 0 is plain decoding."""

    tokens: Sequence[int]


class Watch(Protocol):
    """Sees a row's new tokens one by one and says when to stop: stop strings, a user's stopping criteria."""

    def push(self, token: int) -> bool: ...


@dataclass(frozen=True)
class Request:
    """One row as the engine takes it."""

    prompt: Sequence[int]
    sampler: Sampler
    max_new_tokens: int
    eos: frozenset[int] = frozenset()
    watches: Sequence[Watch] = ()
    logprobs: int | None = None  # how many alternatives to report beside each token's own log-probability


@dataclass
class TokenLogprob:
    """Log-probability of a kept token under the model's own (unprocessed) distribution, with the likeliest alternatives."""

    token: int
    logprob: float
    top: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RowStep:
    """What one round added to one row."""

    row: int
    tokens: Sequence[int]
    accepted: int = 0  # how many of them were drafts
    drafted: Sequence[int] = ()
    logprobs: Sequence[TokenLogprob] = ()
    finish_reason: FinishReason | None = None


@dataclass(frozen=True)
class Step:
    """One round: what every row that took part gained."""

    rows: Sequence[RowStep]


@dataclass
class Stats:
    """What a generation cost. Seconds are wall clock; tokens are those kept, over all rows."""

    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0  # of the prompt tokens, those found in the cache of an earlier turn
    new_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    forward_passes: int = 0
    layer_tokens: int = 0  # tokens times layers computed, both phases
    peak_memory_bytes: int = 0

    @property
    def decode_tokens_per_second(self) -> float:
        """Tokens after the first of each row, over the time spent decoding; the first one belongs to the prefill."""
        return self.decoded / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def tokens_per_second(self) -> float:
        """All new tokens over all time, prefill included: what a user waits for."""
        total = self.prefill_seconds + self.decode_seconds
        return self.new_tokens / total if total else 0.0

    @property
    def acceptance(self) -> float:
        """Accepted over drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_verification(self) -> float:
        return self.decoded / self.rounds if self.rounds else 0.0

    decoded: int = 0  # new tokens that came out of rounds, that is not out of the prefill
