"""A few rows by one state, for many states at once, where each state has rows of its own: those of
a text's candidates, or of each path's of a tree. By our own kernel on a CPU, which reads the rows
where they lie, else by torch; their numbers differ in rounding only. Does not know what the rows
are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from ctypes import c_int, c_int64, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from .interface import array_type
from .native import function_of

_SOURCE = Path(__file__).with_name("own_rows.cpp")


def own_rows(rows: Tensor, whose: Sequence[int], x: Tensor) -> Tensor:
    """(groups, each, width) and (states, width) -> (states, each): each state by the rows of its
    group, `whose` says which. All float32. A state's numbers do not depend on the others."""
    kernel = _kernel() if rows.device.type == "cpu" else None
    if kernel is None:
        return _by_torch(rows, whose, x)
    assert rows.dtype == x.dtype == torch.float32
    assert min(whose) >= 0 and max(whose) < len(rows) and len(whose) == len(x)
    rows, x = rows.contiguous(), x.contiguous()
    states, (each, width) = len(whose), rows.shape[1:]
    out = torch.empty(states, each)
    kernel(
        rows.data_ptr(),
        x.data_ptr(),
        array_type(c_int64, states)(*whose),
        states,
        each,
        width,
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


def _by_torch(rows: Tensor, whose: Sequence[int], x: Tensor) -> Tensor:
    some = rows if list(whose) == list(range(len(rows))) else rows[list(whose)]
    return (some * x[:, None]).sum(-1)


@functools.cache
def _kernel() -> Callable[..., None] | None:
    types = c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int
    return function_of(_SOURCE, "own_rows", None, *types)
