"""Trained successors: what the model tends to say after a token, after a pair of tokens and after
three of them, counted over text that it wrote.

A part of kind "successors" holds, for each context, the likeliest next tokens with their mean
probability there. They are looked up, so a draft from them costs no pass. `train/successors.py`
counts them. Knows no text of its own.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Sequence
from functools import cache, cached_property, lru_cache

import torch
from torch import Tensor

from ..model.layered import LayeredModel
from .files import TrainedPart, find_part, shipped_part
from .kinds import CONTEXTS

SUCCESSORS = "successors"
# Beside other sources (`draft/voting.py`): how many times likelier a chance makes a token, as a
# factor and a power of its odds; after several tokens, and after one.
VOTES = (13.0, 0.69), (2.0, 0.24)
SUREST = 0.98
RECENT = 8192  # contexts whose votes are kept, of about a kilobyte each
Chances = Sequence[tuple[int, float]]  # tokens, the likeliest first, each with its chance


class Successors:
    """Contexts of one, two and maybe three tokens, each with its successors."""

    def __init__(self, part: TrainedPart) -> None:
        self.vocabulary = int(part.settings["vocabulary"])
        self._sizes = {
            size: _Sorted(part, name)
            for size, name in enumerate(CONTEXTS, 1)
            if f"{name}.keys" in part.tensors
        }
        self._votes = lru_cache(RECENT)(self._voted)

    @cached_property
    def counted(self) -> Sequence[tuple[Tensor, Tensor, Tensor]]:
        """All of it as kernels read it, by the size of contexts: sorted keys, their tokens, these
        ones' chances (`Counted` of lookups.py)."""
        nothing = torch.empty(0, 0)
        none = nothing.long(), nothing.int(), nothing
        sizes = (self._sizes.get(size) for size in range(1, len(CONTEXTS) + 1))
        return [none if found is None else found.tensors() for found in sizes]

    def after(self, context: Sequence[int]) -> Chances:
        """Those of a context of one to three tokens. Empty for one that was not counted."""
        found = self._sizes.get(len(context))
        if found is None:
            return ()
        key = 0
        for token in context:
            key = key * self.vocabulary + token
        return found.find(key)

    def longest(self, context: Sequence[int], least: int = 1) -> Chances:
        """Those of the longest end of a context that was counted, of so many tokens at least."""
        sizes = range(min(len(CONTEXTS), len(context)), least - 1, -1)
        return next((found for size in sizes if (found := self.after(context[-size:]))), ())

    def votes(self, context: Sequence[int]) -> Sequence[tuple[int, float]]:
        """Beside other sources: how many times likelier the longest context that was counted makes
        tokens, and its last token alone."""
        return self._votes(tuple(context[-len(CONTEXTS) :]))

    def _voted(self, context: tuple[int, ...]) -> Sequence[tuple[int, float]]:
        said = zip((self.longest(context, 2), self.after(context[-1:])), VOTES, strict=True)
        return tuple(
            (token, factor * (chance / (1 - min(chance, SUREST))) ** power)
            for found, (factor, power) in said
            for token, chance in found
        )


class _Sorted:
    """Contexts as sorted numbers, beside their successors. A row becomes plain tuples when it is
    first asked for."""

    def __init__(self, part: TrainedPart, name: str) -> None:
        names = (f"{name}.{what}" for what in ("keys", "successors", "chances"))
        keys, tokens, chances = self._held = [part.tensors[each] for each in names]
        self._keys = keys.numpy().data  # far quicker to look one up in than an array
        self._tokens = tokens.numpy()
        # numpy has no bfloat16
        self._chances = (chances.float() if chances.dtype is torch.bfloat16 else chances).numpy()
        self.find = cache(self._look_up)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        keys, tokens, chances = (each.contiguous() for each in self._held)
        if tokens.dtype is torch.uint16 and chances.dtype is torch.float16:
            return keys, tokens, chances
        return keys, tokens.int(), chances.float()

    def _look_up(self, key: int) -> Chances:
        at = bisect_left(self._keys, key)
        if at == len(self._keys) or self._keys[at] != key:
            return ()
        pairs = zip(self._tokens[at].tolist(), self._chances[at].tolist(), strict=True)
        return tuple([pair for pair in pairs if pair[1] > 0])


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
