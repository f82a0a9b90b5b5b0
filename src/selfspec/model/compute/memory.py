"""What to say when a device runs out of memory: what was asked for, what is free, and what would
fit.

Knows numbers only; whoever catches the error knows what was being made.
"""

from __future__ import annotations

import torch

from ...errors import ResourceError


def gigabytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB"


def free_memory(device: torch.device) -> int:
    """Bytes that torch could still get: the driver's, and what torch keeps unused."""
    if device.type != "cuda":
        return 0
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free) + int(unused)


def cache_too_large(
    shape: tuple[int, int, int, int],
    slots: int,
    dtype: torch.dtype,
    device: torch.device,
    free: int | None = None,
) -> ResourceError:
    """The error for a cache of (layers, rows, heads, size) and so many slots."""
    layers, rows, heads, size = shape
    each = 2 * layers * heads * size * dtype.itemsize  # bytes of one token
    free = free_memory(device) if free is None else free
    fitting = free // each
    if fitting >= rows:
        would = f"what would fit: {fitting // rows} tokens of text in each of {rows} rows"
        if fitting >= slots:
            would += f", or {fitting // slots} rows of {slots}"
    else:
        would = "not even one token a row would fit"
    remedy = "generate fewer prompts at a time, or ask for fewer tokens (max_new_tokens)"
    if dtype == torch.float32:
        remedy += "; dtype='bfloat16' halves it"
    return ResourceError(
        f"keys and values for {rows} rows of {slots} tokens take {gigabytes(rows * slots * each)} "
        f"in {_name(dtype)}, and {gigabytes(free)} are free on {device}; {would}. "
        f"To go on: {remedy}."
    )


def weights_too_large(
    name: str,
    parameters: int | None,
    dtype: torch.dtype | None,
    device: torch.device,
    free: int | None = None,
) -> ResourceError:
    """The error for a model whose weights do not fit."""
    free = free_memory(device) if free is None else free
    kind = dtype or torch.float32
    if parameters is None:
        size = "its weights"
    else:
        size = f"its weights, {gigabytes(parameters * kind.itemsize)} in {_name(kind)},"
    would = "a smaller model, or device='cpu'"
    if parameters is not None and kind.itemsize > 2 and 2.2 * parameters < free:
        would = f"dtype='bfloat16', {gigabytes(2 * parameters)}, would fit; else " + would
    return ResourceError(
        f"{name}: the memory of {device} ran out while {size} were brought there; "
        f"{gigabytes(free)} are free now. "
        f"To go on: {would}; or end other programs that use the device."
    )


def work_too_large(
    rows: int, cached: int, device: torch.device, free: int | None = None
) -> ResourceError:
    """The error for a step that ran out, `cached` bytes being taken by its keys and values."""
    free = free_memory(device) if free is None else free
    fewer = f"fewer rows at a time (there are {rows})" if rows > 1 else "a shorter text"
    return ResourceError(
        f"the memory of {device} ran out in the middle of a step; keys and values of the {rows} "
        f"rows hold {gigabytes(cached)}, {gigabytes(free)} are free now. "
        f"To go on: {fewer}, fewer drafts a round, or a smaller dtype."
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
