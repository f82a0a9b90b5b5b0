"""A pass: halves of blocks, one after the other, on one cache.

Where every half of the blocks is made of our kernels, a pass is one call to them, and takes little
more than its products; elsewhere each half runs its own operations. Does not know which halves are
asked for, or why.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from .block import Block, TakenApart
from .compute.cache import KVCache, TokenLayout
from .compute.cpu.native import (
    CallStruct,
    HalfStruct,
    HeadsStruct,
    RopeStruct,
    SightStruct,
    library,
)
from .compute.linear import NativeLinear
from .compute.norms import Norm
from .compute.ops import ACTIVATIONS, rope_struct, where_struct
from .compute.plan import LayerPlan

HalfObserver = Callable[[int, bool, Tensor, Tensor], None]


class Passes:
    """Runs any plan over some blocks. `in_one_call`: whether our kernels do all of it at once."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._blocks = blocks
        halves = [half for block in blocks for half in block.taken_apart()]
        native = [half for half in halves if half is not None and _native(half)]
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
            return self._native.run(x, plan.numbers[begin:end], cache, layout, entered)
        layer, attention = plan.halves[begin]
        block = self._blocks[layer]
        return block.attention(x, cache, layout) if attention else block.mlp(x, entered)


class NativeHalves:
    """The halves of some blocks, two a block, as our kernels read them."""

    def __init__(self, halves: Sequence[TakenApart]) -> None:
        self._kept = halves  # their tensors are known by address
        attentions = [half.heads for half in halves if half.heads is not None]
        self._ropes = list({id(heads.rope): heads.rope for heads in attentions}.values())
        self._windows = list(dict.fromkeys(heads.window for heads in attentions))
        self._halves = (HalfStruct * len(halves))(*map(self._struct, range(len(halves)), halves))

    def run(
        self,
        x: Tensor,
        numbers: np.ndarray[tuple[int], np.dtype[np.int64]],
        cache: KVCache,
        layout: TokenLayout,
        entered: Tensor,
    ) -> Tensor:
        """The stream (tokens, width) after the halves of these numbers. `entered`: what entered the
        layer of the first."""
        entered = entered.contiguous()
        x = x.clone(memory_format=torch.contiguous_format)
        tables = [None if rope is None else rope.tables() for rope in self._ropes]
        ropes = (RopeStruct * len(tables))(*map(rope_struct, tables))
        sights = (SightStruct * len(self._windows))(
            *(layout.visible(window).native for window in self._windows)
        )
        keys, values = cache.keys, cache.values
        call = CallStruct(
            *x.shape,
            where_struct(layout),
            ctypes.addressof(ropes),
            ctypes.addressof(sights),
            keys.data_ptr(),
            values.data_ptr(),
            *keys.stride()[:3],
            entered.data_ptr(),
        )
        library().run_halves(
            x.data_ptr(),
            self._halves,
            numbers.ctypes.data,
            len(numbers),
            call,
            torch.get_num_threads(),
        )
        return x

    def _struct(self, number: int, half: TakenApart) -> HalfStruct:
        into, out, heads = half.into, half.out, half.heads
        assert isinstance(into, NativeLinear) and isinstance(out, NativeLinear)
        return HalfStruct(
            layer=number // 2,
            attention=heads is not None,
            parallel=half.parallel,
            before=_address(half.before),
            after=_address(half.after),
            into=into.native,
            out=out.native,
            heads=HeadsStruct() if heads is None else heads.native,
            rope=0 if heads is None else _index(self._ropes, heads.rope),
            sight=0 if heads is None else self._windows.index(heads.window),
            activation=ACTIVATIONS[half.activation] if half.activation else 0,
            gated=half.gated,
            scale=half.scale,
        )


def _native(half: TakenApart) -> bool:
    return isinstance(half.into, NativeLinear) and isinstance(half.out, NativeLinear)


def _address(norm: Norm | None) -> int | None:
    return None if norm is None else ctypes.addressof(norm.native)


def _index(found: Iterable[object], wanted: object) -> int:
    return next(index for index, each in enumerate(found) if each is wanted)
