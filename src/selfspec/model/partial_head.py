"""Some rows of a model's head as a product of their own: logits of these tokens, which is enough to
draft. Knows no drafter."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import OptionError
from .compute.linear import Linear

if TYPE_CHECKING:
    from .layered import LayeredModel


class PartialHead:
    """The head over `tokens`. Its argmax is an index into them."""

    def __init__(self, model: LayeredModel, tokens: Tensor) -> None:
        head = model.head_product
        if not head.readable:
            raise OptionError(
                f"rows cannot be cut out of this model's head (kernel {model.ops.kernel!r}, "
                f"{type(head).__name__}); "
                "draft with the full vocabulary, or use kernel='plain' where the head's weights "
                "are plain"
            )
        self._model, self.tokens = model, tokens
        bias = None if head.bias is None else head.bias[tokens]
        self._linears: tuple[Linear, ...] = (model.ops.linear([head.rows(tokens)], [bias]),)

    def joined_by(self, tokens: Iterable[int]) -> PartialHead:
        """These tokens too, in a product of their own: a request's, beside those that all requests
        share."""
        more = sorted({*tokens}.difference(self.tokens.tolist()))
        if not more:
            return self
        both, added = (
            copy.copy(self),
            PartialHead(self._model, torch.tensor(more, device=self.tokens.device)),
        )
        both.tokens, both._linears = (
            torch.cat([self.tokens, added.tokens]),
            (*self._linears, *added._linears),
        )
        return both

    @torch.inference_mode()
    def __call__(self, x: Tensor) -> Tensor:
        """Hidden states -> logits of the chosen tokens, in their order."""
        return self._model.logits(x, self._linears)
