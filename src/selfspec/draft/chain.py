"""What drafters that run part of the model have in common: one token after another, each row as far
as its budget and confidence go.

A subclass says how one more token is computed. Tokens are chosen by the row's own sampler, from the
draft's logits, with the random number that belongs to the position: under sampling that makes
agreement with the target's draw as likely as the two distributions are alike. With `sample` they
are drawn with numbers of their own instead, and verified by rejection (speculative sampling as
published). A row's draft ends with a token that would end the row: nothing behind it could be kept.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor

from ..core.contract import Budget, Draft, ExitState
from ..core.randomness import DRAFT, invert, uniform
from ..errors import OptionError
from ..model.compute.cache import RowSpan, TokenLayout
from ..model.compute.plan import LayerPlan
from ..model.partial_head import PartialHead
from .base import DraftSession, Target


class ChainSession(DraftSession):
    """Drafts chains with part of the model, on the generation's own cache.

    `vocabulary`, `tokens`: score only the token ids below that number (most tokenizers give low ids
    to frequent tokens), these tokens, and those of the prompts, from which much is copied. Without
    both all tokens are scored. `vocabulary` may also be a part's own choice. `sample`: under
    sampling, draw drafts independently of the target's own draws and report what they were drawn
    from.
    """

    def __init__(
        self,
        target: Target,
        vocabulary: int | PartialHead = 0,
        sample: bool = False,
        tokens: Sequence[int] = (),
    ) -> None:
        size = target.model.shape.vocabulary
        outside = [token for token in tokens if not 0 <= token < size]
        if outside:
            raise OptionError(
                f"tokens: {outside[0]} is outside 0 to {size - 1}, this model's vocabulary, so it "
                f"could never be drafted; "
                "make the list with this model's tokenizer"
            )
        self.target, self.cache = target, target.cache
        self._ends = target.ends or [frozenset[int]()] * len(target.prompts)
        self._sample = sample and not all(sampler.params.greedy for sampler in target.samplers)
        if isinstance(vocabulary, PartialHead):
            self._partial: PartialHead | None = vocabulary
        elif not 0 <= vocabulary <= size:
            raise OptionError(
                f"vocabulary={vocabulary} is outside 0 to {size}, this model's vocabulary; 0 "
                f"scores all of it"
            )
        elif vocabulary < size and (vocabulary or tokens):
            part = target.model.partial_head(vocabulary, tokens)
            # What is drawn at random decides the text, and may not depend on what neighbours ask:
            # then prompts stay out.
            self._partial = part if self._sample else part.joined_by(chain(*target.prompts))
        else:
            self._partial = None
        self._drawn_from: dict[
            int, list[Tensor]
        ] = {}  # of each row: the distribution of each of its drafts
        # whether reading a token means waiting for the device
        self.reads_wait = target.model.device.type != "cpu"

    @abstractmethod
    def hidden(self, tokens: Tensor, layout: TokenLayout, rows: Sequence[int]) -> Tensor:
        """The draft's hidden states of these tokens, one a row, ready for the head."""

    def slot(self, row: int, length: int) -> int:
        """Where in the cache the last token of a text of that length belongs."""
        return length - 1

    def finish(self, tokens: list[list[int]], rows: Sequence[int]) -> Draft:
        """The draft, once every row is done."""
        return Draft(tokens)

    def propose(self, rows: Sequence[int], texts: Sequence[Sequence[int]], budget: Budget) -> Draft:
        plain = not self._sample and all(self.target.samplers[row].plain for row in rows)
        if self.reads_wait and plain and budget.threshold is None:
            return self.finish(self._unread(rows, texts, budget.tokens), rows)
        drafted: list[list[int]] = [[] for _ in rows]
        self._drawn_from = {row: [] for row in rows}
        active = [index for index, most in enumerate(budget.tokens) if most > 0]
        while active:
            last = [(texts[i], *drafted[i])[-1] if drafted[i] else texts[i][-1] for i in active]
            slots = [self.slot(rows[i], len(texts[i]) + len(drafted[i])) for i in active]
            layout = self.cache.layout_at(
                [RowSpan(rows[i], slot, 1) for i, slot in zip(active, slots, strict=True)]
            )
            x = self.hidden(
                torch.tensor(last, device=self.target.model.device),
                layout,
                [rows[i] for i in active],
            )
            tokens, confident = self._choose(
                x,
                [rows[i] for i in active],
                [[*texts[i], *drafted[i]] for i in active],
                budget.threshold,
            )
            for i, token in zip(active, tokens, strict=True):
                drafted[i].append(token)
            active = [
                i
                for i, sure in zip(active, confident, strict=True)
                if sure
                and len(drafted[i]) < budget.tokens[i]
                and drafted[i][-1] not in self._ends[rows[i]]
            ]
        draft = self.finish(drafted, rows)
        return (
            replace(draft, probs=[self._distributions(row) for row in rows])
            if self._sample
            else draft
        )

    def _unread(
        self, rows: Sequence[int], texts: Sequence[Sequence[int]], most: Sequence[int]
    ) -> list[list[int]]:
        """Greedy drafts of lengths that are known: nothing has to be decided on the way, so a GPU's
        tokens are read once, at the end. A few may stand behind an end of sequence, which is
        cheaper than to look after each."""
        steps: list[tuple[list[int], Tensor]] = []
        for depth in range(max(most, default=0)):
            active = [index for index, tokens in enumerate(most) if tokens > depth]
            if depth == 0:
                last = torch.tensor([texts[i][-1] for i in active], device=self.target.model.device)
            elif len(active) < len(last):
                last = last[[steps[-1][0].index(i) for i in active]]
            slots = [self.slot(rows[i], len(texts[i]) + depth) for i in active]
            layout = self.cache.layout_at(
                [RowSpan(rows[i], slot, 1) for i, slot in zip(active, slots, strict=True)]
            )
            last = self._best(self._logits(self.hidden(last, layout, [rows[i] for i in active])))
            steps.append((active, last))
        drafted: list[list[int]] = [[] for _ in rows]
        read = iter(torch.cat([tokens for _, tokens in steps]).tolist() if steps else ())
        for active, _ in steps:
            for i in active:
                drafted[i].append(next(read))
        return drafted

    def _logits(self, x: Tensor) -> Tensor:
        return self._partial(x) if self._partial else self.target.model.head(x)

    def _best(self, logits: Tensor) -> Tensor:
        best = logits.argmax(-1)
        return self._partial.tokens[best] if self._partial else best

    def _choose(
        self,
        x: Tensor,
        rows: Sequence[int],
        contexts: Sequence[Sequence[int]],
        threshold: float | None,
    ) -> tuple[list[int], list[bool]]:
        logits = self._logits(x)
        sure = (
            [True] * len(rows)
            if threshold is None
            else (logits.float().softmax(-1).amax(-1) >= threshold).tolist()
        )
        samplers = [self.target.samplers[row] for row in rows]
        if not self._sample and all(sampler.plain for sampler in samplers):
            return self._best(logits).tolist(), sure
        if self._partial:  # penalties and biases speak of the whole vocabulary
            whole = logits.new_full((len(rows), self.target.model.shape.vocabulary), -torch.inf)
            whole[:, self._partial.tokens] = logits
            logits = whole
        if self._sample:
            return [self._draw(*each) for each in zip(rows, logits, contexts, strict=True)], sure
        chosen = [
            int(sampler.choose(row[None], [context], [len(context)]))
            for sampler, row, context in zip(samplers, logits, contexts, strict=True)
        ]
        return chosen, sure

    def _draw(self, row: int, logits: Tensor, context: Sequence[int]) -> int:
        sampler = self.target.samplers[row]
        q = sampler.probabilities(logits[None], [context])[0]
        self._drawn_from[row].append(q)
        return invert(q, uniform(sampler.seed, len(context), DRAFT))

    def _distributions(self, row: int) -> Tensor:
        """(drafts, vocab), a row's."""
        if drawn_from := self._drawn_from[row]:
            return torch.stack(drawn_from)
        return torch.empty(0, self.target.model.shape.vocabulary, device=self.target.model.device)


class LayerSession(ChainSession):
    """Drafts with the halves of a plan. What the plan computes before its first skip is what the
    whole model computes, so these layers need not run again: their states are left for verification
    (`reuse`), which runs the other layers only.
    """

    def __init__(
        self,
        target: Target,
        plan: LayerPlan | None,
        vocabulary: int | PartialHead = 0,
        reuse: bool = True,
        sample: bool = False,
        tokens: Sequence[int] = (),
    ) -> None:
        super().__init__(target, vocabulary, sample, tokens)
        self._reuse = reuse
        self._states: dict[int, list[Tensor]] = {}
        self.use(plan)

    def use(self, plan: LayerPlan | None) -> None:
        """Draft by this plan from now on; None drafts nothing."""
        self.plan = plan
        self._exact = _exact_layers(plan) if plan else 0
        pieces = (
            [_piece(plan, 0, self._exact), _piece(plan, self._exact, plan.stop)] if plan else []
        )
        self._pieces = [piece for piece in pieces if piece]
        assert self._exact < self.target.model.layers, (
            "a plan that skips nothing is the whole model, which need not be drafted with"
        )

    def propose(self, rows: Sequence[int], texts: Sequence[Sequence[int]], budget: Budget) -> Draft:
        if self.plan is None:
            return Draft([[] for _ in rows])
        self._states = {row: [] for row in rows}
        return super().propose(rows, texts, budget)

    def hidden(self, tokens: Tensor, layout: TokenLayout, rows: Sequence[int]) -> Tensor:
        model = self.target.model
        x = model.embed(tokens)
        for piece in self._pieces:
            x = model.run(x, piece, self.target.cache, layout)
            if piece.stop == self._exact:
                for index, row in enumerate(rows):
                    self._states[row].append(x[index : index + 1])
        return x

    def finish(self, tokens: list[list[int]], rows: Sequence[int]) -> Draft:
        if not (self._reuse and self._exact and any(tokens)):
            return Draft(tokens)
        model = self.target.model
        empty = torch.empty(0, model.shape.width, dtype=model.dtype, device=model.device)
        states = [torch.cat(self._states[row]) if self._states[row] else empty for row in rows]
        return Draft(tokens, resume=ExitState(self._exact, states))


def _exact_layers(plan: LayerPlan) -> int:
    """How many layers from the first on run whole."""
    return min(plan.skipped_attention | plan.skipped_mlp, default=plan.stop)


def _piece(plan: LayerPlan, start: int, stop: int) -> LayerPlan | None:
    """The plan's layers `start` to `stop` - 1, or None if nothing of them runs."""
    attention, mlp = (
        frozenset(layer for layer in skipped if start <= layer < stop)
        for skipped in (plan.skipped_attention, plan.skipped_mlp)
    )
    return None if len(attention & mlp) == stop - start else LayerPlan(start, stop, attention, mlp)
