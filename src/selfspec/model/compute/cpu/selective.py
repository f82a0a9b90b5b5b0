"""Selective recurrences by our kernels: the C interface of selective.h, and the C struct of
kernels.cpp."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, c_int64, c_void_p

import torch
from torch import Tensor

from ..norms import Norm
from ..recurrence import Recurrence
from ..recurrent_cache import Memory, Stretch
from ..selective import Selective
from .interface import ProductStruct, address, norm_address
from .native import library
from .recurrent import kept_struct, passages, recurrence_struct


class SelectiveStruct(ctypes.Structure):
    """One layer's products and norms."""

    _fields_ = [
        *((name, POINTER(ProductStruct)) for name in ("into", "steps")),
        *((name, c_void_p) for name in ("norm", "key_norm", "query_norm")),
    ]


class ChosenStruct(ctypes.Structure):
    """Of each token of a call what left the convolution, steps, keys and queries."""

    _fields_ = [
        *((name, c_void_p) for name in ("x", "steps", "keys", "queries")),
        ("stride", c_int64),
    ]


def selective_struct(selective: Selective) -> SelectiveStruct:
    """One layer's products, which keep their structs, and norms."""

    def make() -> SelectiveStruct:
        into, steps = (linear.native() for linear in selective.linears)
        assert isinstance(into, ProductStruct) and isinstance(steps, ProductStruct)
        norms = (selective.norm, selective.key_norm, selective.query_norm)
        return SelectiveStruct(
            ctypes.pointer(into), ctypes.pointer(steps), *map(norm_address, norms)
        )

    return selective.once("struct", make)


def select(
    how: Recurrence,
    y: Tensor | None,
    memory: Memory,
    row: int,
    stretch: Stretch,
    norm: Callable[[Tensor, Norm], Tensor],
) -> Tensor | None:
    """What `recur` does, of one that is selective."""
    assert how.selective is not None
    found = passages([(0, row, stretch)])
    how_address = ctypes.addressof(recurrence_struct(how))
    kept = kept_struct(memory, found)
    if y is None:
        nothing = ChosenStruct(None, None, None, None, 0)
        library().recur_select(
            how_address, ctypes.byref(kept), None, 0, ctypes.addressof(nothing), None
        )
        return None
    x = torch.empty(len(y), how.size.channels)
    library().recur_convolve(
        how_address, ctypes.byref(kept), y.data_ptr(), y.stride(0), x.data_ptr()
    )
    steps, keys, queries = how.selective.chosen(x, norm)
    out = torch.empty(len(y), how.outputs)
    chosen = ChosenStruct(*map(address, (x, steps, keys, queries)), keys.shape[1])
    library().recur_select(
        *(how_address, ctypes.byref(kept), y.data_ptr(), y.stride(0)),
        *(ctypes.addressof(chosen), out.data_ptr()),
    )
    return out
