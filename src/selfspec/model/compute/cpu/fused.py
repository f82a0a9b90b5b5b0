"""Many halves of layers in one call to our kernels. Does not know which are asked for, or why."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from ctypes import Array

import torch
from torch import Tensor

from ..cache import KVCache, TokenLayout
from ..halves import HalfParts
from ..ops import ACTIVATIONS
from ..plan import LayerPlan
from ..rope import Angles
from .interface import (
    CallStruct,
    HalfStruct,
    HeadsStruct,
    ProductStruct,
    RopeStruct,
    SightStruct,
    half_number,
    half_numbers,
    heads_struct,
    norm_address,
    rope_struct,
    sight_struct,
    where_struct,
)
from .native import library


class FusedHalves:
    """Halves of layers by (layer, is_attention), as our kernels read them."""

    def __init__(self, halves: Mapping[tuple[int, bool], HalfParts]) -> None:
        self._kept = halves  # the structs hold addresses of their tensors
        attentions = [half.heads for half in halves.values() if half.heads]
        self._ropes = list({id(heads.rope): heads.rope for heads in attentions}.values())
        self._known: tuple[Sequence[Angles | None], Array[RopeStruct]] | None = None
        self._windows = list(dict.fromkeys(heads.window for heads in attentions))
        # two places a layer, by `half_number`; those of halves that are not here are never read
        self._halves = (
            HalfStruct * (1 + max((half_number(*each) for each in halves), default=0))
        )()
        for (layer, attention), half in halves.items():
            self._halves[half_number(layer, attention)] = self._struct(layer, half)

    def run(
        self,
        x: Tensor,
        plan: LayerPlan,
        begin: int,
        end: int,
        cache: KVCache,
        layout: TokenLayout,
        entered: Tensor,
    ) -> Tensor:
        """The stream (tokens, width) after the plan's halves [begin, end). `entered`: what entered
        the layer of the first."""
        entered = entered.contiguous()
        x = x.clone(memory_format=torch.contiguous_format)
        _held, ropes = self._tables()  # held: the tables may grow into other memory meanwhile
        sights = (SightStruct * len(self._windows))(
            *(sight_struct(layout, window) for window in self._windows)
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
            ctypes.byref(half_numbers(plan), begin * ctypes.sizeof(ctypes.c_int64)),
            end - begin,
            call,
            torch.get_num_threads(),
        )
        return x

    def _tables(self) -> tuple[Sequence[Angles | None], Array[RopeStruct]]:
        """The rotary tables as they are now, and as our kernels read them."""
        tables = [None if rope is None else rope.tables for rope in self._ropes]
        if self._known is None or self._known[0] != tables:
            self._known = tables, (RopeStruct * len(tables))(*map(rope_struct, tables))
        return self._known

    def _struct(self, layer: int, half: HalfParts) -> HalfStruct:
        into, out, heads = half.into.native(), half.out.native(), half.heads
        assert isinstance(into, ProductStruct) and isinstance(out, ProductStruct)
        return HalfStruct(
            layer=layer,
            attention=heads is not None,
            parallel=half.parallel,
            before=norm_address(half.before),
            after=norm_address(half.after),
            into=into,
            out=out,
            heads=HeadsStruct() if heads is None else heads_struct(heads),
            rope=0 if heads is None else _index(self._ropes, heads.rope),
            sight=0 if heads is None else self._windows.index(heads.window),
            activation=ACTIVATIONS[half.activation] if half.activation else 0,
            gated=half.gated,
            scale=half.scale,
        )


def _index(found: Iterable[object], wanted: object) -> int:
    return next(index for index, each in enumerate(found) if each is wanted)
