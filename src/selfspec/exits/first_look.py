"""Candidates that the model names itself: at a token's first look, the likeliest of a pool.

The pool are the tokens that answers of a task are made of, some hundred, and those of the prompt,
from which the rest is copied. Their rows of the head are a product as small as a predictor, so no
draft model is asked, and what an exit that was trained knows is used. Ours: the paper's candidates
come from a draft model. Does not know what predictors make of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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
        self._rows = torch.empty(0)  # gathered at the first second look: most texts have none
        self._bias = None
        self._named: set[int] = set()

    def logits(self, texts: Sequence[int], x: Tensor) -> Tensor:
        new = [at for at, text in enumerate(texts) if text not in self._named]
        first = {at: self._name(texts[at], x[at : at + 1]) for at in new}
        old = [at for at in range(len(texts)) if at not in first]
        again: Iterable[Tensor] = ()
        if old:
            again = self._again([texts[at] for at in old], x[old] if new else x)
        later = dict(zip(old, again, strict=True))
        return torch.stack([first[at] if at in first else later[at] for at in range(len(texts))])

    def _name(self, text: int, state: Tensor) -> Tensor:
        """A text's candidates from here on, and their logits."""
        best = self._pools[text](state)[0].topk(self.tokens.shape[1])
        self.tokens[text] = self._pools[text].tokens[best.indices]
        self._named.add(text)
        return best.values.float()

    def names(self, text: int, token: int) -> bool:
        return token in self.tokens[text].tolist()

    def _again(self, texts: Sequence[int], x: Tensor) -> Tensor:
        """Logits of those that are named. Rows are of texts that may be named later too."""
        head, count = self._model.head_product, self.tokens.shape[1]
        ids = self.tokens[list(texts)].flatten()
        self._rows = head.rows(ids).float().view(len(texts), count, -1)
        self._bias = None if head.bias is None else head.bias[ids].float().view(len(texts), count)
        return super().logits(range(len(texts)), x)


def rows_of(model: LayeredModel, named: Sequence[Named], count: int) -> CandidateRows:
    """The rows of what was named, or of what will be."""
    pools = [each for each in named if isinstance(each, PartialHead)]
    if pools:
        return FirstLookRows(model, pools, count)
    return CandidateRows(
        model, [each for each in named if not isinstance(each, PartialHead)], count
    )
