"""A layer's mixture of experts, read from its modules: which router, which experts, and how a
family scores and weighs them. Does not know how a mixture is run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UnsupportedModel
from .compute.linear import Linear
from .compute.mixture import Mixture
from .compute.norms import Norm
from .compute.ops import Ops
from .family import Factor, Family, Shape
from .weights import (
    LinearWeights,
    is_numbers,
    linear_weights,
    module,
    norm,
    plain,
    product,
    side_by_side,
)

_PARTS = ("gate_proj", "up_proj", "down_proj")
_SCALES = ("routed_scaling_factor", "router_scaling_factor", "route_scale")
_NARROW = ("fc1_latent_proj", "fc2_latent_proj")


def router(layer: nn.Module, family: Family) -> nn.Module | None:
    """What chooses among the layer's experts, if it has some."""
    if family.router is not None:
        return module(layer, family.router)
    found: Any = module(layer, family.experts) if family.experts else None
    if found is None or not hasattr(found, "experts"):
        return None
    gate: nn.Module = getattr(found, "gate", None) or found.router
    return gate


def mixture(layer: nn.Module, family: Family, activation: str, ops: Ops) -> Mixture | None:
    """The layer's mixture of experts, if it has one."""
    gate: Any = router(layer, family)
    if gate is None:
        return None
    found: Any = module(layer, str(family.experts))
    experts = getattr(found, "experts", found)
    inside = ("wg", "gate", "proj")
    scorer = next((getattr(gate, name) for name in inside if hasattr(gate, name)), gate)
    first = _first(family)
    if not all(hasattr(root, name) and is_numbers(getattr(root, name)) for root, name in (
        (scorer, "weight"), (experts, first), (experts, "down_proj"),
    )):  # fmt: skip
        raise UnsupportedModel(
            f"the model's experts ({type(experts).__name__}, router {type(gate).__name__}) are "
            "quantised, or wrapped by an adapter. selfspec reads plain weights of experts only. "
            "Leave them out, or merge the adapter (merge_and_unload())."
        )
    routing = gate if hasattr(gate, "top_k") else found  # some, in older versions of transformers
    scores = [plain(scorer.weight, getattr(scorer, "bias", None))]
    into, out = _products(experts, family, ops)
    shared, narrow, widen = _shared(layer, found, family), None, None
    if isinstance(getattr(found, _NARROW[0], None), nn.Linear):
        narrow, widen = _narrowed(found, shared, ops)
        shared = None
    if shared is not None:
        up, last, weigher = shared
        into.append(product(up, ops))
        out.append(product([last], ops))
        scores += [] if weigher is None else [weigher]
    sigmoid, of_inputs = "sigmoid" in family.expert_scores, "inputs" in family.expert_scores
    groups, kept = _groups(gate)
    near = family.expert_scores == "near the best"
    normalised = family.expert_scores == "softmax of the chosen" or getattr(
        routing, "norm_topk_prob", family.experts_normalised
    )
    scale = next((getattr(routing, name) for name in _SCALES if hasattr(routing, name)), 1)
    return Mixture(
        router=product(scores, ops.of_router),
        into=into,
        out=out,
        # of the first kind transformers takes two, always
        chosen=2 if near else getattr(routing, "top_k", None) or gate.config.top_k_experts,
        shared=shared is not None,
        narrow=narrow,
        widen=widen,
        activation=activation,
        gated=family.gated,
        sigmoid=sigmoid,
        favour=_favour(found, gate),
        groups=groups,
        kept=kept,
        best=2 if sigmoid else 1,
        margin=2 * gate.router_jitter_noise if near else 0.0,
        of_inputs=of_inputs,
        normalised=normalised and not of_inputs,
        least=family.least_weight,
        shares=_shares(gate),
        scale=float(scale) * (_averaged(found) if shared is not None else 1),
    )


def _first(family: Family) -> str:
    """What an expert's first product is called."""
    return "gate_up_proj" if family.gated else "up_proj"


def _products(experts: Any, family: Family, ops: Ops) -> tuple[list[Linear], list[Linear]]:
    """Both products of each expert."""
    gate_up, down = getattr(experts, _first(family)), experts.down_proj
    if family.experts_transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    order = torch.arange(gate_up.shape[1]).view(-1, 2).T.flatten()
    nothing = (None,) * len(down)

    def each(weights: Tensor, biases: Any, order: Tensor | None) -> list[Linear]:
        pairs = zip(weights, biases, strict=True)
        return [product([plain(weight, bias)], ops, order) for weight, bias in pairs]

    return (
        each(
            gate_up,
            getattr(experts, "gate_up_proj_bias", nothing),
            order if family.experts_interleaved else None,
        ),
        each(down, getattr(experts, "down_proj_bias", nothing), None),
    )


_Shared = tuple[list[LinearWeights], LinearWeights, LinearWeights | None]


def _narrowed(found: Any, shared: _Shared | None, ops: Ops) -> tuple[Linear, Linear]:
    """What narrows the stream for experts and widens their sum, and beside both the expert that
    every token has."""
    before, behind = (linear_weights(found, name) for name in _NARROW)
    into, out, _ = shared or ([], None, None)
    last = behind if out is None else side_by_side([behind, out])
    return product([before, *into], ops), product([last], ops)


def _shared(layer: nn.Module, found: Any, family: Family) -> _Shared | None:
    """An expert that every token has: gate and up, down, and what weighs it by a sigmoid."""
    parts = _PARTS if family.gated else _PARTS[1:]
    if getattr(found, "shared_experts", None) is not None:
        share = _averaged(found)
        half = {parts[-1]: Factor(outputs=share)} if share != 1 else {}
        *into, down = (linear_weights(found.shared_experts, name, half) for name in parts)
        return into, down, None
    if hasattr(found, "shared_expert"):
        *into, down = (linear_weights(found.shared_expert, name) for name in parts)
        weighed = hasattr(found, "shared_expert_gate")
        return into, down, linear_weights(found, "shared_expert_gate") if weighed else None
    if family.experts_beside:
        into = [linear_weights(layer, name) for name in family.gate_up]
        return into, linear_weights(layer, family.down), None
    return None


def _averaged(found: Any) -> float:
    """The share of either side, where what experts give is averaged with what all tokens share."""
    return 0.5 if getattr(found, "shared_expert_combination_strategy", "") == "average" else 1.0


def _groups(gate: Any) -> tuple[int, int]:
    """How many groups of experts there are, and how many of them a token may choose from."""
    if getattr(gate, "topk_method", "") == "greedy":
        return 1, 1
    return getattr(gate, "num_group", None) or 1, getattr(gate, "topk_group", None) or 1


def _favour(found: Any, gate: Any) -> Tensor | None:
    """What favours experts, wherever the family keeps it."""
    homes = (found, gate, getattr(gate, "moe_statics", None))
    names = ("expert_bias", "e_score_correction_bias")
    kept = [getattr(home, name, None) for home in homes for name in names]
    favour: Tensor | None = next((each for each in kept if each is not None), None)
    return None if favour is None else favour.detach().flatten().to(torch.float32, copy=True)


def _shares(gate: Any) -> Tensor | None:
    """What a router multiplies each expert's weight with at last, if it does."""
    found: Tensor | None = getattr(gate, "per_expert_scale", None)
    return None if found is None else found.detach().to(torch.float32, copy=True)


def router_norm(layer: nn.Module, family: Family, shape: Shape) -> Norm:
    """The norm of what a router reads, with its scales."""
    assert family.experts_normed is not None
    gate: Any = router(layer, family)
    found = norm(layer, family.experts_normed.router, family.norms, shape.width)
    scale = gate.scale.detach().float() * gate.scalar_root_size
    return replace(found, weight=found.weight * scale.to(found.weight.dtype))
