"""Some rows of a model's head as a product of their own: logits of these tokens, which is enough to
draft. Knows no drafter."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..errors import OptionError
from .compute.linear import Linear
from .compute.ops import Ops
from .layered import LayeredModel


@dataclass(frozen=True, eq=False)
class PartialHead:
    """The head over `tokens`. Its argmax is an index into them."""

    model: LayeredModel
    tokens: Tensor
    linears: tuple[Linear, ...]
    """Products that stand side by side, their outputs in the order of the tokens."""
    ops: Ops
    """What the products are made by."""

    @cached_property
    def ids(self) -> list[int]:
        """The tokens as plain numbers."""
        return [int(token) for token in self.tokens.tolist()]

    def joined_by(self, tokens: Iterable[int]) -> PartialHead:
        """These tokens too, in a product of their own beside the one that all requests share."""
        more = sorted({*tokens}.difference(self.tokens.tolist()))
        if not more:
            return self
        added = head_over(self.model, torch.tensor(more, device=self.tokens.device), self.ops)
        both = torch.cat([self.tokens, added.tokens])
        return PartialHead(self.model, both, (*self.linears, *added.linears), self.ops)

    @torch.inference_mode()
    def __call__(self, x: Tensor) -> Tensor:
        """Hidden states -> logits of the chosen tokens, in their order."""
        return self.model.logits(x, self.linears)


def head_over(model: LayeredModel, tokens: Tensor, ops: Ops | None = None) -> PartialHead:
    """The head over these tokens, by default in the model's own kind of weights."""
    head, ops = model.head_product, ops or model.ops
    if not head.readable:
        raise OptionError(
            f"rows cannot be cut out of this model's head (kernel {model.ops.kernel!r}, "
            f"{type(head).__name__}), so a draft cannot score some tokens only; draft with the "
            f"full vocabulary, or use kernel='plain' where the head's weights are plain"
        )
    bias = None if head.bias is None else head.bias[tokens]
    return PartialHead(model, tokens, (ops.linear([head.cut(tokens)], [bias]),), ops)


def partial_head(model: LayeredModel, size: int, more: Iterable[int] = ()) -> PartialHead:
    """The head over the first `size` token ids and `more`, made once for a model. Many tokenizers
    number their tokens by how often they occur, so the first ids are mostly the frequent ones."""
    others = frozenset(token for token in more if token >= size)

    def make() -> PartialHead:
        return head_over(model, torch.tensor([*range(size), *sorted(others)], device=model.device))

    return model.once((PartialHead, size, others), make)
