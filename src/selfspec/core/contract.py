"""The words the rooms share. Plain values: no torch module, no tokenizer and no model lives here.

A generation is rows; a *row* is one sequence with its own prompt, sampling, limits and stops. A
*round* drafts some tokens for every unfinished row, verifies them all in one pass, keeps what the
model itself would have written, and tells the drafter. Tokens are kept in order and checked one by
one, so nothing after a stop ever becomes visible.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from .sampling import Sampler, TokenLogprob

if TYPE_CHECKING:
    from torch import Tensor

FinishReason = Literal["eos", "stop", "length", "context"]


@dataclass(frozen=True)
class ExitState:
    """Hidden states that left layer `layer - 1` while drafting, so that verification may go on from
    there.

    One tensor a row, (m, width): those of the row's last kept token and of its first m - 1 drafts.
    """

    layer: int
    states: Sequence[Tensor]


@dataclass(frozen=True)
class Draft:
    """What a drafter proposes for the unfinished rows of one round, in the order in which it was
    shown them."""

    tokens: Sequence[Sequence[int]]
    probs: Sequence[Tensor] | None = (
        None  # (n, vocab) a row: what each token was REALLY drawn from; None: chosen outright
    )
    parents: Sequence[Sequence[int]] | None = (
        None  # a tree: each token's parent among the row's drafts, -1 the kept text; None: chains
    )
    resume: ExitState | None = None

    @property
    def total(self) -> int:
        return sum(map(len, self.tokens))


@dataclass(frozen=True)
class Outcome:
    """What became of a draft. Of each row: its accepted drafts (indices into the draft, a path from
    the root), the tokens that were kept (the model's own last), and what the model chose after the
    kept text and after every draft. `logits` are those choices' raw logits, all rows one after the
    other; `hidden` the last layer's states. `rows` says which rows these are, `texts` what they are
    now, the kept tokens included."""

    draft: Draft
    accepted: Sequence[Sequence[int]]
    kept: Sequence[Sequence[int]]
    choices: Sequence[Sequence[int]]
    logits: Tensor
    hidden: Tensor
    rows: Sequence[int] = ()
    texts: Sequence[Sequence[int]] = ()


@dataclass(frozen=True)
class Budget:
    """How many tokens each unfinished row may draft this round (0 is plain decoding), and a
    confidence below which to stop.

    The token at which a drafter's confidence falls below `threshold` is kept: dropping it because
    of its own probability would bias the output under sampling.
    """

    tokens: Sequence[int]
    threshold: float | None = None


@dataclass(frozen=True)
class RoundTime:
    """Seconds of one round: drafting, the verifying pass, and everything else."""

    draft: float
    verify: float
    host: float


class StopCheck(Protocol):
    """Sees a row's new tokens one by one and says when to stop: stop strings, a user's stopping
    criteria."""

    def push(self, token: int) -> bool: ...


@dataclass(frozen=True)
class Request:
    """One row as the engine takes it."""

    prompt: Sequence[int]
    sampler: Sampler
    max_new_tokens: int
    eos: frozenset[int] = frozenset()
    stop_checks: Sequence[StopCheck] = ()
    logprobs: int | None = (
        None  # how many alternatives to report beside each token's own log-probability
    )


@dataclass(frozen=True)
class RowStep:
    """What one round added to one row."""

    row: int
    tokens: Sequence[int]
    accepted: int = 0  # how many of them were drafts
    rejected: Sequence[
        int
    ] = ()  # drafts that were not kept; of a tree, all nodes beside the kept path
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
    cached_prompt_tokens: int = (
        0  # of the prompt tokens, those found in the cache of an earlier turn
    )
    new_tokens: int = 0
    decoded: int = 0  # new tokens that came out of rounds, that is not out of the prefill
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    draft_seconds: float = 0.0  # of the decode seconds, those spent drafting
    verify_seconds: float = 0.0  # and those of the verifying passes; the rest is the host's
    rounds: int = 0
    verifications: int = 0  # rows times rounds
    drafted: int = 0
    accepted: int = 0
    # by depth: drafts that stood on accepted ones, so had a chance
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    forward_passes: int = 0
    layer_tokens: int = 0  # tokens times layers computed, drafts included
    peak_memory_bytes: int = 0

    @property
    def decode_tokens_per_second(self) -> float:
        """Tokens after the first of each row, over the time spent decoding; the first one belongs
        to the prefill."""
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
    def acceptance_by_position(self) -> list[float]:
        """For each depth, the share of drafts kept among those whose predecessors were all kept."""
        return [
            kept / tried
            for kept, tried in zip(self.accepted_at, self.drafted_at, strict=True)
            if tried
        ]

    @property
    def tokens_per_verification(self) -> float:
        """Tokens that a row gained from each pass of the whole model; plain decoding has 1."""
        return self.decoded / self.verifications if self.verifications else 0.0

    @property
    def host_seconds(self) -> float:
        """Decode time that was neither drafting nor verifying."""
        return max(0.0, self.decode_seconds - self.draft_seconds - self.verify_seconds)
