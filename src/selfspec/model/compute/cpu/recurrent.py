"""Recurrent halves by our kernels: the C interface of recurrent.h. Does not know what is kept of a
text, nor why."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import Array, c_float, c_int64, c_void_p

import torch
from torch import Tensor

from ..recurrence import Recurrence
from ..recurrent_cache import REACH, Memory, Stretch
from .interface import address
from .native import library

_FINISHES = ("times gate", "norm, then gate", "gate, then norm", "times SiLU of gate")


class RecurrenceStruct(ctypes.Structure):
    """One layer's recurrence."""

    _fields_ = [
        ("index", c_int64),
        *((name, c_int64) for name in ("channels", "taps", "heads", "key", "value", "key_heads")),
        *((name, c_int64) for name in ("activated", "twice", "delta", "values_first", "finish")),
        *((n, c_void_p) for n in ("weight", "bias", "decay", "shift", "straight", "norm")),
        *((name, c_int64) for name in ("norm_size", "norm_width")),
        *((name, c_float) for name in ("eps", "low", "high")),
        ("selective", c_int64),
    ]


class PassageStruct(ctypes.Structure):
    """Tokens of one row, from one of its states to another."""

    _fields_ = [(name, c_int64) for name in ("token", "row", "first", "count", "source", "target")]


class KeptStruct(ctypes.Structure):
    """What one recurrent layer keeps of all rows, and what happens to it in a call."""

    _fields_ = [
        *((name, c_void_p) for name in ("entries", "states", "places")),
        ("slots", c_int64),
        ("passages", c_void_p),
        ("count", c_int64),
    ]


def recurrence_struct(how: Recurrence) -> RecurrenceStruct:
    """One layer's recurrence; the kernels read float32."""

    def make() -> RecurrenceStruct:
        size = how.size
        kept = (how.weight, how.bias, how.decay, how.shift, how.straight, how.norm)
        for tensor in kept:
            assert tensor is None or (tensor.dtype == torch.float32 and tensor.is_contiguous())
        return RecurrenceStruct(
            how.index,
            *(size.channels, size.taps, size.heads, size.key, size.value, how.key_heads),
            *(how.activated, how.twice, how.delta, how.values_first, _FINISHES.index(how.finish)),
            *map(address, kept),
            *(how.norm_size, 0 if how.norm is None else how.norm.numel()),
            *(how.eps, *how.limits, size.selective),
        )

    return how.once("struct", make)


def passages(stretches: Sequence[tuple[int, int, Stretch]]) -> Array[PassageStruct]:
    """Stretches, each with its row and with its first token's place in the call."""
    made = [
        PassageStruct(
            *(-1 if each.again else token, row, each.first, each.end - each.first),
            *(each.source, each.target),
        )
        for token, row, each in stretches
    ]
    return (PassageStruct * len(made))(*made)


def kept_struct(memory: Memory, found: Array[PassageStruct]) -> KeptStruct:
    """A memory, whose rows may come to lie elsewhere later: this is for one call."""
    return KeptStruct(
        memory.entries.data_ptr(),
        memory.states.data_ptr(),
        memory.places.buffer_info()[0],
        *(REACH, ctypes.addressof(found), len(found)),
    )


def recur(
    how: Recurrence, y: Tensor | None, memory: Memory, row: int, stretch: Stretch
) -> Tensor | None:
    """What a stretch's tokens give, (tokens, outputs), and what is kept of them. Without `y` that
    is known already but for the state, and nothing is given. Not of one that is selective."""
    out = None if y is None else torch.empty(len(y), how.outputs)
    found = passages([(0, row, stretch)])
    library().recur(
        ctypes.addressof(recurrence_struct(how)),
        ctypes.byref(kept_struct(memory, found)),
        address(y),
        0 if y is None else y.stride(0),
        address(out),
        torch.get_num_threads(),
    )
    return out


def times_sigmoid(x: Tensor, gate: Tensor) -> Tensor:
    """x, whose rows lie one after the other, times the sigmoid of a gate that is as wide or one
    number a row."""
    assert x.is_contiguous() and gate.stride(1) == 1 and gate.shape[1] in (1, x.shape[1])
    rows, width = x.shape
    library().times_sigmoid(
        x.data_ptr(), gate.data_ptr(), rows, width, gate.stride(0), gate.shape[1]
    )
    return x
