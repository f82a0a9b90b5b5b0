"""A stretch of layers, and what left some of them.

For those who run a model piece by piece and hand states on. Does not know what the states are for.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor

from .compute.cache import KVCache, TokenLayout
from .compute.hidden_states import StateCollector
from .compute.plan import LayerPlan
from .layered import LayeredModel


def run_stretch(
    model: LayeredModel,
    x: Tensor,
    plan: LayerPlan,
    cache: KVCache,
    layout: TokenLayout,
    taps: Collection[int],
) -> tuple[Tensor, dict[int, Tensor]]:
    """Carry x through the plan. With it comes what left those of its layers that are tapped."""
    taken = StateCollector(plan.left(taps))
    asked = [taken] if taken.layers else []
    x = model.run(x, plan, cache, layout, collectors=asked)
    left = dict[int, Tensor]()
    for _, states in taken.take():  # (tokens, taps, width)
        left.update(zip(taken.layers, states.unbind(1), strict=True))
    return x, left
