"""A view of a model with small matrices beside its linears: y = W x + B A x. The weights W are the
model's own, unless the part has others in their place.

The matrices come from a `draft-lora` part and stand beside the linears by the names that
`families.py` gives. The model itself is not changed: whoever does not hold the view computes
without them. Does not know what the view is for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import BrokenCheckpoint, OptionError
from ..model.block import Block
from ..model.compute.linear import Linear, LowRank
from ..model.families import FAMILIES
from ..model.layered import LayeredModel
from .files import TrainedPart


def lora_view(part: TrainedPart, model: LayeredModel) -> LayeredModel:
    """A view of the model with the part's matrices beside its linears."""
    family = FAMILIES.get(model.shape.family)
    stored = family is None or family.by_head or family.interleaved or family.backwards
    more = model.of_tokens is not None or model.shape.lenders
    if family is None or stored or more or family.experts or family.latent:
        raise OptionError(
            f"a draft-lora cannot be put on a {model.shape.family} model, whose linears are "
            "stored otherwise; use a draft-head"
        )
    # in the order in which a block has them
    fused = (family.qkv, (family.out,), family.gate_up, (family.down,))

    def changed(layer: int, block: Block) -> Block:
        names = iter([[stored_name(layer, name) for name in pieces] for pieces in fused])
        return block.with_linears(lambda linear: _low_rank(linear, next(names), part, model))

    return model.view(blocks=[changed(*item) for item in enumerate(model.blocks)])


def stored_name(layer: int, name: str) -> str:
    """How a part calls the matrices of a linear."""
    return f"layers/{layer}/{name.replace('.', '/')}"


def _low_rank(base: Linear, names: Sequence[str], part: TrainedPart, model: LayeredModel) -> Linear:
    """A fused linear with the matrices of its pieces, or with the part's weights, if there are."""
    kinds = ["weight"] if f"{names[0]}.weight" in part.tensors else ["a", "b"]
    if not any(f"{name}.{kinds[0]}" in part.tensors for name in names):
        return base
    if lacking := [name for name in names if f"{name}.{kinds[0]}" not in part.tensors]:
        raise BrokenCheckpoint(f"the part lacks the matrices for {lacking[0]}; train it again")
    held = [
        [part.tensors[f"{name}.{which}"].to(model.device, torch.float32) for name in names]
        for which in kinds
    ]
    if len(held) == 1:
        whole = torch.cat(held[0])
        if tuple(whole.shape) != (base.outputs, base.inputs):
            raise BrokenCheckpoint(
                f"the part's weights for {names[0]} have {tuple(whole.shape)} rows and columns, "
                f"the model's {(base.outputs, base.inputs)}; train it again"
            )
        return model.ops.linear([whole], [base.bias])
    downs, ups = held
    fits = all(down.shape[1] == base.inputs for down in downs)
    if not fits or sum(len(up) for up in ups) != base.outputs:
        raise BrokenCheckpoint(
            f"the part's matrices for {names[0]} do not fit into {base.inputs} inputs and "
            f"{base.outputs} outputs; train it again"
        )
    linear = model.ops.linear
    return LowRank(
        base, linear([torch.cat(downs)], [None]), linear([torch.block_diag(*ups)], [None])
    )
