"""A mixture of experts as the MLP of a block: a router chooses a few experts for each token.

p = softmax(router x), or its sigmoid; y = sum over the chosen experts of p_e * expert_e(x), plus an
expert that all tokens share, perhaps weighed by the sigmoid of a product, where a family has one.
Llama 4 weighs what an expert reads, expert_e(p_e * x). Each expert runs once on all tokens that
chose it, with our products, and a token's sum goes through its experts in their order: its bits do
not depend on what others choose. Training's load-balancing loss has no place here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .compute.linear import Linear
from .compute.ops import Ops
from .weights import ExpertWeights, plain, product


class Experts:
    """Called like a dense MLP."""

    def __init__(self, parts: ExpertWeights, activation: str, ops: Ops) -> None:
        self._ops, self._activation = ops, activation
        self._parts = replace(parts, gate_up=(), down=(), shared=None, biases=None)
        self._chosen, nothing = parts.chosen, (None,) * len(parts.down)
        of_router, of_gate_up, of_down = parts.biases or (None, nothing, nothing)
        self._router = ops.linear([parts.router], [of_router])
        self._experts = [
            (product([plain(*gate_up)], ops, parts.order), product([plain(*down)], ops))
            for gate_up, down in zip(
                zip(parts.gate_up, of_gate_up, strict=True),
                zip(parts.down, of_down, strict=True),
                strict=True,
            )
        ]
        self._shared = None
        if parts.shared is not None:
            into, down, gate = parts.shared
            weighed = None if gate is None else product([gate], ops)
            self._shared = product(into, ops), product([down], ops), weighed
        one = [linear for pair in self._experts[: self._chosen] for linear in pair]
        # what one token runs through
        shared = [linear for linear in self._shared or () if linear is not None]
        self.linears: Sequence[Linear] = (self._router, *one, *shared)

    def parts(self) -> str:
        return "a mixture of experts, chosen token by token"

    def _choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights of the chosen experts, and which they are, (tokens, chosen)."""
        parts, logits = self._parts, self._router(x).float()
        if parts.sigmoid:  # torch's own depends on where among all rows a number lies
            scores = self._ops.times_sigmoid(torch.ones_like(logits), logits)
        else:
            scores = logits.softmax(-1)
        chosen = (logits if parts.of_inputs else scores).topk(self._chosen, dim=-1).indices
        weights = scores.gather(1, chosen)
        if parts.favour is not None:
            chosen = (scores + parts.favour).topk(self._chosen, dim=-1).indices
            weights = scores.gather(1, chosen)
        if parts.normalised:
            total = weights.sum(-1, keepdim=True)
            weights = weights / (total + 1e-6 if parts.sigmoid else total)
        if parts.scale != 1:
            weights = weights * parts.scale
        return weights.to(x.dtype), chosen

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        weights, chosen = self._choose(x)
        out = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            tokens, rank = (chosen == expert).nonzero(as_tuple=True)
            gate_up, down = self._experts[expert]
            read, share = x[tokens], weights[tokens, rank, None]
            if self._parts.of_inputs:
                read, share = read * share, torch.ones_like(share)
            y = down(self._ops.gated(gate_up(read), self._activation))
            out[tokens] += y * share
        if self._shared is not None:
            into, last, gate = self._shared
            y = last(self._ops.gated(into(x), self._activation))
            out += y if gate is None else self._ops.times_sigmoid(y, gate(x))
        return out if residual is None else residual + out
