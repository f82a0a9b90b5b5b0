"""A second view of a model with small matrices beside its linears: y = W x + B A x. The weights W are the model's own.

The matrices come from a `draft-lora` part and stand beside the linears by the names that `families.py` gives. The model itself is
not changed: whoever does not hold the view computes without them. Does not know what the view is for.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import OptionError
from .adapter import LayeredModel
from .extras import Part
from .families import FAMILIES
from .linear import Linear
from .ops import Ops


class AddedLinear(Linear):
    """A linear with a product of two small ones beside it."""

    def __init__(self, base: Linear, down: Linear, up: Linear) -> None:
        self._base, self._down, self._up = base, down, up
        self.outputs, self.inputs, self.bias = base.outputs, base.inputs, base.bias

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return self._base(x, residual) + self._up(self._down(x))

    def rows(self, index: Tensor) -> Tensor:
        raise NotImplementedError("nobody reads the rows of a layer's linear")

    @property
    def bytes(self) -> int:
        return self._base.bytes + self._down.bytes + self._up.bytes


def lora_view(part: Part, model: LayeredModel) -> LayeredModel:
    """The model with the part's matrices beside its linears."""
    family = FAMILIES.get(model.shape.family)
    if family is None or family.by_head or family.interleaved or family.experts:
        raise OptionError(f"a draft-lora cannot be put on a {model.shape.family} model, whose linears are stored otherwise")
    view = copy.copy(model)
    names = (family.qkv, (family.out,), family.gate_up, (family.down,))
    view.blocks = [
        block.with_linears(
            [
                _added(linear, [stored_name(index, name) for name in fused], part, model)
                for linear, fused in zip(block.linears, names, strict=True)
            ]
        )
        for index, block in enumerate(model.blocks)
    ]
    return view


def stored_name(layer: int, name: str) -> str:
    """How a part calls the matrices of a linear."""
    return f"layers/{layer}/{name.replace('.', '/')}"


def _added(base: Linear, names: Sequence[str], part: Part, model: LayeredModel) -> Linear:
    """A fused linear with the matrices of those of its pieces that have some."""
    if f"{names[0]}.a" not in part.tensors:
        return base
    downs, ups = ([part.tensors[f"{name}.{which}"].to(model.device, model.dtype) for name in names] for which in "ab")
    ops: Ops = model.ops
    return AddedLinear(base, ops.linear([torch.cat(downs)], [None]), ops.linear([torch.block_diag(*ups)], [None]))
