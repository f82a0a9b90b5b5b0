"""The operations of a block by our kernels, one call each: float32 on a CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..cache import KVCache, TokenLayout
from ..grouped import STORED, Blocks, Grouped, Matrix, joined, why_floats
from ..linear import Linear, joined_bias
from ..mixture import Mixture
from ..norms import Norm
from ..ops import ACTIVATIONS, Heads, Kernel, Ops
from ..recurrence import Recurrence
from ..recurrent_cache import Memory, Stretch
from . import moving  # noqa: F401  (caches move their entries by it)
from .experts import mixed
from .interface import (
    address,
    heads_struct,
    layer_struct,
    norm_struct,
    rope_struct,
    sight_struct,
    where_struct,
)
from .kinds import KINDS
from .linear import PackedLinear
from .native import library
from .packs import Shelf
from .recurrent import recur, times_sigmoid
from .selective import select


def product(
    kind: str,
    weights: Sequence[Matrix],
    biases: Sequence[Tensor | None],
    shelf: Shelf | None = None,
) -> PackedLinear:
    """A product in a kind, from the shelf if it is there."""
    packed = shelf.take(kind, sum(map(len, weights)), weights[0].shape[1]) if shelf else None
    made = KINDS[kind](weights, biases, packed)
    if shelf:
        shelf.put(kind, made)
    return made


class NativeOps(Ops):
    """Our kernels. `weights`: which of `KINDS` products are stored as."""

    kernel: Kernel = "native"
    few_bits = True

    def __init__(self, weights: str = "float32", shelf: Shelf | None = None) -> None:
        self._native = library()
        self.weights = weights
        self._kind = KINDS[weights]
        self.rounding = self._kind.rounding
        self._shelf = shelf

    def linear(self, weights: Sequence[Matrix], biases: Sequence[Tensor | None]) -> Linear:
        if self.weights != STORED:
            return product(str(self.weights), weights, biases, self._shelf)
        whole, bias = joined(weights), joined_bias(weights, biases)
        if isinstance(whole, Grouped) or (isinstance(whole, Blocks) and not whole.floats):
            return self._kind([whole], [bias])
        made = KINDS["float32"]([whole], [bias])
        made.floats = next(
            (why for why in map(why_floats, weights) if why), "stored as plain numbers"
        )
        return made

    def table(self, blocks: Blocks) -> Tensor | Linear:
        return blocks.float() if blocks.floats else KINDS[STORED]([blocks], [None])

    @property
    def of_head(self) -> Ops:
        return NativeOps(self._kind.head, self._shelf) if self._kind.head else self

    @property
    def of_router(self) -> Ops:
        return self if self.weights == STORED else NativeOps("float32", self._shelf)

    def on_shelf(self, shelf: Shelf) -> NativeOps:
        """The same, with products taken from a shelf or put there."""
        return NativeOps(str(self.weights), shelf)

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        (rows, size), native = x.shape, norm_struct(norm)
        assert native.size == size
        out = torch.empty_like(x)
        self._native.normalise(x.data_ptr(), rows, native, out.data_ptr(), torch.get_num_threads())
        return out

    def gated(self, both: Tensor, activation: str) -> Tensor:
        rows, size = both.shape[0], both.shape[1] // 2
        out = torch.empty((rows, size))
        self._native.gated(
            both.data_ptr(),
            rows,
            size,
            ACTIVATIONS[activation],
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out

    def activated(self, x: Tensor, activation: str, curve: Tensor | None = None) -> Tensor:
        self._native.activated(
            x.data_ptr(), *x.shape, ACTIVATIONS[activation], address(curve), torch.get_num_threads()
        )
        return x

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        self._native.soft_cap(x.data_ptr(), x.numel(), cap, torch.get_num_threads())
        return x

    def attention(self, qkv: Tensor, heads: Heads, cache: KVCache, layout: TokenLayout) -> Tensor:
        self.file_keys(qkv, heads, cache, layout)
        out = torch.empty((len(qkv), heads.queries * heads.size))
        self._native.attend(
            qkv.data_ptr(),
            len(qkv),
            heads_struct(heads),
            layer_struct(cache, heads),
            sight_struct(layout, heads.window),
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out

    def file_keys(self, qkv: Tensor, heads: Heads, cache: KVCache, layout: TokenLayout) -> None:
        angles = heads.rope.tables if heads.rope else None  # held while the kernels read them
        self._native.rotate_and_store(
            qkv.data_ptr(),
            len(qkv),
            heads_struct(heads),
            rope_struct(angles),
            where_struct(layout),
            layer_struct(cache, heads),
            torch.get_num_threads(),
        )

    def times_sigmoid(self, x: Tensor, gate: Tensor) -> Tensor:
        return times_sigmoid(x, gate)

    def mixed(
        self,
        x: Tensor,
        mixture: Mixture,
        residual: Tensor | None = None,
        scored: Tensor | None = None,
    ) -> Tensor:
        if mixture.alone:
            return super().mixed(x, mixture, residual, scored)
        logits = mixture.router(x if scored is None else scored)
        if mixture.narrow is None:
            return mixed(x, logits, mixture, residual)
        both, width = mixture.narrow(x), mixture.width
        y = mixed(both[:, :width].contiguous(), logits, mixture, None)
        return self.widened(y, both[:, width:], mixture, residual)

    def go_on(
        self, y: Tensor | None, how: Recurrence, memory: Memory, row: int, stretch: Stretch
    ) -> Tensor | None:
        if how.selective is not None:
            return select(how, y, memory, row, stretch, self.norm)
        return recur(how, y, memory, row, stretch)
