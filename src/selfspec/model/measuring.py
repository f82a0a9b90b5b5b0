"""What a pass of a model reads and what its products cost. Knows nothing of how a pass runs."""

from __future__ import annotations

import time
from collections import Counter

import torch

from .compute.linear import kind_of
from .layered import LayeredModel


def weight_bytes(model: LayeredModel) -> int:
    """Bytes of weights that one pass reads."""
    return sum(linear.bytes for linear in model.linears)


def still_float32(model: LayeredModel) -> list[str]:
    """Which products of a model in few bits are in float32, and why, in words."""
    reasons = Counter(linear.floats for linear in model.linears if linear.floats)
    of = f"of {len(model.linears)} products in float32"
    return [f"{count} {of}: {why}" for why, count in sorted(reasons.items())]


def product_modules(model: LayeredModel) -> tuple[str, ...]:
    """The kinds of modules that products are left to, such as quantised ones; usually none."""
    modules = [module for linear in model.linears for module in linear.modules]
    return tuple(sorted({kind_of(module) for module in modules}))


@torch.inference_mode()
def product_seconds(model: LayeredModel, rows: int = 1) -> float:
    """Seconds that the matrix products of one pass over `rows` tokens take, and nothing else."""
    inputs = {
        size: torch.randn(rows, size).to(model.device, model.dtype)
        for size in {linear.inputs for linear in model.linears}
    }
    start = time.perf_counter()
    for linear in model.linears:
        linear(inputs[linear.inputs])
    return time.perf_counter() - start
