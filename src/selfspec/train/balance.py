"""What keeps experts busy: the loss that a mixture's own training adds (Switch Transformer,
equations 4 to 6).

    B = E sum_e f_e P_e

Over all tokens of all layers, f_e is how often a token chooses expert e, and P_e its mean share of
the router's softmax. A layer that drops a sample has not seen its tokens, and tokens that fill a
text up do not count. Knows no recipe and no trainer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..model.experts import router
from ..model.family import Family


class Balance:
    """Looks at what the routers of some layers say."""

    def __init__(self, layers: Sequence[nn.Module], family: Family, config: Any) -> None:
        found = {index: router(layer, family) for index, layer in enumerate(layers)}
        self._routers = {index: gate for index, gate in found.items() if gate is not None}
        self.weight = float(getattr(config, "router_aux_loss_coef", 0.0)) if self._routers else 0.0
        """Beside the other losses, as the config has it; 0 where there is nothing to balance."""
        self._chosen: int = config.num_experts_per_tok if self._routers else 0
        self._logits: dict[int, Tensor] = {}
        self._looks = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """The routers are listened to within this block."""

        def hear(index: int, gate: nn.Module, given: Any, output: Any) -> None:
            if self._looks:
                self._logits[index] = output[0] if isinstance(output, tuple) else output

        hooks = [
            gate.register_forward_hook(partial(hear, index))
            for index, gate in self._routers.items()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Within a forward: recomputed layers are not looked at."""
        self._logits, self._looks = {}, True
        try:
            yield
        finally:
            self._looks = False

    def loss(self, mask: Tensor, kept: Sequence[Tensor | None]) -> Tensor:
        """B of the last forward. `mask`: (rows, length), which tokens count. `kept`: the rows that
        ran each layer, None for all."""
        logits, self._logits = self._logits, {}
        seen = {at: mask if kept[at] is None else mask[kept[at]] for at in logits}
        return balance(logits, seen, self._chosen)


def balance(logits: Mapping[int, Tensor], seen: Mapping[int, Tensor], chosen: int) -> Tensor:
    """B of routers' logits, (tokens, experts) of each layer, and of which tokens count."""
    if not logits:  # every sample skips every layer that has experts
        return torch.zeros(())
    given = torch.cat(list(logits.values()))
    counts = torch.cat([seen[layer].reshape(-1) for layer in logits])
    shares = given.softmax(-1, dtype=torch.promote_types(given.dtype, torch.float32))
    shares = shares[counts.bool()]
    picked = torch.zeros_like(shares).scatter_(1, shares.topk(chosen).indices, 1.0)
    return shares.shape[1] * (picked.mean(0) * shares.mean(0)).sum()
