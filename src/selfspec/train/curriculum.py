"""The recipe's numbers as pure functions: dropout rates, loss weights, which exits are on when.

Source: LayerSkip, section 4.1. Step t of T, layer l of L, both counted from 0:

    p(l, t) = S(t) D(l) p_max
    D(l) = exp(l ln2 / (L - 1)) - 1
    S(t) = 1, or exp(t ln2 / (T - 1)) - 1
    w(t, l) = C(t, l) e(l) / sum_i C(t, i) e(i)
    e(l) = e_scale (0 + 1 + ... + l) for l < L - 1
    e(L - 1) = (L - 1) + e_scale (0 + 1 + ... + (L - 2))

The paper leaves open whether the last layer's own loss takes part in the rotation. Here, as in its
released recipe, it is always on. Knows no model and no tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def depth_rates(layers: int, shape: str = "exponential") -> list[float]:
    """D(l): 0 at the first layer, 1 at the last. "constant" is their mean everywhere (Fig. 12)."""
    if layers == 1:
        return [0.0]
    rising = [_rise(layer, layers) for layer in range(layers)]
    return rising if shape == "exponential" else [sum(rising) / layers] * layers


def time_scale(step: int, steps: int, shape: str = "constant") -> float:
    """S(t): 1 for a model that is trained already, rising from 0 to 1 for one from scratch."""
    return 1.0 if shape == "constant" else _rise(min(step, steps - 1), steps)


def exit_scales(layers: int, scale: float) -> list[float]:
    """e(l): later exits weigh quadratically more. If e_scale is 0, only the last layer counts."""
    early = [scale * layer * (layer + 1) / 2 for layer in range(layers - 1)]
    return [*early, max(1, layers - 1) + scale * (layers - 2) * (layers - 1) / 2]


def rotational(layers: int, step: int, dilation: int) -> list[bool]:
    """C_rot: each early exit once every `dilation` (R) steps, so at most ceil(L / R) at a time."""
    return [layer == layers - 1 or layer % dilation == step % dilation for layer in range(layers)]


def gradual(layers: int, step: int, steps: int) -> list[bool]:
    """C_grad: from the last layer down, one more every T / 2L steps. From T / 2 on all are on."""
    return [2 * layers * step >= (layers - 1 - layer) * steps for layer in range(layers)]


def exit_weights(scales: Sequence[float], on: Sequence[bool]) -> list[float]:
    """w(t, l): the scales of the exits that are on, adding up to 1."""
    chosen = [scale if enabled else 0.0 for scale, enabled in zip(scales, on, strict=True)]
    total = sum(chosen)
    return [scale / total for scale in chosen]


def _rise(index: int, count: int) -> float:
    """exp(i ln2 / (n - 1)) - 1, from 0 to 1."""
    return math.expm1(index * math.log(2) / (count - 1)) if count > 1 else 0.0
