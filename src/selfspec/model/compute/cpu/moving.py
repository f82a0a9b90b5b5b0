"""Moves the few entries of a cache that a tree leaves together, by our own function on a CPU. It
takes less time than torch's indexing. Does not know which are kept, or why.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from ctypes import c_int64, c_void_p
from pathlib import Path

from torch import Tensor

from ..moving import move_by
from .interface import array_type
from .native import function_of

_SOURCE = Path(__file__).with_name("moving.cpp")


def moved_together(
    keys: Tensor, values: Tensor, row: int, first: int, source: Sequence[int]
) -> bool:
    """Move a row's entries at the slots `source`, in order and none of them before its new place,
    to those from `first` on; keys and values are (layers, rows, heads, slots, size). Says whether
    it did: elsewhere than on a CPU, and without a compiler, it cannot."""
    kernel = moving_kernel() if keys.device.type == "cpu" else None
    if kernel is None:
        return False
    kernel(
        *where_row(keys, values, row),
        *(first, array_type(c_int64, len(source))(*source), len(source)),
    )
    return True


def where_row(keys: Tensor, values: Tensor, row: int) -> Sequence[int]:
    """Where a row's keys and values begin; layers with their stride, heads with theirs, and the
    size of a slot, in bytes."""
    layers, _, heads, _, _ = keys.shape
    number = keys.element_size()
    layer, of_row, head, slot, _ = (stride * number for stride in keys.stride())
    begin = row * of_row
    return keys.data_ptr() + begin, values.data_ptr() + begin, layers, layer, heads, head, slot


@functools.cache
def moving_kernel() -> Callable[..., None] | None:
    types = (c_void_p, c_void_p, *[c_int64] * 6, c_void_p, c_int64)
    return function_of(_SOURCE, "move_together", None, *types)


move_by(moved_together)
