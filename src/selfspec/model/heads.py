"""The weights of a layer's heads in the one order that our block knows: which output of a
projection stands where, the norms of queries and keys, and what scores are multiplied with. Does
not know how attention is run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from .compute.norms import Norm
from .family import Family, Shape
from .weights import LinearWeights, linear_weights, module, norm


def head_norm(
    layer: nn.Module, path: str | None, family: Family, shape: Shape, rotary: int | None
) -> Norm | None:
    """The norm of a layer's queries or keys, if it has one."""
    if path is None or not hasattr(module(layer, family.attention), path.rpartition(".")[2]):
        return None
    found = norm(layer, path, family.norms, shape.head_size)
    order = _head_order(family, shape, rotary)
    if order is None:
        return found
    bias = None if found.bias is None else found.bias[..., order].contiguous()
    return replace(found, weight=found.weight[..., order].contiguous(), bias=bias)


def qkv(
    layer: nn.Module, family: Family, shape: Shape, rotary: int | None, borrowed: bool = False
) -> tuple[list[LinearWeights], Tensor | None]:
    """The projections, and which of their outputs stands at each place: all queries, all keys, all
    values; in each head of the first two, rotary pairs half a head apart, or half of the `rotary`
    numbers that turn."""
    names = list(family.qkv)
    if borrowed:  # keys and values are another layer's
        order = _qkv_order(family, shape, rotary)
        own = None if order is None else order[: shape.heads * shape.head_size]
        return [linear_weights(layer, names[0], shape.factors)], own
    if len(names) >= 3 and module(layer, names[2]) is None:
        names[2] = names[1]  # what keys are made of serves as values
    parts = [linear_weights(layer, name, shape.factors) for name in names]
    return parts, _qkv_order(family, shape, rotary)


def _qkv_order(family: Family, shape: Shape, rotary: int | None) -> Tensor | None:
    """Which output of the family's projection stands at each place of ours. None: the same."""
    size, heads = shape.head_size, shape.heads
    if len(family.qkv) > 3:  # gates have a projection of their own
        return None
    if family.gated_attention:  # each head's query, then its gate; ours come behind the values
        order = torch.arange((2 * heads + 2 * shape.kv_heads) * size).view(-1, size)
        both, rest = order[: 2 * heads], order[2 * heads :]
        return torch.cat([both[0::2], rest, both[1::2]]).flatten()
    order = torch.arange((heads + 2 * shape.kv_heads) * size).view(-1, size)
    if family.blocks > 1:
        blocks = order.view(family.blocks, 3, -1, size)[:, [0, 2, 1]]
        order = blocks.transpose(0, 1).reshape(-1, size)
    if family.by_head:
        groups = order.view(shape.kv_heads, -1, size)
        return torch.cat([part.flatten() for part in groups.tensor_split((-2, -1), dim=1)])
    inside = _head_order(family, shape, rotary)
    if inside is None:
        return None if family.blocks == 1 else order.flatten()
    turned, values = order.split([heads + shape.kv_heads, shape.kv_heads])
    return torch.cat([turned[:, inside].flatten(), values.flatten()])


def _head_order(family: Family, shape: Shape, rotary: int | None) -> Tensor | None:
    """Which number of a head stands at each place of ours. None: the same."""
    turned, order = rotary or shape.head_size, torch.arange(shape.head_size)
    if family.interleaved:
        return torch.cat([order[0:turned:2], order[1:turned:2], order[turned:]])
    if family.backwards:  # the other half of each pair first turns it the other way
        half = turned // 2
        return torch.cat([order[half:turned], order[:half], order[turned:]])
    return None


def attention_scale(layer: nn.Module, family: Family) -> float:
    """What scores are multiplied with."""
    if family.unscaled:
        return 1.0
    found: Any = module(layer, family.attention)
    for name in ("scaling", "inv_norm_factor", "softmax_scale"):
        if hasattr(found, name):
            return float(getattr(found, name))
    if not hasattr(found, "scale_attn_weights"):
        return float(found.head_dim**-0.5)
    # GPT-2 before transformers 5.4
    scale = found.head_dim**-0.5 if found.scale_attn_weights else 1.0
    return scale / (found.layer_idx + 1) if found.scale_attn_by_inverse_layer_idx else scale
