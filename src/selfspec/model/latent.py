"""A layer's latent attention, read from its modules, whose names all families share. Does not know
how it is run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .compute.latent import Latent
from .compute.linear import Linear
from .compute.ops import Ops
from .family import Family, Shape
from .weights import linear_weights, module, norm, product


def latent_size(config: Any) -> int:
    """Of a head of queries, keys and values, as the cache keeps it."""
    return int(max(config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim))


def latent(layer: nn.Module, family: Family, shape: Shape, ops: Ops) -> tuple[Linear, Latent]:
    """The first product, and what unfolds what it gives."""
    found: Any = module(layer, family.attention)
    rotary, plain, value = found.qk_rope_head_dim, found.qk_nope_head_dim, found.v_head_dim
    turned = _turned(rotary, getattr(found.config, "rope_interleave", family.interleaved))
    head = torch.cat([plain + turned, torch.arange(plain)])
    heads = (torch.arange(shape.heads)[:, None] * len(head) + head).flatten()
    few = found.kv_a_layernorm.weight.shape[0]
    folded = found.q_a_proj is not None if hasattr(found, "q_a_proj") else False
    first = linear_weights(layer, f"{family.attention}.{'q_a_proj' if folded else 'q_proj'}")
    rest = linear_weights(layer, f"{family.attention}.kv_a_proj_with_mqa")
    asked = torch.arange(first.outputs) if folded else heads
    order = torch.cat([asked, first.outputs + torch.cat([torch.arange(few), few + turned])])
    queries, query_norm = None, None
    if folded:
        second = linear_weights(layer, f"{family.attention}.q_b_proj")
        queries = product([second], ops, heads)
        query_norm = norm(layer, f"{family.attention}.q_a_layernorm", family.norms, first.outputs)
    made = Latent(
        queries=queries,
        query_norm=query_norm,
        rest=product([linear_weights(layer, f"{family.attention}.kv_b_proj")], ops),
        norm=norm(layer, f"{family.attention}.kv_a_layernorm", family.norms, few),
        rotary=rotary,
        plain=plain,
        value=value,
        heads=shape.heads,
    )
    return product([first, rest], ops, order), made


def _turned(rotary: int, interleaved: bool) -> Tensor:
    """Which of the rotated numbers stands at each place, so that pairs are half of them apart."""
    order = torch.arange(rotary)
    return torch.cat([order[0::2], order[1::2]]) if interleaved else order
