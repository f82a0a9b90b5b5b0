"""The token that a row's random numbers choose, drawn so that alike distributions choose alike.

Every token has a waiting time, exponential with mean 1 and divided by the token's probability. The
first to arrive is chosen, which is a draw from the distribution (the Gumbel-max trick: -log of a
time is Gumbel noise on the logit). Draft and target use the same times, so they agree with a chance
of sum_i 1 / sum_j max(p_j / p_i, q_j / q_i), which is at least (1 - TV) / (1 + TV), the most that
any coupling without communication can promise (Daliri, Musco, Suresh 2024, arXiv 2408.07978).

Times are counted, not consumed: a function of a key and the token. They are made in blocks of 64
tokens, since the first of 64 exponentials arrives after an exponential of a 64th of the mean, is
any of them with equal chances, and leaves the others as far to go as at the start. So most blocks
are left out after one number, and most tokens of the others: they cannot be the first. Knows no
temperature, no filters and no seeds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor

Words: TypeAlias = npt.NDArray[np.uint64]
Numbers: TypeAlias = npt.NDArray[np.float64]

Kernel: TypeAlias = "Callable[[Tensor, int], int]"
UNSURE = -1  # what a kernel says where rounding might decide, and of logits that are broken
_kernel: Kernel | None = None

_BITS = 6
_BLOCK = 1 << _BITS
_FEW = 2048  # up to this many tokens all times are made
_FIRST = 8  # blocks whose times say what the others have to beat
_ROUNDING = 1e-6
_GOLDEN, _M1, _M2 = (
    np.uint64(x) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
_S12, _S27, _S30, _S31 = (np.uint64(x) for x in (12, 27, 30, 31))


def draw_by(kernel: Kernel | None) -> None:
    """Ask this function first: the same token of logits and a key, or UNSURE."""
    global _kernel
    _kernel = kernel


def quickly(values: Tensor, tokens: Tensor | None, key: int, count: int = 1) -> list[int] | None:
    """What `earliest` says, if a kernel is sure of it, and then the logits are not broken."""
    if _kernel is None or tokens is not None or count > 1:
        return None
    found = _kernel(values, key)
    return None if found == UNSURE else [found]


def earliest(values: Tensor, tokens: Tensor | None, key: int, count: int = 1) -> list[int]:
    """The indices of the `count` tokens that arrive first, in order: `count` draws without
    replacement. `values`: float logits, some finite and none NaN. `tokens`: their ids, ascending;
    None says that they are 0, 1, 2 and so on."""
    logits: Numbers = values.cpu().numpy()
    if tokens is None and len(logits) > _FEW:
        among = _able(logits, key, count)
    else:
        among = np.arange(len(logits))
    ids = among if tokens is None else tokens.cpu().numpy()
    scores = logits[among] - np.log(times(key, ids))
    if count == 1:
        return [int(among[scores.argmax()])]
    order = np.argsort(-scores, kind="stable")[:count]
    return [int(among[index]) for index in order if scores[index] > -np.inf]


def times(key: int, tokens: npt.NDArray[np.int64]) -> Numbers:
    """The waiting times of these tokens, before they are divided by probabilities."""
    first, holder = _first_of(key, tokens >> _BITS)
    more = _exponential(_word(key, tokens))
    return first + np.where(holder == tokens % _BLOCK, 0.0, more)


def _able(logits: Numbers, key: int, count: int) -> npt.NDArray[np.int64]:
    """The tokens that may be among the first `count`, ascending."""
    size = len(logits)
    blocks = np.arange((size + _BLOCK - 1) >> _BITS)
    highest = np.maximum.reduceat(logits, blocks << _BITS)
    least = np.log(_first_of(key, blocks)[0])  # no time of the block is below
    likely = _tokens(np.argpartition(highest, -_FIRST)[-_FIRST:], size)
    scores = logits[likely] - np.log(times(key, likely))
    beat = np.partition(scores, -count)[-count] - _ROUNDING
    able: npt.NDArray[np.int64] = _tokens(blocks[highest - least >= beat], size)
    able = able[logits[able] - least[able >> _BITS] >= beat]
    return able


def _tokens(blocks: npt.NDArray[np.int64], size: int) -> npt.NDArray[np.int64]:
    tokens = ((blocks << _BITS)[:, None] + np.arange(_BLOCK)).ravel()
    return tokens[tokens < size]


def _first_of(key: int, blocks: npt.NDArray[np.int64]) -> tuple[Numbers, npt.NDArray[np.int64]]:
    """When the first token of each block arrives, and which of the 64 it is."""
    words = _word(key, ~blocks)  # numbers that no token has
    return _exponential(words) / _BLOCK, (words % np.uint64(_BLOCK)).astype(np.int64)


def _word(key: int, counters: npt.NDArray[np.int64]) -> Words:
    """64 bits for each counter: splitmix64 (Steele, Lea, Flood 2014) with the key as its seed."""
    x = (counters.astype(np.uint64) + np.uint64(1)) * _GOLDEN + np.uint64(key)
    x = (x ^ (x >> _S30)) * _M1
    x = (x ^ (x >> _S27)) * _M2
    return x ^ (x >> _S31)


def _exponential(words: Words) -> Numbers:
    """Of the upper 52 bits, never 0 nor infinite. Steps are finest near 0, where it matters."""
    numbers: Numbers = -np.log1p(-((words >> _S12) + 0.5) * 2.0**-52)
    return numbers
