"""What PEFT has put around a linear, taken apart: the linear itself, and what the active LoRA
adapters add to it.

LoRA (https://arxiv.org/abs/2106.09685): y = W x + scaling * B (A x). Read at load: adapters that
are switched later are not noticed, like any other change of a live model's weights. Layers that do
more (DoRA, biases, dropout in use, other methods than LoRA) are left whole, to be called as
modules. peft is never imported here: who has one of its layers has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class Added:
    """One adapter's matrices for one linear, in float32, the scaling in `up`."""

    down: Tensor  # (rank, inputs)
    up: Tensor  # (outputs, rank)


def taken_apart(found: nn.Module) -> tuple[nn.Module, Sequence[Added]]:
    """The linear under a layer of PEFT and what its adapters add; anything else as it is."""
    peft: Any = sys.modules.get("peft")
    if peft is None or not isinstance(found, peft.tuners.lora.LoraLayer):
        return found, ()
    layer: Any = found
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    # its forward has to be that of the paper, and not about to change its own weights
    special = any(name in layer.lora_variant or layer.lora_bias[name] for name in names)
    rates = [getattr(layer.lora_dropout[name], "p", 0.0) for name in names]
    if special or (layer.training and any(rates)) or (layer.disable_adapters and layer.merged):
        return found, ()
    base: nn.Module = layer.get_base_layer()
    if layer.disable_adapters or layer.merged:
        return base, ()
    return base, [_added(layer, name) for name in names]


def _added(layer: Any, name: str) -> Added:
    down = layer.lora_A[name].weight.detach().float()
    up = layer.lora_B[name].weight.detach().float()
    return Added(down, up * layer.scaling[name])
