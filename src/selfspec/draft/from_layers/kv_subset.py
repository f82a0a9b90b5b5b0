"""MagicDec: draft with all layers, but let every token see only part of its row's cache. For long
contexts, where reading the cache is what a step costs.

A draft's token sees the first `sink` slots, the last `recent` ones, the drafts before it, and some
blocks of the middle: those whose mean keys are most like the keys of the last tokens that were read
(over all layers and heads; positions stay absolute). Blocks are chosen anew for each draft. A
block's mean is taken once, when it leaves the recent part. Source: MagicDec (StreamingLLM and
SnapKV caches, arXiv 2408.11049). Choosing blocks by mean keys is ours. A row no longer than the
subset drafts nothing: its draft would be the whole model. Verification runs every layer again: from
the first attention on, the draft's states are not the model's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from ...core.contract import Budget, Draft
from ...errors import OptionError
from ...model.compute.cache import TokenLayout
from ...model.compute.windows import Window, reach
from ..base import DraftSession, Target, Texts
from ..chain import ChainSession
from ..stopping import StoppingDrafter

LOOKS = 8  # how many of the last keys say what is looked for


@dataclass(frozen=True)
class KVSubset(StoppingDrafter):
    """Draft with a small part of a long context."""

    name: ClassVar[str] = "kv-subset"

    sink: int = 4
    """How many of the text's first tokens are always seen."""
    recent: int = 256
    """How many of the text's last tokens are always seen, at the least."""
    blocks: int = 4
    """How many blocks between these are seen: those with keys most like the last tokens' keys."""
    block_size: int = 64
    """How many tokens a block has."""
    vocabulary: int = 0
    """Score only token ids below this (often the frequent ones) and the prompt's. 0 scores all."""
    sample: bool = False
    """Under sampling, draw drafts at random and verify them by rejection: the same distribution,
    other tokens for a seed. Prompts then add nothing to a shorter vocabulary."""

    def __post_init__(self) -> None:
        for option, least in (("sink", 0), ("recent", 1), ("blocks", 0), ("block_size", 1)):
            if (value := getattr(self, option)) < least:
                raise OptionError(
                    f"{option}={value} leaves no such part of the cache; use {least} or more"
                )

    @property
    def size(self) -> int:
        """Most tokens that a subset holds. Drafting with it pays in longer contexts only."""
        return self.sink + self.blocks * self.block_size + self.recent + self.block_size - 1

    def start(self, target: Target) -> DraftSession:
        target.model.needs_layers("draft='kv-subset'")
        if target.model.chains_only:
            raise OptionError(
                "draft='kv-subset' drafts with part of the keys, and recurrent layers have none; "
                "draft with 'auto', 'hybrid', 'early-exit', 'layer-skip' or 'quantised'"
            )
        if target.model.shape.kinds:
            raise OptionError(
                "draft='kv-subset' compares the keys of all layers at once, and this model's "
                "layers have heads of different sizes; draft with 'auto', 'hybrid', 'early-exit', "
                "'layer-skip' or 'quantised'"
            )
        return self.stopping(_Subset(target, self), target.model, target.model.layers)


@dataclass(frozen=True)
class _Part(TokenLayout):
    """Its tokens see listed slots beside the first ones. Slots are positions here: windows go by
    slot."""

    def _seen_beside(self, window: Window | None) -> Sequence[Sequence[int]] | None:
        assert self.ancestors is not None
        if window is None:
            return self.ancestors
        starts = [seen[-1] - reach(window, seen[-1]) for seen in self.ancestors]
        return [
            [slot for slot in seen if slot > start]
            for seen, start in zip(self.ancestors, starts, strict=True)
        ]


class _Subset(ChainSession):
    def __init__(self, target: Target, options: KVSubset) -> None:
        super().__init__(target, options.vocabulary, options.sample)
        self._options = options
        # of each row's blocks: (layers, heads, size)
        self._means = defaultdict[int, list[Tensor]](list)
        self._seen: dict[int, tuple[int, ...]] = {}

    def drop(self, row: int) -> None:
        super().drop(row)
        self._means.pop(row, None)

    def propose(self, rows: Sequence[int], texts: Texts, budget: Budget) -> Sequence[Draft]:
        known = [len(text) - 1 for text in texts]
        most = [
            tokens if length > self._options.size else 0
            for tokens, length in zip(budget.tokens, known, strict=True)
        ]
        self._seen = {
            row: self._choose_slots(row, length)
            for row, length, tokens in zip(rows, known, most, strict=True)
            if tokens
        }
        return super().propose(rows, texts, replace(budget, tokens=most))

    def hidden(self, tokens: Tensor, layout: TokenLayout, rows: Sequence[int]) -> Tensor:
        model = self.target.model
        for row, slot in zip(rows, layout.slots.tolist(), strict=True):
            self._seen[row] = (*self._seen[row], slot)  # by this token and every later draft
        stops = torch.full_like(layout.stops, self._options.sink)
        seen = tuple(self._seen[row] for row in rows)
        part = _Part(layout.spans, layout.rows, layout.slots, layout.positions, stops, seen)
        return model.run(model.embed(tokens), model.full_plan, self.target.cache, part)

    def _choose_slots(self, row: int, length: int) -> tuple[int, ...]:
        """The slots that drafts of a row with `length` known tokens see, beside the sink."""
        sink, size = self._options.sink, self._options.block_size
        # whole blocks before the recent part, which begins where they end
        middle = (length - self._options.recent - sink) // size
        means, cache = self._means[row], self.target.cache
        for block in range(len(means), middle):
            first = sink + block * size
            means.append(cache.keys[:, row, :, first : first + size].float().mean(2))
        chosen: Sequence[int] = range(middle)
        if self._options.blocks < middle:  # those most like the last keys
            asked = cache.keys[:, row, :, length - LOOKS : length].float().mean(2)
            likeness = torch.stack([(mean * asked).sum() for mean in means[:middle]])
            chosen = sorted(likeness.topk(self._options.blocks).indices.tolist())
        begins = [sink + block * size for block in chosen]
        slots = [slot for begin in begins for slot in range(begin, begin + size)]
        return (*slots, *range(sink + middle * size, length))
