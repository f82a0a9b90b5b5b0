"""A part of the vocabulary that stands for all of it in a loss (sampled softmax).

It makes training with a large vocabulary cheap. The sum over the tokens that were not drawn is
estimated from those that were, without bias. Knows no model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

NEARLY_ALL = 0.7  # of a vocabulary: beyond that the whole is not dearer


@dataclass(frozen=True)
class Candidates:
    """The tokens that matter in a batch, and some others at random, which stand for the rest."""

    some: Tensor  # (n,) places in the vocabulary
    index: Tensor  # (vocabulary,) place among them, or -1
    counted: Tensor  # (n,) logarithm of how many tokens it stands for


def candidates(
    needed: Tensor, size: int, others: int, generator: torch.Generator
) -> Candidates | None:
    """The needed tokens and `others` of the rest. None if that would be nearly all."""
    if len(needed) + others > NEARLY_ALL * size:
        return None
    chosen = torch.zeros(size, dtype=torch.bool, device=needed.device)
    chosen[needed] = True
    rest = (~chosen).nonzero()[:, 0]
    drawn = rest[torch.randperm(len(rest), generator=generator)[:others].to(rest.device)]
    some = torch.cat([needed, drawn])
    index = torch.full((size,), -1, device=some.device)
    index[some] = torch.arange(len(some), device=some.device)
    counted = torch.zeros(len(some), device=some.device)
    counted[len(needed) :] = math.log(len(rest) / max(1, len(drawn)))
    return Candidates(some, index, counted)
