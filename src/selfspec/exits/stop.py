"""Predictors as a stop rule: a draft ends where the model would probably say something else.

What a draft's layers leave has logits. The likeliest of them are the candidates, the draft's best
token among them, and the predictor of the deepest layer that the draft comes to says whether the
answer is there. The token of which it says no is kept and verified, as with any stop rule. Does not
know who drafts.
"""

from __future__ import annotations

import math

from torch import Tensor
from torch.nn.functional import pad

from ..errors import OptionError
from .features import features_of, shares_of
from .part import Predictors
from .rules import need_share


class StopRule:
    """For drafts that come so many layers deep. `sure`: the chance that lets a draft go on."""

    def __init__(self, found: Predictors, layers: int, sure: float) -> None:
        need_share("sure", sure)
        before = [layer for layer in found.layers if layer <= layers]
        if not before:
            raise OptionError(
                f"sure={sure}: this draft runs {layers} layers, and the first predictor stands "
                f"after {found.layers[0]}; draft deeper, leave it out, or fit others: selfspec "
                f"fit-exits MODEL --first {layers}"
            )
        self.layer = before[-1]
        self._found, self._least = found, math.log(sure / (1 - sure))

    def goes_on(self, logits: Tensor) -> list[bool]:
        """Of each draft, whether its best token is probably the model's. (drafts, scored)"""
        lacking = max(0, self._found.count - logits.shape[1])
        best = logits.float().topk(self._found.count - lacking).values
        best = pad(best, (0, lacking), value=-math.inf)
        features = features_of(best, shares_of(best), None, not lacking)
        found: list[bool] = (self._found.score(self.layer, features) >= self._least).tolist()
        return found
