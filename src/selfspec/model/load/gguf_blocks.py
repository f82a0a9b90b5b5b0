"""The blocks of GGUF files as grouped numbers.

The layouts are those of ggml's `ggml-quants.c`; the `gguf` package expands the same blocks to
float32, which the tests compare with. Does not know files or models.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..compute.grouped import Grouped


def _half(blocks: Tensor, at: int) -> Tensor:
    """(rows, blocks, bytes) -> the number of 16 bits that begins at a byte, (rows, blocks, 1)"""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).float()


def _halves(numbers: Tensor) -> Tensor:
    """Bytes as two numbers: all the low halves, then all the high ones."""
    return torch.cat([numbers & 15, numbers >> 4], dim=-1)


def _fifth_bits(blocks: Tensor, at: int) -> Tensor:
    """32 bits from a byte on, as 16 or 0 each."""
    bits = blocks[..., at : at + 4, None] >> torch.arange(8, dtype=torch.uint8)
    return (bits & 1).flatten(-2) << 4


def _made(numbers: Tensor, scale: Tensor, minimum: Tensor | None, group: int, bits: int) -> Grouped:
    """The value, of (rows, blocks, numbers or groups) each."""
    minimum = None if minimum is None else minimum.flatten(1)
    return Grouped(numbers.flatten(1).to(torch.int8), scale.flatten(1), minimum, group, bits)


def q8_0(blocks: Tensor) -> Grouped:
    """A scale and 32 bytes with a sign."""
    return _made(blocks[..., 2:].view(torch.int8), _half(blocks, 0), None, 32, 8)


def q4_0(blocks: Tensor) -> Grouped:
    """A scale and 32 half bytes around 8."""
    return _made(_halves(blocks[..., 2:]).to(torch.int8) - 8, _half(blocks, 0), None, 32, 4)


def q4_1(blocks: Tensor) -> Grouped:
    """A scale, a minimum and 32 half bytes."""
    return _made(_halves(blocks[..., 4:]), _half(blocks, 0), _half(blocks, 2), 32, 4)


def q5_0(blocks: Tensor) -> Grouped:
    """A scale, 32 fifth bits and 32 half bytes, around 16."""
    numbers = _halves(blocks[..., 6:]) | _fifth_bits(blocks, 2)
    return _made(numbers.to(torch.int8) - 16, _half(blocks, 0), None, 32, 5)


def q5_1(blocks: Tensor) -> Grouped:
    """A scale, a minimum, 32 fifth bits and 32 half bytes."""
    numbers = _halves(blocks[..., 8:]) | _fifth_bits(blocks, 4)
    return _made(numbers, _half(blocks, 0), _half(blocks, 2), 32, 5)


def _scales_and_minima(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Of eight groups: six bits each in twelve bytes, times the block's own two numbers."""
    first, second, last = blocks[..., 4:16].split(4, dim=-1)
    scale = torch.cat([first & 63, (last & 15) | (first >> 6 << 4)], dim=-1)
    minimum = torch.cat([second & 63, (last >> 4) | (second >> 6 << 4)], dim=-1)
    return _half(blocks, 0) * scale.float(), -(_half(blocks, 2) * minimum.float())


def q4_k(blocks: Tensor) -> Grouped:
    """Eight groups of 32; two of them share their bytes."""
    numbers = _halves(blocks[..., 16:].unflatten(-1, (4, 32))).flatten(-2)
    return _made(numbers, *_scales_and_minima(blocks), 32, 4)


def q5_k(blocks: Tensor) -> Grouped:
    """The same, with a fifth bit of each group's number `i` in the byte `i`."""
    numbers = _halves(blocks[..., 48:].unflatten(-1, (4, 32)))  # (rows, blocks, 4, 64)
    numbers = numbers.flatten(-2).unflatten(-1, (8, 32))
    fifth = blocks[..., None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None]
    return _made((numbers | (fifth & 1) << 4).flatten(-2), *_scales_and_minima(blocks), 32, 5)


def q6_k(blocks: Tensor) -> Grouped:
    """Sixteen groups of 16: 128 bytes of low halves, 64 of two high bits, scales in 8 bits."""
    low = blocks[..., :128].unflatten(-1, (2, 2, 32))
    low = torch.cat([low & 15, low >> 4], dim=-2)  # (rows, blocks, 2, 4, 32)
    high = blocks[..., 128:192].unflatten(-1, (2, 1, 32))
    high = high >> torch.arange(0, 8, 2, dtype=torch.uint8)[:, None] & 3
    scale = _half(blocks, 208) * blocks[..., 192:208].view(torch.int8).float()
    return _made((low | high << 4).flatten(-3).to(torch.int8) - 32, scale, None, 16, 6)


FORMATS: dict[str, tuple[int, int, Callable[[Tensor], Grouped]]] = {
    "Q8_0": (32, 34, q8_0),
    "Q4_0": (32, 18, q4_0),
    "Q4_1": (32, 20, q4_1),
    "Q5_0": (32, 22, q5_0),
    "Q5_1": (32, 24, q5_1),
    "Q4_K": (256, 144, q4_k),
    "Q5_K": (256, 176, q5_k),
    "Q6_K": (256, 210, q6_k),
}
"""For each format that our kernels run: numbers and bytes of a block, and what reads blocks, (rows,
blocks, bytes) uint8."""

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def row_bytes(kind: str, inputs: int) -> int:
    """Bytes of a row of so many numbers."""
    if kind in FLOATS:
        return FLOATS[kind].itemsize * inputs
    numbers, size, _ = FORMATS[kind]
    return inputs // numbers * size


def decoded(kind: str, raw: Tensor) -> Grouped | Tensor:
    """Rows of bytes, (rows, bytes): in few bits, or as float32 where they are floats."""
    if kind in FLOATS:
        return raw.view(FLOATS[kind]).float()
    _, size, read = FORMATS[kind]
    return read(raw.view(len(raw), -1, size))
