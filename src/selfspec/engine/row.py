"""A request, and the row that it becomes: what was written, what the cache holds of it for good,
and how many tokens may still come. Knows neither models nor drafts under way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..control.base import Controller
from ..core.contract import FinishReason, Stats, StopCheck
from ..core.sampling import Sampler
from ..draft.base import Drafter
from ..errors import OptionError
from ..model.compute.cache import RowSpan


@dataclass(frozen=True)
class Request:
    """What the engine is asked to continue, and how."""

    prompt: Sequence[int]
    sampler: Sampler
    max_new_tokens: int
    eos: frozenset[int] = frozenset()
    stop_checks: Sequence[StopCheck] = ()
    logprobs: int | None = None
    """How many alternatives to report beside each token's own log-probability."""
    drafter: Drafter | None = None
    """None is plain decoding."""
    controller: Controller | None = None
    """None: the drafter brings its own."""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise OptionError(
                f"max_new_tokens is {self.max_new_tokens}, so nothing would be generated; ask for "
                "at least 1"
            )
        if self.drafter is None and self.controller is not None:
            raise OptionError(
                "a controller without a drafter has nothing to decide; name a drafter, or leave "
                "the controller out"
            )


@dataclass(frozen=True)
class RowState:
    """All of a row that a round changes, beside its tokens. One assignment replaces it, so that a
    round that is interrupted counts whole or not at all."""

    length: int
    """Tokens that count. What stands behind them belongs to a round that was interrupted."""
    settled: int
    """Tokens that the cache holds for good. What lies behind them may be written over."""
    room: int
    """New tokens that may still come."""
    finish: FinishReason | None = None


class Row:
    """One request under way. `tokens` is the prompt and everything kept so far; `slot` its row of
    the cache, which another request may have had before."""

    def __init__(self, index: int, slot: int, request: Request, context: int, known: int) -> None:
        self.index, self.slot, self.request = index, slot, request
        self.tokens = list(request.prompt)
        prompt = len(self.tokens)
        room = min(request.max_new_tokens, context - prompt)
        self._limit: FinishReason = "length" if room == request.max_new_tokens else "context"
        self.state = RowState(prompt, known, room)
        self.stats = Stats(prompt_tokens=prompt, cached_prompt_tokens=known)
        self.computed_before = 0  # tokens times layers that the slot had computed for others
        self.error: Exception | None = None
        """What a stopping criterion or a logits processor of this request's raised."""

    @property
    def finish(self) -> FinishReason | None:
        return self.state.finish

    @property
    def settled(self) -> int:
        return self.state.settled

    @property
    def reading(self) -> bool:
        """Whether the prompt is still to be read, its last token included."""
        return self.state.length == len(self.request.prompt)

    @property
    def ended(self) -> bool:
        return self.finish is not None or self.error is not None

    def after(self, tokens: Sequence[int]) -> tuple[RowState, list[int]]:
        """The state once these tokens were kept in order, up to the first stop, and which they are.
        Every stop check sees every token, and nothing else changes yet."""
        kept: list[int] = []
        finish: FinishReason | None = None
        room = self.state.room
        for token in tokens:
            kept.append(token)
            room -= 1
            stopped = [check.push(token) for check in self.request.stop_checks]
            if token in self.request.eos:
                finish = "eos"
            elif any(stopped):
                finish = "stop"
            elif room <= 0:
                finish = self._limit
            if finish:
                break
        length = self.state.length + len(kept)
        return RowState(length, length - 1, room, finish), kept

    def apply(self, state: RowState, kept: Sequence[int]) -> None:
        """Take over what `after` found. May be done twice."""
        self.tokens[state.length - len(kept) :] = kept
        self.state = state


def chunk_of(rows: Sequence[Row], most: int) -> dict[Row, RowSpan]:
    """What is read next of these rows' prompts, in their order: the shortest first. A quarter
    belongs to the row that came first, so that short ones cannot keep a long one waiting for
    ever."""
    unread = {row: len(row.tokens) - row.settled for row in rows}
    counts = {rows[0]: min(most // 4, unread[rows[0]])}
    left = most - counts[rows[0]]
    for row in sorted(rows, key=unread.__getitem__):
        more = min(left, unread[row] - counts.get(row, 0))
        counts[row] = counts.get(row, 0) + more
        left -= more
    return {row: RowSpan(row.slot, row.settled, counts[row]) for row in rows if counts.get(row)}
