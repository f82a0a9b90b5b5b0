"""A mixture of experts as the MLP of a block: a router chooses a few experts for each token.

p = softmax(router x); y = sum over the chosen experts of p_e * expert_e(x). Each expert runs once
on all tokens that chose it, with our products, and a token's sum goes through its experts in their
order: its bits do not depend on what others choose. Training's load-balancing loss has no place
here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .compute.linear import Linear
from .compute.ops import Ops
from .weights import ExpertWeights


class Experts:
    """Called like a dense MLP."""

    def __init__(self, parts: ExpertWeights, activation: str, ops: Ops) -> None:
        self._ops, self._activation = ops, activation
        self._chosen, self._normalised = parts.chosen, parts.normalised
        self._router = ops.linear([parts.router], [None])
        self._experts = [
            (ops.linear([gate_up], [None]), ops.linear([down], [None]))
            for gate_up, down in zip(parts.gate_up, parts.down, strict=True)
        ]
        one = [linear for pair in self._experts[: self._chosen] for linear in pair]
        self.linears: Sequence[Linear] = (self._router, *one)  # what one token runs through

    def parts(self) -> str:
        return "a mixture of experts, chosen token by token"

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        weights, chosen = self._router(x).float().softmax(-1).topk(self._chosen, dim=-1)
        if self._normalised:  # both are (tokens, chosen)
            weights = weights / weights.sum(-1, keepdim=True)
        weights = weights.to(x.dtype)
        out = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            tokens, rank = (chosen == expert).nonzero(as_tuple=True)
            gate_up, down = self._experts[expert]
            y = down(self._ops.gated(gate_up(x[tokens]), self._activation))
            out[tokens] += y * weights[tokens, rank, None]
        return out if residual is None else residual + out
