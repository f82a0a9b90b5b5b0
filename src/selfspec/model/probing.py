"""A probe prompt that our forward reads in different ways, and what follows from the logits.

self_check.py compares the same prompt with the model's own logits. Knows no transformers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .family import Shape
from .layered import LayeredModel

LENGTH = 24


def probe(shape: Shape, device: torch.device) -> Tensor:
    """A prompt of tokens drawn at random, the same ones at every load."""
    size = min(LENGTH, shape.context)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, shape.vocabulary, (size,), generator=generator).to(device)


def probe_logits(model: LayeredModel, at_a_time: int = LENGTH) -> Tensor:
    """Our logits of the probe, read so many tokens at a time."""
    tokens = probe(model.shape, model.device)
    cache = model.new_cache(1, len(tokens))
    pieces = tokens.split(at_a_time)
    return torch.cat([model.forward(some, cache, cache.layout([len(some)])) for some in pieces])


def is_row_stable(model: LayeredModel) -> bool:
    """Whether the probe's logits have the same bits read at once, in blocks, and singly."""
    whole, *others = [probe_logits(model, size) for size in (LENGTH, 7, 1)]
    return all(torch.equal(whole, other) for other in others)


def check_recordings(model: LayeredModel) -> None:
    """Give recordings up if replayed steps do not give what they give when they just run."""
    if model.steps.reason:
        return
    with model.steps.eagerly():
        expected = probe_logits(model, 1).float()
    gap = (probe_logits(model, 1).float() - expected).abs().max().item()
    if not gap <= 1e-3 * max(expected.abs().max().item(), 1e-3):  # also a NaN
        model.steps.give_up(f"replayed steps gave logits that differ by {gap:.3g}")
