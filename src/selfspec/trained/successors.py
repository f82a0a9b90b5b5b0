"""Trained successors: what the model tends to say after a token, and after a pair of tokens,
counted over text that it wrote.

A part of kind "successors" holds, for each context, the likeliest next tokens with their mean
probability there. They are looked up, so a draft from them costs no pass. `train/successors.py`
counts them. Knows no text of its own.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache

import numpy as np
import torch

from ..model.layered import LayeredModel
from .files import TrainedPart, find_part, shipped_part

SUCCESSORS = "successors"
Chances = Sequence[tuple[int, float]]  # tokens, the likeliest first, each with its chance


class Successors:
    """Contexts of one and of two tokens, each with its successors."""

    def __init__(self, part: TrainedPart) -> None:
        self._vocabulary = int(part.settings["vocabulary"])
        self._sizes = {size: _Sorted(part, name) for size, name in ((1, "tokens"), (2, "pairs"))}

    def after(self, context: Sequence[int]) -> Chances:
        """Those of a context of one or two tokens. Empty for a context that was not counted."""
        key = context[0] if len(context) == 1 else context[0] * self._vocabulary + context[1]
        return self._sizes[len(context)].find(key)


class _Sorted:
    """Contexts as sorted numbers, beside their successors. A row becomes plain tuples when it is
    first asked for."""

    def __init__(self, part: TrainedPart, name: str) -> None:
        keys, tokens, chances = (
            part.tensors[f"{name}.{what}"] for what in ("keys", "successors", "chances")
        )
        self._keys, self._tokens = keys.numpy(), tokens.numpy()
        # numpy has no bfloat16
        self._chances = (chances.float() if chances.dtype is torch.bfloat16 else chances).numpy()
        self.find = cache(self._look_up)

    def _look_up(self, key: int) -> Chances:
        at = int(np.searchsorted(self._keys, key))
        if at == len(self._keys) or self._keys[at] != key:
            return ()
        pairs = zip(self._tokens[at].tolist(), self._chances[at].tolist(), strict=True)
        return tuple((int(token), float(chance)) for token, chance in pairs if chance > 0)


def trained_successors(
    source: str | os.PathLike[str] | TrainedPart | None, model: LayeredModel
) -> Successors | None:
    """The successors of a part, by folder or name. None: the part that comes with selfspec for this
    model, if any. "none": no part."""
    if isinstance(source, str) and source == "none":
        return None
    part = (
        shipped_part(SUCCESSORS, model) if source is None else find_part(source, SUCCESSORS, model)
    )
    return None if part is None else model.once((Successors, part), lambda: Successors(part))
