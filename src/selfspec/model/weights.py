"""A layer's weights by the names that `families.py` gives, brought into the one order that our
block knows.

Conv1D's weights lie on their side, some projections are fused head by head, some rotary pairs are
neighbours: all of that is undone here, once, so that block and kernels need not know. A linear
whose weight is not plain (quantised) is kept as the module that it is, and what an adapter adds
stands beside (peft_layers.py). Does not know how a half is run.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from ..errors import UnsupportedModel
from .compute.grouped import Blocks, Matrix, joined
from .compute.linear import JoinedLinear, Linear, LowRank, ModuleLinear, joined_bias
from .compute.norms import Norm, NormKind
from .compute.ops import Ops
from .compute.stored import StoredEmbedding, StoredLinear
from .family import Factor
from .peft_layers import Added, taken_apart

NO_EPS = 1e-5  # of a norm that names none, which is torch's own


@dataclass(frozen=True)
class LinearWeights:
    """A linear's weight, (outputs, inputs), and bias; or, instead of them, the module that
    multiplies with weights of its own. Both where the weight is in few bits: who reads such
    weights has no need of the module."""

    weight: Matrix | None
    bias: Tensor | None
    outputs: int
    inputs: int
    module: nn.Module | None = None
    added: Sequence[Added] = ()
    """What adapters add."""


def module(root: nn.Module, path: str) -> nn.Module:
    """The sub-module at a dotted path."""
    found: nn.Module = attrgetter(path)(root)
    return found


_NO_FACTORS: Mapping[str, Factor] = {}


def linear_weights(
    root: nn.Module, path: str, factors: Mapping[str, Factor] = _NO_FACTORS
) -> LinearWeights:
    """The linear at a dotted path, with what its inputs and outputs are multiplied with."""
    found, factor = linear_weights_of(module(root, path), path), factors.get(path)
    if factor is None:
        return found
    of_outputs = torch.as_tensor(factor.outputs, dtype=torch.float32).expand(found.outputs)
    weight = _numbers(found, path)
    bias = None if found.bias is None else (found.bias * of_outputs).to(found.bias.dtype)
    scaled = (weight * (factor.inputs * of_outputs)[:, None]).to(weight.dtype)
    return replace(found, weight=scaled, bias=bias, module=None)


def _numbers(found: LinearWeights, path: str) -> Tensor:
    """Weights as plain numbers, which can be changed."""
    if found.weight is None or found.added:
        raise UnsupportedModel(
            f"the model's {path} is quantised by a module of its own, or wrapped by an adapter, "
            "and this family's multipliers go into the weights. Load the model without "
            "quantisation, merge adapters (merge_and_unload()), and pass that."
        )
    return found.weight.detach() if isinstance(found.weight, Tensor) else found.weight.float()


def side_by_side(parts: Sequence[LinearWeights]) -> LinearWeights:
    """Linears whose outputs are added, as one of all their inputs."""
    weight = torch.cat([_numbers(each, "projection") for each in parts], 1)
    biases = [each.bias for each in parts if each.bias is not None]
    bias = torch.stack(biases).sum(0) if biases else None
    return plain(weight, bias)


def plain(weight: Tensor, bias: Tensor | None) -> LinearWeights:
    """A linear of plain numbers."""
    return LinearWeights(weight, bias, *weight.shape)


def one_after_the_other(*some: tuple[Sequence[LinearWeights], Tensor | None]) -> Tensor | None:
    """The order of the outputs of several products as one."""
    if all(order is None for _, order in some):
        return None
    first, found = 0, []
    for parts, order in some:
        outputs = sum(each.outputs for each in parts)
        found.append(first + (torch.arange(outputs) if order is None else order))
        first += outputs
    return torch.cat(found)


def linear_weights_of(given: nn.Module, path: str) -> LinearWeights:
    """A linear, which a message calls `path`."""
    found: Any
    found, added = taken_apart(given)
    if is_plain(found):
        weight: Tensor = found.weight.T if _is_conv(found) else found.weight
        return LinearWeights(weight, found.bias, len(weight), weight.shape[1], added=added)
    if isinstance(found, StoredLinear):
        return LinearWeights(found.blocks, found.bias, *found.blocks.shape, found, added)
    outputs, inputs = getattr(found, "out_features", None), getattr(found, "in_features", None)
    if not (isinstance(outputs, int) and isinstance(inputs, int)):
        raise UnsupportedModel(
            f"the model's {path} is a {type(found).__name__}, which is no linear that could be "
            "called as a module. Load the model without quantisation (or call its dequantize()), "
            "merge adapters (merge_and_unload()), and pass that."
        )
    return LinearWeights(None, None, outputs, inputs, found, added)


def table(root: nn.Module, path: str) -> Tensor | Blocks:
    """The weight of the embedding at a dotted path, (entries, width)."""
    found: Any = module(root, path)
    if isinstance(found, StoredEmbedding):
        return found.blocks
    if not is_plain(found):
        raise UnsupportedModel(
            f"the model's {path} is a {type(found).__name__} that does more than look up plain "
            "numbers: quantised, or wrapped by an adapter. Leave the embedding out of the "
            "quantisation, or merge the adapter (merge_and_unload()), and pass that."
        )
    weight: Tensor = found.weight
    return weight


def is_plain(found: Any) -> bool:
    """Whether a linear or embedding has a weight that our products can read."""
    known = isinstance(found, nn.Embedding) or _is_linear(found) or _is_conv(found)
    return known and is_numbers(found.weight)


def _is_linear(found: Any) -> bool:
    """Also of a family's own kind (Falcon's), but not of a quantiser's, which may round what it
    reads (BitNet's)."""
    kind = type(found)
    own = kind.forward is nn.Linear.forward or kind.__module__.startswith("transformers.models.")
    return isinstance(found, nn.Linear) and own


def _is_conv(found: Any) -> bool:
    """Whether a linear is GPT-2's, whose weight is stored transposed."""
    home: Any = sys.modules.get("transformers.pytorch_utils")  # who has one has imported it
    return home is not None and isinstance(found, home.Conv1D)


def calls_modules(model: nn.Module) -> bool:
    """Whether some linear has no plain weight, so that it is called as a module."""
    linears = [
        taken_apart(each)[0]
        for each in model.modules()
        if isinstance(getattr(each, "out_features", None), int)
    ]
    return not all(isinstance(each, StoredLinear) or is_plain(each) for each in linears)


def stored_blocks(model: nn.Module) -> list[Blocks]:
    """The matrices in few bits that a file holds, each once."""
    kinds = StoredLinear | StoredEmbedding
    found = [each.blocks for each in model.modules() if isinstance(each, kinds)]
    return list({id(each): each for each in found}.values())


def parameter_count(model: nn.Module) -> int:
    """How many numbers a model's weights are."""
    stored = sum(each.outputs * each.inputs for each in stored_blocks(model))
    return stored + sum(parameter.numel() for parameter in model.parameters())


def is_numbers(weight: Tensor) -> bool:
    """Whether a weight is plain numbers, not those of a quantisation library."""
    floats = weight.is_floating_point() and weight.element_size() > 1  # others have scales beside
    return floats and type(weight.data) is Tensor


def product(parts: Sequence[LinearWeights], ops: Ops, order: Tensor | None = None) -> Linear:
    """Linears of one input as one product. `order`: which output stands at each place."""
    weights = [each.weight for each in parts if _is_read(each.weight, ops)]
    biases = [each.bias for each in parts]
    if len(weights) < len(parts):
        alone = [_single(each, ops) for each in parts]
        base = alone[0] if len(parts) == 1 and order is None else JoinedLinear(alone, order)
    elif order is None:
        base = ops.linear(weights, biases)
    else:
        bias = joined_bias(weights, biases)
        whole = joined(weights, order)
        base = ops.linear([whole], [None if bias is None else bias[order]])
    return _with_added(base, parts, ops, order)


def _is_read(weight: Matrix | None, ops: Ops) -> TypeGuard[Matrix]:
    """Whether the operations read the weight themselves."""
    return isinstance(weight, Tensor) or (weight is not None and ops.few_bits)


def _single(each: LinearWeights, ops: Ops) -> Linear:
    if not _is_read(each.weight, ops):
        assert each.module is not None
        return ModuleLinear(each.module, each.outputs, each.inputs)
    return ops.linear([each.weight], [each.bias])


def _with_added(
    base: Linear, parts: Sequence[LinearWeights], ops: Ops, order: Tensor | None
) -> Linear:
    """The product with what adapters add to any of the parts, as one product of low rank: each
    part's rows of `up` are zero where other parts' numbers come in."""
    firsts = itertools.accumulate((each.outputs for each in parts), initial=0)
    added = [(first, each) for first, one in zip(firsts, parts, strict=False) for each in one.added]
    if not added:
        return base
    down = torch.cat([each.down for _, each in added])
    up, rank = down.new_zeros(sum(each.outputs for each in parts), len(down)), 0
    for first, each in added:
        outputs, width = each.up.shape
        up[first : first + outputs, rank : rank + width] = each.up
        rank += width
    if order is not None:
        up = up[order]
    return LowRank(base, ops.linear([down], [None]), ops.linear([up], [None]))


def a_parameter(root: nn.Module) -> Tensor:
    """Any parameter whose numbers are here, for its dtype and device."""
    return next((each for each in root.parameters() if each.device.type != "meta"), torch.empty(0))


def norm(root: nn.Module, path: str, kind: NormKind, size: int) -> Norm:
    """The norm at a dotted path, of `size` numbers if it has no weight. A view of its weight would
    keep the whole file mapped."""
    found: Any = module(root, path)
    if hasattr(found, "norms"):  # one for each head
        each = [norm(found.norms, name, kind, size) for name, _ in found.norms.named_children()]
        return replace(each[0], weight=torch.stack([one.weight for one in each]))
    named = ("variance_epsilon", "eps")
    eps: float = next((getattr(found, name) for name in named if hasattr(found, name)), NO_EPS)
    own = getattr(found, "weight", None)
    if own is None or own.dim() == 0:  # in older versions of transformers Gemma 3n has a 1 there
        like = a_parameter(root)
        return Norm(torch.ones(size, dtype=like.dtype, device=like.device), eps, None, kind.centred)
    dtype = torch.float32 if kind.wide else own.dtype
    weight = own.detach().to(dtype, copy=True) + kind.offset
    bias = getattr(found, "bias", None)
    if bias is not None:
        bias = bias.detach().to(dtype, copy=True)
    return Norm(weight, eps, bias, kind.centred)


def xielu(found: Any) -> Tensor:
    """The four numbers of an activation's curve, each computed in its module's dtype."""
    above, below = map(torch.nn.functional.softplus, (found.alpha_p, found.alpha_n))
    curve = (above, found.beta + below, found.beta, found.eps)
    return torch.stack([each.detach().float().reshape(()) for each in curve])


def parameter(root: nn.Module, path: str) -> Tensor:
    """The parameter at a dotted path, as a copy in float32."""
    found: Tensor = attrgetter(path)(root)
    return found.detach().to(torch.float32, copy=True)


def number(layer: nn.Module, name: str) -> float:
    """A layer's buffer of one number."""
    found: Tensor = attrgetter(name)(layer)
    return found.item()


def release(weight: Tensor) -> None:
    """Let go of a parameter's memory; tensors that still share it keep it alive."""
    weight.data = torch.empty(0, dtype=weight.dtype, device=weight.device)


def release_matrices(layer: nn.Module, used: Collection[nn.Module]) -> None:
    """Release the parameters that were packed. Norms were copied, modules in use keep theirs."""
    kept = {id(parameter) for each in used for parameter in each.parameters()}
    for parameter in layer.parameters():
        if parameter.dim() > 1 and id(parameter) not in kept:
            release(parameter)
