"""A layer's weights by the names that `families.py` gives, brought into the one order that our block knows.

Conv1D's weights lie on their side, some projections are fused head by head, some rotary pairs are neighbours: all of that is
undone here, once, so that block and kernels need not know. Does not know how a half is run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..errors import UnsupportedModel
from .families import Family, Shape
from .norms import Norm, NormKind

_PLAIN = (nn.Linear, nn.Embedding, Conv1D)


@dataclass(frozen=True)
class Part:
    """A linear's weight, (outputs, inputs), and bias."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class ExpertParts:
    """A mixture of experts: a router's weight, and of each expert the two products."""

    router: Tensor  # (experts, width)
    gate_up: Sequence[Tensor]
    down: Sequence[Tensor]
    chosen: int  # experts a token
    normalised: bool  # whether the chosen experts' weights sum to 1


def module(root: nn.Module, path: str) -> nn.Module:
    """The sub-module at a dotted path."""
    found: nn.Module = attrgetter(path)(root)
    return found


def part(root: nn.Module, path: str) -> Part:
    """Weight and bias of the linear or embedding at a dotted path."""
    found: Any = module(root, path)
    if not (isinstance(found, _PLAIN) and found.weight.is_floating_point() and type(found.weight.data) is Tensor):
        raise UnsupportedModel(
            f"the model's {path} is a {type(found).__name__} with a weight of type {type(found.weight.data).__name__}, "
            f"{found.weight.dtype}: quantised, or wrapped by an adapter. selfspec reads plain weights only: load the model "
            "without quantisation (or call its dequantize()), merge adapters (merge_and_unload()), and pass that."
        )
    weight = found.weight.T if isinstance(found, Conv1D) else found.weight
    return Part(weight, getattr(found, "bias", None))


def norm(root: nn.Module, path: str, kind: NormKind) -> Norm:
    """The norm at a dotted path, its weight copied: a small view would keep a whole mapped checkpoint in memory."""
    found: Any = module(root, path)
    eps = found.variance_epsilon if hasattr(found, "variance_epsilon") else found.eps
    dtype = torch.float32 if kind.wide else found.weight.dtype
    bias = getattr(found, "bias", None)
    weight = found.weight.detach().to(dtype, copy=True) + kind.offset
    return Norm(weight, eps, None if bias is None else bias.detach().to(dtype, copy=True), kind.centred)


def head_norm(layer: nn.Module, path: str | None, family: Family, shape: Shape) -> Norm | None:
    """The norm of a layer's queries or keys, if it has one."""
    if path is None or not hasattr(module(layer, family.attention), path.rpartition(".")[2]):
        return None
    found = norm(layer, path, family.norms)
    if family.interleaved:
        order = torch.cat([torch.arange(first, shape.head_size, 2) for first in (0, 1)])
        return Norm(found.weight[..., order].contiguous(), found.eps, found.bias, found.centred)
    return found


def qkv_parts(layer: nn.Module, family: Family, shape: Shape) -> list[Part]:
    """The projections: all queries, all keys, all values; in each head of the first two, rotary pairs half a head apart."""
    parts = [part(layer, name) for name in family.qkv]
    order = _qkv_order(family, shape)
    if order is None:
        return parts
    weight, bias = torch.cat([each.weight for each in parts]), parts[0].bias
    if bias is not None:
        bias = torch.cat([each.bias for each in parts if each.bias is not None])[order]
    return [Part(weight[order], bias)]


def _qkv_order(family: Family, shape: Shape) -> Tensor | None:
    """Which output of the family's fused projection stands at each place of ours; None: it is the same already."""
    size, heads = shape.head_size, shape.heads
    order = torch.arange((heads + 2 * shape.kv_heads) * size).view(-1, size)
    if family.by_head:
        return order.view(heads, 3, size).transpose(0, 1).flatten()
    if family.interleaved:
        turned = order[: heads + shape.kv_heads]
        return torch.cat([turned.view(-1, size // 2, 2).transpose(1, 2).flatten(), order[len(turned) :].flatten()])
    return None


def expert_parts(layer: nn.Module, family: Family) -> ExpertParts | None:
    """The layer's mixture of experts, if it has one."""
    found: Any = module(layer, family.experts) if family.experts else None
    if found is None or not hasattr(found, "experts"):
        return None
    gate, experts = found.gate, found.experts
    normalised = getattr(gate, "norm_topk_prob", True)
    return ExpertParts(gate.weight, tuple(experts.gate_up_proj), tuple(experts.down_proj), gate.top_k, normalised)


def attention_scale(layer: nn.Module, family: Family) -> float:
    """What scores are multiplied with."""
    return float(attrgetter(f"{family.attention}.scaling")(layer))


def release(weight: Tensor) -> None:
    """Let go of a parameter's memory; tensors that still share it keep it alive."""
    weight.data = torch.empty(0, dtype=weight.dtype)


def release_matrices(layer: nn.Module) -> None:
    """Of a layer's parameters, all that were packed; norms and biases were copied."""
    for parameter in layer.parameters():
        if parameter.dim() > 1:
            release(parameter)
