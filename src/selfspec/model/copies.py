"""A copy of a model's weights in fewer bits, as a view of the model: what can draft for it.

The copy has the model's embeddings, norms and cache; its products are its own. It is made once from
the weights that the model has, whatever they are stored as. Does not know who drafts.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..errors import OptionError, ResourceError
from .compute.cpu.few_bits import Stored
from .compute.cpu.kinds import KINDS
from .compute.cpu.operations import product
from .compute.cpu.packs import Shelf
from .compute.grouped import STORED, Blocks
from .compute.linear import Linear
from .compute.memory import gigabytes
from .layered import LayeredModel
from .load.checkpoint import available_memory
from .measuring import weight_bytes
from .operations import check_weights

SAMPLE = 128  # rows of a matrix that tell how it was rounded
SAME = 0.01  # a difference that is not worth more bits, as a share
SPARE = 1.25  # what making a copy needs, in sizes of the copy


def copy_in(model: LayeredModel, weights: str) -> LayeredModel:
    """The model with its weights in another kind, made once and kept as long as the model.

    "auto": 4 bits where they lose nothing, since the weights were rounded to 4 bits before, or
    where the model has few bits itself; else 8 bits.
    """
    kind = _kind_of_copy(model, weights)
    return model.once((copy_in, kind), lambda: _made(model, kind))


def share_of_copy(model: LayeredModel, weights: str) -> float:
    """Of what a pass of the model reads, about what one of such a copy reads."""
    return KINDS[_kind_of_copy(model, weights)].bits / KINDS[str(model.ops.weights)].bits


def _kind_of_copy(model: LayeredModel, weights: str) -> str:
    check_weights(weights)
    model.needs_layers("a copy in fewer bits")
    if model.ops.kernel != "native":
        raise OptionError(
            f"a copy in {weights} needs our kernels, which run float32 on a CPU, and this model is "
            f"run by kernel {model.ops.kernel!r}; draft with 'hybrid' or 'early-exit' there"
        )
    if weights == "auto":
        few = model.ops.weights in ("int8", STORED)
        small = few or model.once(_fits_4_bits, lambda: _fits_4_bits(model))
        weights = "int4" if small else "int8"
    return weights


def _made(model: LayeredModel, weights: str) -> LayeredModel:
    kind = KINDS[weights]
    if kind.bits >= KINDS[str(model.ops.weights)].bits:
        raise _no_smaller(model, weights)
    held = [*(linear for block in model.blocks for linear in block.products), model.head_product]
    needed = sum(linear.outputs * linear.inputs for linear in held)
    needed = int(SPARE * needed * kind.bits / 8)
    if needed > (free := available_memory(model.device)):
        raise ResourceError(
            f"a copy of the weights in {weights} needs about {gigabytes(needed)}, and "
            f"{gigabytes(free)} are free"
        )
    shelf = model.packs.shelf(f"{model.ops.weights}-{weights}") if model.packs else Shelf()
    blocks = [
        block.with_linears(lambda each: _in_kind(each, weights, shelf)) for block in model.blocks
    ]
    copy = model.view(blocks=blocks, head=_in_kind(model.head_product, kind.head or weights, shelf))
    if weight_bytes(copy) >= weight_bytes(model):  # a file had as few bits
        raise _no_smaller(model, weights)
    shelf.close()
    return copy


def _no_smaller(model: LayeredModel, weights: str) -> OptionError:
    return OptionError(
        f"a copy in {weights} is no smaller than the model, whose weights are "
        f"{model.ops.weights}; name a kind of fewer bits"
    )


def _fits_4_bits(model: LayeredModel) -> bool:
    """Whether some rows of the middle layer's products are the same numbers in 4 bits."""
    block = model.blocks[len(model.blocks) // 2]
    for linear in block.linears:
        if linear.readable and not linear.alone:
            rows = linear.rows(torch.arange(min(SAMPLE, linear.outputs)))
            rounded = KINDS["int4"]([rows], [None]).rows(torch.arange(len(rows)))
            if (rounded - rows).norm() > SAME * rows.norm():
                return False
    return True


def _in_kind(linear: Linear, kind: str, shelf: Shelf) -> Linear:
    """The product in another kind, from the shelf or made a few rows at a time. One whose weights
    cannot be read, or are stored in as few bits, stays as it is."""
    if not linear.readable or linear.alone or _stored_in(linear) <= KINDS[kind].bits:
        return linear

    def rows(begin: int, end: int) -> Tensor:
        return linear.rows(torch.arange(begin, end))

    blocks = Blocks(linear.outputs, linear.inputs, rows, kind, "it is rounded here")
    return product(kind, [blocks], [linear.bias], shelf)


def _stored_in(linear: Linear) -> float:
    """About how many bits a weight has that was stored in few; many if it was not."""
    return linear.bits if isinstance(linear, Stored) else math.inf
