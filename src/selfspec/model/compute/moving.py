"""Moves the few entries of a cache that a tree leaves together. Does not know which are kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Mover = Callable[[Tensor, Tensor, int, int, Sequence[int]], bool]
"""Moves as `move` does, and says whether it did."""
_mover: Mover | None = None


def move_by(mover: Mover) -> None:
    """Let this function do it, where it can."""
    global _mover
    _mover = mover


def move(keys: Tensor, values: Tensor, row: int, first: int, source: Sequence[int]) -> None:
    """A row's entries at the slots `source`, in order and none of them before its new place, to
    those from `first` on; keys and values are (layers, rows, heads, slots, size)."""
    if _mover is not None and _mover(keys, values, row, first, source):
        return
    slots = torch.tensor(source, device=keys.device)
    for room in (keys, values):
        room[:, row, :, first : first + len(source)] = room[:, row, :, slots]
