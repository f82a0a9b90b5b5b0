"""The loop: draft -> verify -> commit -> observe, as a generator of steps. Everything else consumes
it.

A row's tokens are all in the cache but the last; a round runs that one and the drafts after it
through the full model, which chooses a token at each of them. Drafts are kept while they equal the
model's choices, then comes the model's own. With no drafts this is plain decoding, one token a
round. Does not know tokenizers or text; stops are asked of `Watch`es.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from ..control.base import ControlSession
from ..core.contract import Draft, FinishReason, Outcome, Request, RoundTime, RowStep, Stats, Step
from ..core.randomness import uniform
from ..core.sampling import TokenLogprob, logprobs_of
from ..draft.base import Drafter, Target
from ..errors import OptionError, PromptError
from ..model.compute.cache import KVCache, RowSpan
from ..model.compute.memory import work_too_large
from ..model.compute.plan import LayerPlan
from ..model.layered import LayeredModel
from ..verify.outright import accepted_path
from ..verify.rejection import verified


class Row:
    """One sequence under way. `tokens` is the prompt and everything kept so far."""

    def __init__(self, index: int, request: Request, context: int) -> None:
        self.index, self.request = index, request
        self.tokens = list(request.prompt)
        # new tokens that may still come
        self.room = min(request.max_new_tokens, context - len(self.tokens))
        self._limit: FinishReason = "length" if self.room == request.max_new_tokens else "context"
        self.finish: FinishReason | None = None
        # so many tokens the cache holds for good: what a round in the middle does to it lies behind
        # them
        self.settled = 0

    def commit(self, tokens: Sequence[int]) -> int:
        """Keep tokens in order up to the first stop; says how many were kept."""
        for kept, token in enumerate(tokens, start=1):
            self.tokens.append(token)
            self.room -= 1
            # every watch sees every token
            stopped = [observer.push(token) for observer in self.request.stop_checks]
            if token in self.request.eos:
                self.finish = "eos"
            elif any(stopped):
                self.finish = "stop"
            elif self.room <= 0:
                self.finish = self._limit
            if self.finish:
                return kept
        return len(tokens)


@dataclass(frozen=True)
class Block:
    """What the full model reads of one row in a round: its last token, then the drafts, as a
    tree."""

    row: Row
    tokens: Sequence[int]
    parents: Sequence[int]  # of each draft: another draft, or -1 for the row's last token
    first: int  # the slot of the row's last token: all before it are in the cache

    def contexts(self) -> list[list[int]]:
        """The text up to the row's last token and up to each draft."""
        found = [self.row.tokens]
        for token, parent in zip(self.tokens, self.parents, strict=True):
            found.append([*found[parent + 1], token])
        return found


class Generation:
    """Some rows decoded together. Iterate over it to run it; `stats` grows as it goes."""

    def __init__(
        self,
        model: LayeredModel,
        requests: Sequence[Request],
        drafter: Drafter | None = None,
        control: ControlSession | None = None,
        *,
        cache: KVCache | None = None,
        lock: AbstractContextManager[object] | None = None,
    ) -> None:
        for request in requests:
            model.check_length(len(request.prompt))
            if request.max_new_tokens < 1:
                raise PromptError(
                    f"max_new_tokens is {request.max_new_tokens}, so nothing would be generated; "
                    f"ask for at least 1"
                )
        self._model = model
        self.rows = [
            Row(index, request, model.shape.context) for index, request in enumerate(requests)
        ]
        self.cache = cache or model.new_cache(
            len(requests), max(len(r.tokens) + min(r.room, 512) for r in self.rows)
        )
        self.stats = Stats(prompt_tokens=sum(len(request.prompt) for request in requests))
        self._lock = lock or nullcontext()
        self._computed_before = int(self.cache.computed.sum())
        prompts, samplers = (
            [request.prompt for request in requests],
            [request.sampler for request in requests],
        )
        target = Target(model, self.cache, prompts, samplers, [request.eos for request in requests])
        self._drafting = drafter.start(target) if drafter else None
        self._taps = self._drafting.collectors if self._drafting else ()
        self._control = control or (self._drafting.control if self._drafting else None)
        if (drafter is None) != (self._control is None):
            raise OptionError(
                "a drafter needs a controller, and a controller a drafter; give both or neither"
            )

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
        """Holds the model for one step and books its time; what the consumer does between steps is
        not counted."""
        with self._lock, torch.inference_mode():
            start = time.perf_counter()
            try:
                yield
            except torch.OutOfMemoryError as error:
                self._model.free_idle()  # for whoever asks for less next
                raise work_too_large(
                    self.cache.rows, self.cache.bytes, self._model.device
                ) from error
            setattr(self.stats, phase, getattr(self.stats, phase) + time.perf_counter() - start)
            self.stats.layer_tokens = int(self.cache.computed.sum()) - self._computed_before

    def _prefill(self) -> Step:
        for row in self.rows:  # the last token is always read, for its logits
            self.cache.rollback(row.index, len(row.tokens) - 1)
            row.settled = self.cache.length(row.index)
        self.stats.cached_prompt_tokens = sum(self.cache.length(row.index) for row in self.rows)
        observer = self._drafting.observer if self._drafting else None
        logits = self._model.prefill(
            [row.tokens for row in self.rows], self.cache, observer, self._taps
        )
        self.stats.forward_passes += 1
        blocks = [Block(row, [], [], len(row.tokens) - 1) for row in self.rows]
        step, _, _ = self._commit(blocks, logits)
        self._settle(self.rows)
        return step

    @staticmethod
    def _settle(rows: Sequence[Row]) -> None:
        """The last act of a round: whatever is raised before it, a row's cache counts as it was
        before the round."""
        for row in rows:
            row.settled = len(row.tokens) - 1

    def _round(self, live: Sequence[Row]) -> Step:
        """Draft, verify, commit, observe."""
        clock = [time.perf_counter()]
        draft = self._draft(live)
        clock.append(time.perf_counter())
        parents = draft.parents or [range(-1, len(tokens) - 1) for tokens in draft.tokens]
        blocks = [
            Block(row, tokens, family, len(row.tokens) - 1)
            for row, tokens, family in zip(live, draft.tokens, parents, strict=True)
        ]
        hidden = self._verify(blocks, draft)
        logits = self._model.head(hidden)
        if self._control:
            self._model.wait()  # a controller compares what passes and drafts cost
        clock.append(time.perf_counter())
        step, paths, choices = self._commit(blocks, logits, draft.probs)
        for block, path in zip(blocks, paths, strict=True):
            self.cache.keep(block.row.index, block.first, [0, *(index + 1 for index in path)])
            self.cache.rollback(block.row.index, len(block.row.tokens) - 1)
        self._settle(live)
        self._count(draft, parents, paths, step)
        if self._drafting and self._control:
            kept = [part.tokens for part in step.rows]
            indices, texts = [row.index for row in live], [row.tokens for row in live]
            outcome = Outcome(draft, paths, kept, choices, logits, hidden, indices, texts)
            self._drafting.observe(outcome)
            clock.append(time.perf_counter())
            spent = RoundTime(clock[1] - clock[0], clock[2] - clock[1], clock[3] - clock[2])
            self.stats.draft_seconds += spent.draft
            self._control.learn(outcome, spent)
        self.stats.verify_seconds += clock[2] - clock[1]
        return step

    def _draft(self, live: Sequence[Row]) -> Draft:
        if self._drafting is None or self._control is None:
            return Draft([[] for _ in live])
        budget = self._control.budget([row.room - 1 for row in live])
        if not any(budget.tokens):
            return Draft([[] for _ in live])
        draft = self._drafting.propose(
            [row.index for row in live], [row.tokens for row in live], budget
        )
        assert len(draft.tokens) == len(live), "a draft has one entry for each row it was asked for"
        assert all(len(t) <= most for t, most in zip(draft.tokens, budget.tokens, strict=True)), (
            "a draft is within its budget"
        )
        return draft

    def _verify(self, blocks: Sequence[Block], draft: Draft) -> Tensor:
        """The last layer's states of each row's last token and drafts; layers that a draft ran for
        good are not run again."""
        model, cache = self._model, self.cache
        texts = [[block.row.tokens[-1], *block.tokens] for block in blocks]
        spans = [
            RowSpan(block.row.index, block.first, len(text))
            for block, text in zip(blocks, texts, strict=True)
        ]
        trees = (
            None
            if draft.parents is None
            else [[-1, *(p + 1 for p in block.parents)] for block in blocks]
        )
        place = cache.layout_at(spans, trees)
        self.stats.forward_passes += 1
        if draft.resume is None:
            x = self._embed([token for text in texts for token in text])
            return model.run(x, model.full_plan, cache, place, collectors=self._taps)
        assert trees is None, "a tree is verified from the first layer"
        layer, states = draft.resume.layer, draft.resume.states
        # a chain's last draft was never read
        missing = [text[len(state) :] for text, state in zip(texts, states, strict=True)]
        rest = cache.layout_at(
            [
                RowSpan(s.row, s.first + s.count - len(left), len(left))
                for s, left in zip(spans, missing, strict=True)
            ]
        )
        x = model.run(
            self._embed([token for left in missing for token in left]),
            LayerPlan(0, layer),
            cache,
            rest,
        )
        pieces = zip(states, x.split([len(left) for left in missing]), strict=True)
        joined = torch.cat([part for pair in pieces for part in pair])
        for collector in self._taps:
            if layer - 1 in collector.layers:
                collector.put(layer - 1, place, joined)
        return model.run(
            joined, LayerPlan(layer, model.layers), cache, place, collectors=self._taps
        )

    def _embed(self, tokens: Sequence[int]) -> Tensor:
        return self._model.embed(torch.tensor(tokens, device=self._model.device))

    def _commit(
        self, blocks: Sequence[Block], logits: Tensor, probs: Sequence[Tensor] | None = None
    ) -> tuple[Step, list[list[int]], list[list[int]]]:
        """Keep what the model itself would have written; says for each row which drafts that were,
        and what was chosen where."""
        decided = (
            self._accept(blocks, logits)
            if probs is None
            else self._accept_drawn(blocks, logits, probs)
        )
        parts, paths, first = [], [], 0
        for block, (path, chosen) in zip(blocks, decided, strict=True):
            ends = [0, *(index + 1 for index in path)]  # after these the model's choices are kept
            kept = block.row.commit([chosen[end] for end in ends])
            path = path[:kept]
            tokens = block.row.tokens[-kept:]
            logprobs = self._logprobs(
                block.row, logits[[first + end for end in ends[:kept]]], tokens
            )
            rejected = [token for index, token in enumerate(block.tokens) if index not in path]
            parts.append(
                RowStep(block.row.index, tokens, len(path), rejected, logprobs, block.row.finish)
            )
            paths.append(path)
            first += len(block.tokens) + 1
        self.stats.new_tokens += sum(len(part.tokens) for part in parts)
        return Step(parts), paths, [chosen for _, chosen in decided]

    def _accept(self, blocks: Sequence[Block], logits: Tensor) -> list[tuple[list[int], list[int]]]:
        """Of each row: which drafts, chosen outright, are kept, and what the model chose where."""
        choices = self._choose(blocks, logits)
        return [
            (accepted_path(block.tokens, block.parents, chosen), chosen)
            for block, chosen in zip(blocks, choices, strict=True)
        ]

    @staticmethod
    def _accept_drawn(
        blocks: Sequence[Block], logits: Tensor, probs: Sequence[Tensor]
    ) -> list[tuple[list[int], list[int]]]:
        """The same of drafts that were drawn from `probs`."""
        pieces = logits.split([len(block.tokens) + 1 for block in blocks])
        return [_accept_drawn_row(*each) for each in zip(blocks, pieces, probs, strict=True)]

    @staticmethod
    def _choose(blocks: Sequence[Block], logits: Tensor) -> list[list[int]]:
        """The model's token after each row's last one and after each of its drafts. One read from
        the device."""
        sizes = [len(block.tokens) + 1 for block in blocks]
        if all(block.row.request.sampler.plain for block in blocks):
            chosen = logits.argmax(-1)
        else:
            chosen = torch.cat(
                [
                    _choose_row(block, piece)
                    for block, piece in zip(blocks, logits.split(sizes), strict=True)
                ]
            )
        flat = iter(chosen.tolist())
        return [[next(flat) for _ in range(size)] for size in sizes]

    @staticmethod
    def _logprobs(row: Row, logits: Tensor, tokens: Sequence[int]) -> Sequence[TokenLogprob]:
        return (
            ()
            if row.request.logprobs is None
            else logprobs_of(logits, tokens, row.request.logprobs)
        )

    def _count(
        self,
        draft: Draft,
        parents: Sequence[Sequence[int]],
        paths: Sequence[Sequence[int]],
        step: Step,
    ) -> None:
        stats = self.stats
        stats.rounds += 1
        stats.verifications += len(step.rows)
        stats.decoded += sum(len(part.tokens) for part in step.rows)
        stats.drafted += draft.total
        stats.accepted += sum(map(len, paths))
        for family, path in zip(parents, paths, strict=True):
            for depth, parent in enumerate([-1, *path]):
                if parent not in family:
                    break
                if depth == len(stats.drafted_at):
                    stats.drafted_at.append(0)
                    stats.accepted_at.append(0)
                stats.drafted_at[depth] += 1
                stats.accepted_at[depth] += depth < len(path)


def _choose_row(block: Block, logits: Tensor) -> Tensor:
    contexts = block.contexts()
    return block.row.request.sampler.choose(
        logits, contexts, [len(context) for context in contexts]
    )


def _accept_drawn_row(block: Block, logits: Tensor, q: Tensor) -> tuple[list[int], list[int]]:
    # as in a round in which no row drafts: what its neighbours do must not change a row's tokens
    if not block.tokens:
        return [], _choose_row(block, logits).tolist()
    sampler, position = block.row.request.sampler, len(block.row.tokens)
    p = sampler.probabilities(logits, block.contexts())
    return verified(
        block.tokens,
        block.parents,
        p,
        q,
        lambda depth, stream: uniform(sampler.seed, position + depth, stream),
    )
