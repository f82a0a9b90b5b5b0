"""Candidates that the model names itself: at a token's first look, the likeliest of a pool.

The pool are the tokens that answers of a task are made of, some hundred, and those of the prompt,
from which the rest is copied. Their rows of the head are a product as small as a predictor, so no
draft model is asked, and what an exit that was trained knows is used. Ours: the paper's candidates
come from a draft model. Does not know what predictors make of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..model.layered import LayeredModel
from ..model.partial_head import PartialHead
from .features import CandidateRows, need_rows

SOURCE = "first-look"

Named = Sequence[int] | PartialHead
"""A text's candidates, or the pool of which its first look takes them."""


class FirstLookRows(CandidateRows):
    """Rows of candidates that are named by the first states that are seen of each text."""

    def __init__(self, model: LayeredModel, pools: Sequence[PartialHead], count: int) -> None:
        need_rows(model)
        self._model, self._pools = model, pools
        self.tokens = torch.full((len(pools), count), -1, device=model.device)
        self.known, self.filled = [True] * len(pools), True
        self._missing = None
        shape = (len(pools), count)
        self._rows = torch.zeros(*shape, model.shape.width, device=model.device)
        no_bias = model.head_product.bias is None
        self._bias = None if no_bias else torch.zeros(shape, device=model.device)
        self._named: set[int] = set()

    def logits(self, texts: Sequence[int], x: Tensor) -> Tensor:
        for at, text in enumerate(texts):
            if text not in self._named:
                self._name(text, x[at : at + 1])
        return super().logits(texts, x)

    def _name(self, text: int, state: Tensor) -> None:
        pool, head = self._pools[text], self._model.head_product
        best = pool.tokens[pool(state)[0].topk(self.tokens.shape[1]).indices]
        self._named.add(text)
        self.tokens[text] = best
        self._rows[text] = head.rows(best).float()
        if self._bias is not None and head.bias is not None:
            self._bias[text] = head.bias[best].float()


def rows_of(model: LayeredModel, named: Sequence[Named], count: int) -> CandidateRows:
    """The rows of what was named, or of what will be."""
    pools = [each for each in named if isinstance(each, PartialHead)]
    if pools:
        return FirstLookRows(model, pools, count)
    return CandidateRows(
        model, [each for each in named if not isinstance(each, PartialHead)], count
    )
