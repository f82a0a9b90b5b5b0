"""Log-probabilities of tokens that were kept, under the model's own logits. Knows no sampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from ..errors import OptionError
from .door import is_whole

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class TokenLogprob:
    """A kept token's log-probability under the model's own logits, and the likeliest tokens'."""

    token: int
    logprob: float
    top: dict[int, float] = field(default_factory=dict)


def logprobs_of(logits: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
    """Log-probabilities of tokens under the model's own logits (n, vocab), and the `top` best."""
    if not is_whole(top) or top < 0:
        raise OptionError(f"logprobs={top!r} is not a count of alternatives: use 0 or more.")
    if not tokens:
        return []
    logprobs = logits.float().log_softmax(-1)
    chosen = logprobs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
    best, indices = logprobs.topk(min(top, logprobs.shape[-1]))
    likeliest = zip(indices.tolist(), best.tolist(), strict=True)
    return [
        TokenLogprob(token, logprob, dict(zip(ids, values, strict=True)))
        for token, logprob, (ids, values) in zip(tokens, chosen, likeliest, strict=True)
    ]
