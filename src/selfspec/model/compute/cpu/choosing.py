"""The likeliest tokens of rows of logits. By our own kernel for float32 on a CPU, in a tenth of
torch's time, else by torch. And the kernel that draws a token, which core/coupling.py asks. Knows
neither models nor sampling."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from ctypes import c_int, c_int64, c_uint64, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from ....core.coupling import UNSURE, draw_by
from .native import function_of

_SOURCE = Path(__file__).with_name("choosing.cpp")
BROKEN = -1  # stands for a token where there is none to choose
_BLOCK = 256  # logits that are looked at together


def likeliest(logits: Tensor, count: int = 1) -> Tensor:
    """(rows, vocabulary) -> (rows, count) ids, the likeliest first; of equal ones the lowest."""
    kernel = _kernel_for(logits)
    if kernel is not None:
        return _by_kernel(kernel, logits, count, mark=False)
    return logits.argmax(-1, keepdim=True) if count == 1 else _by_blocks(logits, count)


def likeliest_known(
    best: Sequence[Sequence[int]] | None, logits: Tensor, count: int
) -> Sequence[Sequence[int]]:
    """The likeliest tokens of each row as they were looked up before, if so many were; else they
    are one read from the device."""
    return best if best and len(best[0]) >= count else likeliest(logits, count).tolist()


def likeliest_or_broken(logits: Tensor, count: int = 1) -> Tensor:
    """The same, with BROKEN first where the best logit is not finite. Fewer than `count` where
    torch chooses: it has no order among equal ones, and takes longer for more."""
    kernel = _kernel_for(logits)
    if kernel is not None:
        return _by_kernel(kernel, logits, count, mark=True)
    broken = ~logits.amax(-1, keepdim=True).isfinite()  # NaN wins against every number
    return logits.argmax(-1, keepdim=True).masked_fill(broken, BROKEN)


def drawn(logits: Tensor, key: int) -> int:
    """The token that `earliest` of core/coupling.py draws by this key of logits, (vocabulary,);
    UNSURE where it has to say itself."""
    if logits.dtype != torch.float32 or logits.device.type != "cpu" or not logits.is_contiguous():
        return UNSURE
    kernel = _drawing()
    return UNSURE if kernel is None else kernel(logits.data_ptr(), len(logits), key)


draw_by(drawn)


def _by_kernel(kernel: Callable[..., None], logits: Tensor, count: int, mark: bool) -> Tensor:
    rows, size = logits.shape
    out = torch.empty((rows, min(count, size)), dtype=torch.int64)
    kernel(
        logits.data_ptr(), rows, size, out.shape[1], out.data_ptr(), mark, torch.get_num_threads()
    )
    return out


def _kernel_for(logits: Tensor) -> Callable[..., None] | None:
    """Our function, where it can read these logits."""
    is_float = logits.dtype == torch.float32 and logits.device.type == "cpu"
    return _kernel() if is_float and logits.is_contiguous() else None


@functools.cache
def _kernel() -> Callable[..., None] | None:
    """Our function that finds the likeliest."""
    types = c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int, c_int
    return function_of(_SOURCE, "largest", None, *types)


@functools.cache
def _drawing() -> Callable[..., int] | None:
    """Our function that draws."""
    return function_of(_SOURCE, "drawn", c_int64, c_void_p, c_int64, c_uint64)


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
