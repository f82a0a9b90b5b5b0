"""The loop: draft -> verify -> commit -> observe, as a generator of steps. Everything else consumes it.

A row's tokens are all in the cache but the last; a round runs that one and the drafts after it through the full model,
which chooses a token at each of them. Drafts are kept while they equal the model's choices, then comes the model's own.
With no drafts this is plain decoding, one token a round. Does not know tokenizers or text; stops are asked of `Watch`es.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from .contract import Budget, Draft, FinishReason, Outcome, Request, RowStep, Stats, Step, TokenLogprob
from .draft.base import Drafting, as_draft
from .errors import PromptError
from .model.adapter import LayeredModel
from .model.cache import KVCache
from .sampling import logprobs_of
from .verify.outright import accepted


class Controller(Protocol):
    """Says how many tokens to draft."""

    def budget(self, rooms: Sequence[int]) -> Budget: ...


class Row:
    """One sequence under way. `tokens` is the prompt and everything kept so far."""

    def __init__(self, index: int, request: Request, context: int) -> None:
        self.index, self.request = index, request
        self.tokens = list(request.prompt)
        self.room = min(request.max_new_tokens, context - len(self.tokens))  # new tokens that may still come
        self._limit: FinishReason = "length" if self.room == request.max_new_tokens else "context"
        self.finish: FinishReason | None = None

    def commit(self, tokens: Sequence[int]) -> int:
        """Keep tokens in order up to the first stop; says how many were kept."""
        for kept, token in enumerate(tokens, start=1):
            self.tokens.append(token)
            self.room -= 1
            stopped = [watch.push(token) for watch in self.request.watches]  # every watch sees every token
            if token in self.request.eos:
                self.finish = "eos"
            elif any(stopped):
                self.finish = "stop"
            elif self.room <= 0:
                self.finish = self._limit
            if self.finish:
                return kept
        return len(tokens)


class Generation:
    """Some rows decoded together. Iterate over it to run it; `stats` grows as it goes."""

    def __init__(
        self,
        model: LayeredModel,
        requests: Sequence[Request],
        drafting: Drafting | None = None,
        controller: Controller | None = None,
        *,
        cache: KVCache | None = None,
        lock: AbstractContextManager[object] | None = None,
    ) -> None:
        for request in requests:
            model.check_length(len(request.prompt))
            if request.max_new_tokens < 1:
                raise PromptError(f"max_new_tokens is {request.max_new_tokens}, so nothing would be generated; ask for at least 1")
        self._model, self._drafting, self._controller = model, drafting, controller
        self.rows = [Row(index, request, model.shape.context) for index, request in enumerate(requests)]
        self.cache = cache or model.new_cache(len(requests), max(len(r.tokens) + min(r.room, 512) for r in self.rows))
        self.stats = Stats(prompt_tokens=sum(len(request.prompt) for request in requests))
        self._lock = lock or nullcontext()

    def __iter__(self) -> Iterator[Step]:
        with self._timed("prefill_seconds"):
            step = self._prefill()
        yield step
        while live := [row for row in self.rows if row.finish is None]:
            with self._timed("decode_seconds"):
                step = self._round(live)
            yield step

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        """Holds the model for one step and books its time; what the consumer does between steps is not counted."""
        with self._lock, torch.inference_mode():
            start = time.perf_counter()
            yield
            setattr(self.stats, phase, getattr(self.stats, phase) + time.perf_counter() - start)

    def _prefill(self) -> Step:
        prompts = [row.tokens for row in self.rows]
        for row in self.rows:  # the last token is always read, for its logits
            self.cache.rollback(row.index, len(row.tokens) - 1)
        self.stats.cached_prompt_tokens = sum(self.cache.length(row.index) for row in self.rows)
        logits = self._model.prefill(prompts, self.cache)
        self._count(self.stats.prompt_tokens - self.stats.cached_prompt_tokens)
        return self._commit(self.rows, [[] for _ in self.rows], logits)

    def _round(self, live: Sequence[Row]) -> Step:
        drafts = self._draft(live)
        guesses = [tokens[:count] for tokens, count in zip(drafts.tokens.tolist(), drafts.counts, strict=True)]
        counts = [0] * len(self.rows)
        for row, guess in zip(live, guesses, strict=True):
            counts[row.index] = 1 + len(guess)
        tokens = [token for row, guess in zip(live, guesses, strict=True) for token in (row.tokens[-1], *guess)]
        logits = self._model.forward(torch.tensor(tokens, device=self._model.device), self.cache, self.cache.place(counts))
        self._count(len(tokens))
        self.stats.rounds += 1
        self.stats.drafted += drafts.total
        step = self._commit(live, guesses, logits)
        for row in live:
            self.cache.rollback(row.index, len(row.tokens) - 1)
        self.stats.accepted += sum(part.accepted for part in step.rows)
        self.stats.decoded += sum(len(part.tokens) for part in step.rows)
        if self._drafting:
            self._drafting.observe(Outcome([part.accepted for part in step.rows], [part.tokens for part in step.rows]))
        return step

    def _draft(self, live: Sequence[Row]) -> Draft:
        if self._drafting is None or self._controller is None:
            return as_draft([[] for _ in live])
        budget = self._controller.budget([row.room - 1 for row in live])
        draft = self._drafting.propose([row.index for row in live], [row.tokens for row in live], budget)
        assert len(draft.counts) == len(live), "a draft has one entry for each row it was asked for"
        assert all(count <= most for count, most in zip(draft.counts, budget.tokens, strict=True)), "a draft is within its budget"
        return draft

    def _commit(self, rows: Sequence[Row], guesses: Sequence[Sequence[int]], logits: Tensor) -> Step:
        choices = self._choose(rows, guesses, logits)
        parts, first = [], 0
        for row, guess, chosen in zip(rows, guesses, choices, strict=True):
            right = accepted(guess, chosen)
            kept = row.commit([*guess[:right], chosen[right]])
            tokens = row.tokens[-kept:]
            logprobs = self._logprobs(row, logits[first : first + kept], tokens)
            parts.append(RowStep(row.index, tokens, min(right, kept), guess, logprobs, row.finish))
            first += len(guess) + 1
        self.stats.new_tokens += sum(len(part.tokens) for part in parts)
        return Step(parts)

    @staticmethod
    def _choose(rows: Sequence[Row], guesses: Sequence[Sequence[int]], logits: Tensor) -> list[list[int]]:
        """The model's token after each row's last one and after each of its drafts. One read from the device."""
        if all(row.request.sampler.plain for row in rows):
            chosen = logits.argmax(-1)
        else:
            pieces = logits.split([len(guess) + 1 for guess in guesses])
            chosen = torch.cat([_choose_row(row, guess, piece) for row, guess, piece in zip(rows, guesses, pieces, strict=True)])
        flat = iter(chosen.tolist())
        return [[next(flat) for _ in range(len(guess) + 1)] for guess in guesses]

    @staticmethod
    def _logprobs(row: Row, logits: Tensor, tokens: Sequence[int]) -> Sequence[TokenLogprob]:
        return () if row.request.logprobs is None else logprobs_of(logits, tokens, row.request.logprobs)

    def _count(self, tokens: int) -> None:
        self.stats.forward_passes += 1
        self.stats.layer_tokens += tokens * self._model.layers


def _choose_row(row: Row, guess: Sequence[int], logits: Tensor) -> Tensor:
    contexts = [row.tokens + list(guess[:count]) for count in range(len(guess) + 1)]
    return row.request.sampler.choose(logits, contexts, [len(context) for context in contexts])
