"""Room for keys and values, and what to say when a device runs out of memory: what was asked for,
what is free, and what would fit.

Knows numbers only; whoever catches the error knows what was being made.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ...errors import ResourceError

CacheShape = tuple[int, int, int, int]  # layers, rows, heads, size
LOOKED_AT = 1 << 30  # bytes from which it is asked beforehand whether a CPU has them


def gigabytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB"


def room_for(
    shape: CacheShape, slots: int, dtype: torch.dtype, device: torch.device, unread: bool = False
) -> tuple[Tensor, Tensor]:
    """Keys and values for so many slots. Zeros: a masked NaN would still poison SDPA. `unread`:
    nobody reads what was not written, so it may be anything, and takes no memory until then."""
    layers, rows, heads, size = shape
    needed = 2 * layers * rows * heads * slots * size * dtype.itemsize
    # a CPU's system promises memory that it does not have, and ends who touches it
    if device.type == "cpu" and needed > LOOKED_AT and needed > free_memory(device):
        raise cache_too_large(shape, slots, dtype, device)

    def room() -> Tensor:
        make = unwritten if unread else torch.zeros
        return make((layers, rows, heads, slots, size), dtype=dtype, device=device)

    try:
        return room(), room()
    except torch.OutOfMemoryError as error:
        raise cache_too_large(shape, slots, dtype, device) from error


def unwritten(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory as it is. Tests put into it what must not be read."""
    return torch.empty(shape, dtype=dtype, device=device)


def free_memory(device: torch.device) -> int:
    """Bytes that torch could still get. On a card those of the driver, and what torch keeps unused;
    on a CPU a container's limit counts too."""
    if device.type == "cpu":
        import psutil  # here: who only imports selfspec needs none of it

        left = cgroup_left(Path("/sys/fs/cgroup"))
        available = int(psutil.virtual_memory().available)
        return available if left is None else min(available, left)
    if device.type != "cuda":
        return 0
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free) + int(unused)


def cgroup_left(root: Path) -> int | None:
    """What a cgroup v2 limit leaves, page cache that can be dropped included. None: no limit."""
    try:
        limit = (root / "memory.max").read_text().strip()
        used = int((root / "memory.current").read_text())
        stat = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no cgroup v2 here: psutil alone knows
        return None
    return None if limit == "max" else max(int(limit) - used + int(stat.get("inactive_file", 0)), 0)


def cache_too_large(
    shape: CacheShape, slots: int, dtype: torch.dtype, device: torch.device, free: int | None = None
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
