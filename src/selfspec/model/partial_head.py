"""Some rows of a model's head as a product of their own: logits of these tokens, which is enough to
draft. Knows no drafter."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import OptionError
from .compute.linear import Linear
from .layered import LayeredModel


@dataclass(frozen=True, eq=False)
class PartialHead:
    """The head over `tokens`. Its argmax is an index into them."""

    model: LayeredModel
    tokens: Tensor
    linears: tuple[Linear, ...]
    """Products that stand side by side, their outputs in the order of the tokens."""

    def joined_by(self, tokens: Iterable[int]) -> PartialHead:
        """These tokens too, in a product of their own beside the one that all requests share."""
        more = sorted({*tokens}.difference(self.tokens.tolist()))
        if not more:
            return self
        added = head_over(self.model, torch.tensor(more, device=self.tokens.device))
        both = torch.cat([self.tokens, added.tokens])
        return PartialHead(self.model, both, (*self.linears, *added.linears))

    @torch.inference_mode()
    def __call__(self, x: Tensor) -> Tensor:
        """Hidden states -> logits of the chosen tokens, in their order."""
        return self.model.logits(x, self.linears)


def head_over(model: LayeredModel, tokens: Tensor) -> PartialHead:
    """The head over these tokens."""
    head = model.head_product
    if not head.readable:
        raise OptionError(
            f"rows cannot be cut out of this model's head (kernel {model.ops.kernel!r}, "
            f"{type(head).__name__}), so a draft cannot score some tokens only; draft with the "
            f"full vocabulary, or use kernel='plain' where the head's weights are plain"
        )
    bias = None if head.bias is None else head.bias[tokens]
    return PartialHead(model, tokens, (model.ops.linear([head.cut(tokens)], [bias]),))


def partial_head(model: LayeredModel, size: int, more: Iterable[int] = ()) -> PartialHead:
    """The head over the first `size` token ids and `more`, made once for a model. Many tokenizers
    number their tokens by how often they occur, so the first ids are mostly the frequent ones."""
    others = frozenset(token for token in more if token >= size)

    def make() -> PartialHead:
        return head_over(model, torch.tensor([*range(size), *sorted(others)], device=model.device))

    return model.once((PartialHead, size, others), make)
