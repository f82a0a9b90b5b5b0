"""The words the rooms share. Plain values: no torch module, no tokenizer and no model lives here.

A generation is rows; a *row* is one sequence with its own prompt, sampling, limits and stops. A
*round* drafts some tokens for every unfinished row, verifies them all in one pass, keeps what the
model itself would have written, and tells the drafter. Tokens are kept in order and checked one by
one, so nothing after a stop ever becomes visible.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from .logprobs import TokenLogprob
from .price import Price
from .tree import Tree

if TYPE_CHECKING:
    from torch import Tensor

FinishReason = Literal["eos", "stop", "length", "context"]


@dataclass(frozen=True)
class ExitStates:
    """Hidden states of a draft's first nodes at a layer, so that verification can go on from there.

    Layers 0 to `layers[node]` - 1 are done for a node, and what they wrote is in the cache. Nodes
    beyond the list begin at layer 0.
    """

    layers: Sequence[int]
    states: Tensor  # (len(layers), width)
    logits: Tensor | None = None
    """What the whole head said of them, where it was asked, (len(layers), vocabulary). Only looked
    at if these are all nodes, and no layer is left to run."""
    below: Mapping[int, Tensor] = field(default_factory=dict)
    """What left earlier layers, by layer, (len(layers), width): for drafters that read states. Of
    nodes that did not come so far it says nothing."""


@dataclass(frozen=True)
class Draft:
    """What a drafter proposes for one row in one round.

    `probs[node]` is the distribution that a drawn guess REALLY came from, (vocab,); nothing stands
    at the root. Without it the guesses were chosen outright.
    """

    tree: Tree
    probs: Sequence[Tensor | None] | None = None
    exits: ExitStates | None = None
    expected: float | None = None
    """How many guesses are likely to be kept, from a drafter that knows."""

    @classmethod
    def chain(cls, text: Sequence[int], guesses: Sequence[int] = ()) -> Draft:
        """Guesses that follow one another after a text."""
        return cls(Tree.chain(text[-1], guesses))

    @property
    def guesses(self) -> Sequence[int]:
        return self.tree.guesses

    @property
    def as_chain(self) -> Draft:
        """Its first branch alone, for a model that cannot read trees."""
        if self.tree.is_chain:
            return self
        nodes = [0, *self.tree.first_branch()]
        probs = None if self.probs is None else [self.probs[node] for node in nodes]
        return Draft(
            Tree.chain(self.tree.tokens[0], [self.tree.tokens[n] for n in nodes[1:]]), probs
        )


@dataclass(frozen=True)
class RowOutcome:
    """What became of one row's draft."""

    row: int
    text: Sequence[int]
    """What it is now, the kept tokens included."""
    draft: Draft
    path: Sequence[int]
    """The root and the guesses that were kept."""
    kept: Sequence[int]
    """The tokens that the round added to the text, the model's own last."""
    choices: Sequence[int]
    """What the model chose after each node."""

    @property
    def accepted(self) -> int:
        """How many guesses were kept."""
        return len(self.path) - 1


@dataclass(frozen=True)
class Outcome:
    """What became of the drafts of some rows. The rows' nodes stand one after the other in `logits`
    (the model's, unprocessed) and in `hidden` (the last layer's states)."""

    rows: Sequence[RowOutcome]
    logits: Tensor
    hidden: Tensor
    best: Sequence[Sequence[int]] | None = None
    """The likeliest tokens at every node, as far as they were looked up."""

    @property
    def drafted(self) -> int:
        """Guesses of all rows."""
        return sum(len(row.draft.tree) - 1 for row in self.rows)

    @property
    def accepted(self) -> int:
        return sum(row.accepted for row in self.rows)


@dataclass(frozen=True)
class Budget:
    """How many tokens each row may draft this round (0 is plain decoding), and when to stop before.

    The token at which a drafter's confidence falls below `threshold` is kept: dropping it because
    of its own probability would bias the output under sampling.

    `price` is what guesses cost, the same for each row: a drafter that knows how likely its guesses
    are drafts those that bring more.
    """

    tokens: Sequence[int]
    threshold: float | None = None
    price: Price | None = None


@dataclass(frozen=True)
class RoundTime:
    """Seconds of one round: drafting, the verifying pass, and everything else."""

    draft: float
    verify: float
    host: float
    beside: int = 0  # other tokens of the same pass: of rows with another drafter, or read again


class StopCheck(Protocol):
    """Sees a row's new tokens one by one and says when to stop, at a stop string for example."""

    def push(self, token: int) -> bool: ...


@dataclass(frozen=True)
class RowStep:
    """What one round added to one row."""

    row: int
    tokens: Sequence[int]
    accepted: int = 0  # how many of them were drafts
    rejected: Sequence[int] = ()  # drafts that were not kept; of a tree, all nodes beside the path
    logprobs: Sequence[TokenLogprob] = ()
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    """What the request's own code raised: a stopping criterion, a logits processor."""


@dataclass(frozen=True)
class Step:
    """One round: what every row that took part gained."""

    rows: Sequence[RowStep]


@dataclass
class Stats:
    """What a row cost, or a generation. Seconds are wall clock. Tokens are those kept.

    A row's seconds and passes are those in which it took part, so rows that ran together share
    them. A generation has its own seconds and passes, and its rows' tokens added up.
    """

    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0  # of the prompt tokens, those found in the cache of another turn
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
    drafted_at: list[int] = field(default_factory=list)
    """By depth: drafts whose parents were all accepted."""
    accepted_at: list[int] = field(default_factory=list)
    forward_passes: int = 0
    layer_tokens: int = 0  # tokens times layers computed, drafts included
    peak_memory_bytes: int = 0

    def count(self, draft: Draft, path: Sequence[int], kept: Sequence[int]) -> None:
        """Book one row's draft: the root and the kept guesses, and the tokens that came of it."""
        tree, accepted = draft.tree, len(path) - 1
        self.verifications += 1
        self.decoded += len(kept)
        self.drafted += len(tree) - 1
        self.accepted += accepted
        for depth, node in enumerate(path):
            if node not in tree.parents:
                break
            if depth == len(self.drafted_at):
                self.drafted_at.append(0)
                self.accepted_at.append(0)
            self.drafted_at[depth] += 1
            self.accepted_at[depth] += depth < accepted

    def add_tokens(self, row: Stats) -> None:
        """Add a row's tokens: all that rows do not share."""
        for name in (
            "prompt_tokens", "cached_prompt_tokens", "new_tokens", "decoded", "verifications",
            "drafted", "accepted", "layer_tokens",
        ):  # fmt: skip
            setattr(self, name, getattr(self, name) + getattr(row, name))
        pairs = (self.drafted_at, row.drafted_at), (self.accepted_at, row.accepted_at)
        for ours, theirs in pairs:
            ours += [0] * (len(theirs) - len(ours))
            for depth, count in enumerate(theirs):
                ours[depth] += count

    @property
    def decode_tokens_per_second(self) -> float:
        """Decoded tokens over decode time. The first token of a row belongs to the prefill."""
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
        pairs = zip(self.accepted_at, self.drafted_at, strict=True)
        return [kept / tried for kept, tried in pairs if tried]

    @property
    def tokens_per_verification(self) -> float:
        """Tokens that a row gained from each pass of the whole model; plain decoding has 1."""
        return self.decoded / self.verifications if self.verifications else 0.0

    @property
    def host_seconds(self) -> float:
        """Decode time that was neither drafting nor verifying."""
        return max(0.0, self.decode_seconds - self.draft_seconds - self.verify_seconds)
