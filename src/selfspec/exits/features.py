"""What a predictor sees at a layer: logits of a few candidates, and what became of them.

Of the whole head only the candidates' rows are multiplied, those of all texts, or of all paths of a
tree, in one grouped product (model/compute/cpu/own_rows.py). Features are the logits, their softmax
among themselves, and how much that changed since the layer that was looked at before (0 at the
first look). Source: SpecEE (Xu et al., ISCA 2025), section 4.3. "Since the last look" is ours: the
paper takes the layer before, at which a schedule may not have looked. A row's numbers do not depend
on the rows beside it. Does not know who names candidates, or what is made of the features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import OptionError
from ..model.compute.cpu.own_rows import own_rows
from ..model.layered import LayeredModel

PER_CANDIDATE = 3  # features of each: logit, share, change of the share


class CandidateRows:
    """The head's rows of some texts' candidates, gathered once a token.

    `named`: of each text its candidates, the likeliest first, up to `count`. A text with fewer has
    places that are empty: their logit is the row's lowest, their share 0.
    """

    def __init__(self, model: LayeredModel, named: Sequence[Sequence[int]], count: int) -> None:
        need_rows(model)
        self._model, head, device = model, model.head_product, model.device
        filled = [[*some[:count], *[-1] * (count - len(some))] for some in named]
        self.tokens = torch.tensor(filled, device=device)  # (texts, count), -1: none
        self.known = [bool(some) for some in named]
        self._choices = [{*some[:count]} for some in named]
        self.filled = not any(row[-1] < 0 for row in filled)
        """Whether no text has an empty place."""
        self._missing = None if self.filled else self.tokens < 0
        ids = self.tokens.clamp(min=0).flatten()
        self._rows = head.rows(ids).float().view(len(filled), count, -1)
        self._bias = None if head.bias is None else head.bias[ids].float().view(len(filled), count)

    def logits(self, texts: Sequence[int], x: Tensor) -> Tensor:
        """The candidates' logits of some of the texts, (len(texts), count), from the states after
        any layer, one a text."""
        scales = self._model.shape.scales
        logits = own_rows(self._rows, texts, self._normed(x))
        if self._bias is not None:
            logits += self._bias[[*texts]]
        if scales.logits != 1:
            logits *= scales.logits
        if scales.logit_cap:
            logits = scales.logit_cap * torch.tanh(logits / scales.logit_cap)
        if self._missing is None:
            return logits
        return logits.masked_fill(self._missing[texts], -torch.inf)

    def _normed(self, x: Tensor) -> Tensor:
        return self._model.final_norm(self._model.streams(x)).float()

    def names(self, text: int, token: int) -> bool:
        """Whether a token is one of the text's candidates."""
        return token in self._choices[text]


def need_rows(model: LayeredModel) -> None:
    """Raise unless rows of the model's head can be read one by one."""
    model.needs_layers("exits that differ from token to token")
    if not model.head_product.readable:
        raise OptionError(
            f"rows cannot be read out of this model's head (kernel {model.ops.kernel!r}, "
            f"{type(model.head_product).__name__}), so candidates cannot be scored; use our own "
            "kernels (a float32 model on a CPU), or kernel='plain' where its weights are plain"
        )


def shares_of(logits: Tensor, filled: bool = False) -> Tensor:
    """Softmax among the candidates. A text without any has 0 everywhere. `filled`: no place is
    empty, which is quicker."""
    shares = logits.softmax(-1)
    return shares if filled else shares.nan_to_num(0.0)


def features_of(
    logits: Tensor, shares: Tensor, before: Tensor | None, filled: bool = False
) -> Tensor:
    """(..., count) logits, their shares and those of the look before -> (..., 3 * count)."""
    change = torch.zeros_like(shares) if before is None else shares - before
    return torch.cat([logits if filled else _finite(logits), shares, change], -1)


def _finite(logits: Tensor) -> Tensor:
    """Empty places get the lowest logit that is there."""
    empty = logits == -torch.inf
    lowest = logits.masked_fill(empty, torch.inf).amin(-1, keepdim=True)
    lowest = lowest.masked_fill(lowest == torch.inf, 0.0)
    return torch.where(empty, lowest, logits)
