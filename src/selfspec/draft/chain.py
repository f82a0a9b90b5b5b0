"""What drafters that run part of the model have in common: one token after another, each row as far as its budget and confidence go.

A subclass says how one more token is computed. Tokens are chosen by the row's own sampler, from the draft's logits, with the random number
that belongs to the position: under sampling that makes agreement with the target's draw as likely as the two distributions are alike.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from ..contract import Budget, Draft
from ..errors import OptionError
from ..model.cache import Place, Span
from .base import Drafting, Scene


class ChainDrafting(Drafting):
    """Drafts chains with part of the model, on the generation's own cache.

    `vocabulary`: score only that many of the most frequent tokens while drafting; 0 is all of them.
    """

    def __init__(self, scene: Scene, vocabulary: int = 0) -> None:
        size = scene.model.shape.vocabulary
        if not 0 <= vocabulary <= size:
            raise OptionError(f"vocabulary={vocabulary} is outside 0 to {size}, this model's vocabulary; 0 scores all of it")
        self.scene = scene
        self._partial = scene.model.partial_head(vocabulary) if 0 < vocabulary < size else None

    @abstractmethod
    def hidden(self, tokens: Tensor, place: Place, rows: Sequence[int]) -> Tensor:
        """The draft's hidden states of these tokens, one a row, ready for the head."""

    def finish(self, tokens: list[list[int]], rows: Sequence[int]) -> Draft:
        """The draft, once every row is done."""
        return Draft(tokens)

    def propose(self, rows: Sequence[int], texts: Sequence[Sequence[int]], budget: Budget) -> Draft:
        drafted: list[list[int]] = [[] for _ in rows]
        active = [index for index, most in enumerate(budget.tokens) if most > 0]
        while active:
            last = [(texts[i], *drafted[i])[-1] if drafted[i] else texts[i][-1] for i in active]
            spans = [Span(rows[i], len(texts[i]) - 1 + len(drafted[i]), 1) for i in active]
            place = self.scene.cache.place_at(spans)
            x = self.hidden(torch.tensor(last, device=self.scene.model.device), place, [rows[i] for i in active])
            tokens, confident = self._choose(x, [rows[i] for i in active], [[*texts[i], *drafted[i]] for i in active], budget.threshold)
            for i, token in zip(active, tokens, strict=True):
                drafted[i].append(token)
            active = [i for i, sure in zip(active, confident, strict=True) if sure and len(drafted[i]) < budget.tokens[i]]
        return self.finish(drafted, rows)

    def _choose(self, x: Tensor, rows: Sequence[int], contexts: Sequence[Sequence[int]], threshold: float | None) -> tuple[list[int], list[bool]]:
        logits = self._partial(x) if self._partial else self.scene.model.head(x)
        sure = [True] * len(rows) if threshold is None else (logits.float().softmax(-1).amax(-1) >= threshold).tolist()
        samplers = [self.scene.samplers[row] for row in rows]
        if all(sampler.plain for sampler in samplers):
            best = logits.argmax(-1)
            return (self._partial.tokens[best] if self._partial else best).tolist(), sure
        if self._partial:  # penalties and biases speak of the whole vocabulary
            whole = logits.new_full((len(rows), self.scene.model.shape.vocabulary), -torch.inf)
            whole[:, self._partial.tokens] = logits
            logits = whole
        chosen = [
            int(sampler.choose(row[None], [context], [len(context)]))
            for sampler, row, context in zip(samplers, logits, contexts, strict=True)
        ]
        return chosen, sure
