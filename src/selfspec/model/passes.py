"""A pass: halves of blocks, one after the other, on one cache.

Where every half of the blocks is made of our kernels, a pass is one call to them, and takes little
more than its products; elsewhere each half runs its own operations. Does not know which halves are
asked for, or why.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from torch import Tensor

from .block import Block
from .compute.cache import KVCache, TokenLayout
from .compute.cpu.fused import NativeHalves, is_native
from .compute.plan import LayerPlan

HalfObserver = Callable[[int, bool, Tensor, Tensor], None]


class Passes:
    """Runs any plan over some blocks. `in_one_call`: whether our kernels do all of it at once."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._blocks = blocks
        halves = [half for block in blocks for half in block.taken_apart()]
        native = [half for half in halves if half is not None and is_native(half)]
        self._native = NativeHalves(native) if native and len(native) == len(halves) else None

    @property
    def in_one_call(self) -> bool:
        return self._native is not None

    def run(
        self,
        x: Tensor,
        plan: LayerPlan,
        cache: KVCache,
        layout: TokenLayout,
        collected: Collection[int] = (),
        observer: HalfObserver | None = None,
    ) -> tuple[Tensor, ...]:
        """The plan's halves: what comes out, then what left each tapped layer. `x` itself is not
        changed."""
        states, begin, current, entered = [], 0, plan.start, x
        at_once = self._native is not None and observer is None
        for end, (layer, attention) in enumerate(plan.halves, start=1):
            if begin == end - 1 and layer != current:
                current, entered = layer, x
            shown = not attention and layer in collected
            if at_once and not shown and end < len(plan.halves):
                continue
            before, x = x, self._some(x, plan, begin, end, cache, layout, entered)
            begin = end
            if observer:
                observer(layer, attention, before, x)
            if shown:
                states.append(x)
        return x, *states

    def _some(
        self,
        x: Tensor,
        plan: LayerPlan,
        begin: int,
        end: int,
        cache: KVCache,
        layout: TokenLayout,
        entered: Tensor,
    ) -> Tensor:
        """The stream after the plan's halves [begin, end); a single one where our kernels do not do
        all at once."""
        if self._native is not None:
            return self._native.run(x, plan, begin, end, cache, layout, entered)
        layer, attention = plan.halves[begin]
        block = self._blocks[layer]
        return block.attention(x, cache, layout) if attention else block.mlp(x, entered)
