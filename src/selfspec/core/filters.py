"""Top-k, top-p and min-p on one row of logits, with the ties of transformers' own, and counts of
tokens for penalties.

Each filter returns the indices to keep, ascending (None: all of them). Not-a-number survives, so
that the sampler can report it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

_SMALL = 4096  # up to this many values a full sort is as cheap as a selection
_FIRST_GUESS = 512  # how many of the likeliest tokens top-p looks at first


def top_k(values: Tensor, k: int, temperature: float) -> tuple[Tensor | None, Tensor]:
    """What top-k keeps after temperature, and its divided values. Ties with the k-th are kept."""
    if k >= values.numel():
        return None, values / temperature
    best, indices = values.topk(k + 1)
    best = best / temperature  # dividing keeps the order, but may make neighbours equal
    if best[k] < best[k - 1]:
        kept, order = indices[:k].sort()
        return kept, best[:k][order]
    scaled = values / temperature
    kept = (~(scaled < best[k - 1])).nonzero().squeeze(-1)
    return kept, scaled[kept]


def top_p(values: Tensor, limit: float) -> Tensor | None:
    """The likeliest tokens whose probability reaches the limit. Of equal ones at its border the
    first are kept, as greedy decoding has it."""
    count = values.numel()
    guess = _FIRST_GUESS
    if count > _SMALL:
        probabilities = values.softmax(-1)
        while guess < count // 4:
            kept = _top_p_among(values, probabilities, guess, limit)
            if kept is not None:
                return kept
            guess *= 8
    descending, order = values.sort(stable=True, descending=True)
    # summed from the least likely, as transformers does
    dropped = int((descending.flip(0).softmax(-1).cumsum(-1)[:-1] <= 1 - limit).sum())
    return None if dropped == 0 else order[: count - dropped].sort().values


def _top_p_among(values: Tensor, probabilities: Tensor, guess: int, limit: float) -> Tensor | None:
    """Top-p among the `guess` likeliest tokens, without sorting all. None if too few."""
    best, indices = values.topk(guess)
    mass = probabilities[indices].cumsum(-1, dtype=torch.float64)
    reached = (1 - mass).to(torch.float32) <= 1 - limit  # no rank above such a one is needed
    needed = int((~reached).sum()) + 1
    if needed >= guess:
        return None
    last = best[needed - 1]
    if best[needed] < last:
        return indices[:needed].sort().values
    above = int((best[:needed] > last).sum())
    tied = (values == last).nonzero().squeeze(-1)[: needed - above]
    return torch.cat([indices[:above], tied]).sort().values


def min_p(values: Tensor, share: float) -> Tensor:
    """The tokens whose probability is at least this share of the likeliest one's."""
    probabilities = values.softmax(-1)
    return (~(probabilities < share * probabilities.amax())).nonzero().squeeze(-1)


def counted(ids: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    """The different ids and how often each occurs. Some may be rows of the embedding only, which
    the head cannot produce: they are left out."""
    seen, counts = torch.unique(ids[ids < vocabulary], return_counts=True)
    return seen, counts
