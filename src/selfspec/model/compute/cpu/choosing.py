"""The likeliest tokens of rows of logits. By our own kernel for float32 on a CPU, in a tenth of
torch's time, else by torch. Knows neither models nor sampling."""

from __future__ import annotations

import functools
from collections.abc import Callable
from ctypes import c_int, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .native import NoNative, compiled

_SOURCE = Path(__file__).with_name("choosing.cpp")
BROKEN = -1  # stands for a token where there is none to choose
_BLOCK = 256  # logits that are looked at together


def likeliest(logits: Tensor, count: int = 1, mark: bool = False) -> Tensor:
    """(rows, vocabulary) -> (rows, count) ids, the likeliest first; of equal ones the lowest.
    `mark`: BROKEN stands first where the best logit is not finite."""
    rows, size = logits.shape
    kernel = _kernel() if _readable(logits) else None
    if kernel is None:
        return _by_torch(logits, count, mark)
    out = torch.empty((rows, min(count, size)), dtype=torch.int64)
    kernel(
        logits.data_ptr(), rows, size, out.shape[1], out.data_ptr(), mark, torch.get_num_threads()
    )
    return out


def more_is_free(logits: Tensor) -> bool:
    """Whether several of the likeliest take as long as one, and begin with that one even where some
    are equal. torch has no order among equal ones."""
    return _readable(logits) and _kernel() is not None


def _readable(logits: Tensor) -> bool:
    is_float = logits.dtype == torch.float32 and logits.device.type == "cpu"
    return is_float and logits.is_contiguous()


@functools.cache
def _kernel() -> Callable[..., None] | None:
    """Our function. None: it cannot be had here."""
    try:
        largest: Any = compiled(_SOURCE).largest
    except NoNative:
        return None
    largest.argtypes = [c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int, c_int]
    largest.restype = None
    found: Callable[..., None] = largest
    return found


def _by_torch(logits: Tensor, count: int, mark: bool) -> Tensor:
    best = logits.argmax(-1, keepdim=True) if count == 1 else _by_blocks(logits, count)
    if mark:  # NaN wins against every number
        best[:, 0] = best[:, 0].masked_fill(~logits.amax(-1).isfinite(), BROKEN)
    return best


def _by_blocks(logits: Tensor, count: int) -> Tensor:
    """By torch, in a fifth of `topk`'s time."""
    size, blocks = logits.shape[1], logits.shape[1] // _BLOCK
    if blocks <= 4 * count:
        return logits.topk(min(count, size)).indices
    body = blocks * _BLOCK
    best = logits[:, :body].unflatten(1, (blocks, _BLOCK)).amax(-1).topk(count).indices
    inside = (best[..., None] * _BLOCK + torch.arange(_BLOCK, device=logits.device)).flatten(1)
    rest = torch.arange(body, size, device=logits.device).expand(len(logits), -1)
    where = torch.cat([inside, rest], dim=1)
    return where.gather(1, logits.gather(1, where).topk(count).indices)
