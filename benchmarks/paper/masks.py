"""Half of a matrix's weights set to zero: which ones, by magnitude or by Wanda's criterion.

Wanda ("A Simple and Effective Pruning Approach for Large Language Models", Sun et al., 2023) scores
a weight by |w| times the norm of its input over a calibration text, and compares weights of one
output with each other. By magnitude the weights of a whole product are compared (queries, keys and
values are one product here, and so are gate and up). N:M keeps the N best of every M neighbouring
inputs. No kernel here uses zeros, so masked weights are stored like others. Knows no model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from selfspec.errors import OptionError, nearest

CRITERIA = ("magnitude", "wanda")
PATTERNS = {"unstructured": None, "4:8": 8, "2:4": 4}  # neighbours that are compared


@dataclass(frozen=True)
class Mask:
    """A way to choose the half that stays, as in "wanda 2:4"."""

    criterion: str
    pattern: str

    @classmethod
    def parse(cls, text: str) -> Mask:
        criterion, _, pattern = text.partition(" ")
        for name, known in ((criterion, CRITERIA), (pattern, tuple(PATTERNS))):
            if name not in known:
                raise OptionError(f"there is no mask {text!r}: {name!r}; {nearest(name, known)}")
        return cls(criterion, pattern)

    def __call__(self, weight: Tensor, norms: Tensor | None = None) -> Tensor:
        """weight (outputs, inputs) with the lesser half of it zero. `norms` (inputs,): of the
        inputs, for Wanda."""
        scores = weight.abs()
        if self.criterion == "wanda":
            assert norms is not None, "Wanda's criterion is asked without norms of the inputs"
            scores = scores * norms
        return weight * best_half(scores, self._group(weight)).to(weight.dtype)

    def _group(self, weight: Tensor) -> int:
        """How many weights are compared with each other."""
        neighbours = PATTERNS[self.pattern]
        if neighbours is None:
            return weight.shape[1] if self.criterion == "wanda" else weight.numel()
        if weight.shape[1] % neighbours:
            raise OptionError(
                f"a matrix with {weight.shape[1]} inputs has no whole groups of {neighbours}, so "
                f"it cannot be masked {self.pattern}; take the unstructured mask"
            )
        return neighbours


def best_half(scores: Tensor, group: int) -> Tensor:
    """(outputs, inputs) -> True for the better half of every `group` neighbours; of equal ones the
    first."""
    groups = scores.reshape(-1, group)
    order = groups.argsort(dim=1, descending=True, stable=True)
    best = torch.zeros_like(groups, dtype=torch.bool)
    best.scatter_(1, order[:, : group - group // 2], True)
    return best.view(scores.shape)
