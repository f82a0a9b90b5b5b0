"""LayerSkip: draft with layers 0 to E - 1 and the model's own norm and head, verify with the rest.

One cache serves both. The hidden states that left layer E - 1 while drafting are kept, so that
verification runs layers E to L - 1 only: every layer runs once for every token that is kept.
Source: LayerSkip, section 4.3 ("KVQ cache"). A model that was not trained for it can be given an
exit adapter (ours): small trained blocks between layer E - 1 and the norm, with their own cache.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...core.contract import Budget, Draft
from ...errors import OptionError
from ...model.compute.cache import RowSpan, TokenLayout
from ...model.compute.plan import LayerPlan
from ...model.layered import LayeredModel
from ...trained.blocks import BlockSize, Stack
from ...trained.files import TrainedPart, find_part, partial_head_of, ready
from ..base import DraftSession, Target, Texts
from ..chain import LayerSession
from ..copied import plan_session, refuse_copy
from ..entries import EntriesSession
from ..stopping import StoppingDrafter


@dataclass(frozen=True)
class EarlyExit(StoppingDrafter):
    """Draft with the first layers."""

    name: ClassVar[str] = "early-exit"
    likely: ClassVar[float] = 0.2  # few models are trained for it, others' layers are seldom right

    layer: int | None = None
    """How many of the first layers draft (E). None is a quarter of them, or what the part says."""
    reuse: bool = True
    """Verify from the draft's hidden states on. False runs all layers again, for comparison."""
    vocabulary: int = 0
    """Score only token ids below this (often the frequent ones) and the prompt's tokens. 0 scores
    all, or the part's own vocabulary."""
    tokens: tuple[int, ...] = ()
    """Score only these token ids (a task's own words), the prompt's tokens and those of
    `vocabulary`. () sets no such limit."""
    sample: bool = False
    """Under sampling, draw drafts at random and verify them by rejection: the same distribution,
    other tokens for a seed. Prompts then add nothing to a shorter vocabulary."""
    part: str | os.PathLike[str] | TrainedPart | None = None
    """Folder of an exit adapter trained for this model. None exits as the model is."""
    weights: str | None = None
    """Draft with the first layers of a copy in fewer bits: int8, int4, or auto as `quantised` has
    it. Then no states are reused. None drafts with the model's own weights."""

    def start(self, target: Target) -> DraftSession:
        target.model.needs_layers("draft='early-exit'")
        layers = target.model.layers
        if self.part is not None:
            refuse_copy(self.weights)
            part = find_part(self.part, "exit-adapter", target.model)
            return self.stopping(self._adapted(target, part), target.model, part.settings["exit"])
        layer = max(1, layers // 4) if self.layer is None else self.layer
        if not 0 < layer < layers:
            raise OptionError(
                f"exit layer {layer} is not inside this model of {layers} layers; choose 1 to "
                f"{layers - 1}"
            )
        session = plan_session(
            target, LayerPlan(0, layer), self.weights,
            self.vocabulary, self.reuse, self.sample, self.tokens,
        )  # fmt: skip
        return self.stopping(session, target.model, layer)

    def _adapted(self, target: Target, part: TrainedPart) -> _Adapted:
        layer = part.settings["exit"]
        if self.layer not in (None, layer) or self.vocabulary or self.tokens:
            raise OptionError(
                f"layer={self.layer}, vocabulary={self.vocabulary}, tokens={self.tokens}: the part "
                f"was trained for an exit after {layer} layers and with a vocabulary of its own; "
                "leave them out"
            )
        return _Adapted(target, layer, ready(part, target.model, _Adapter), self.reuse, self.sample)


class _Adapter:
    """A part's weights, ready to run."""

    def __init__(self, part: TrainedPart, model: LayeredModel) -> None:
        size = BlockSize(**part.settings["block"])
        self.stack = Stack(size, part.tensors, part.settings["blocks"], model)
        self.rows = partial_head_of(part, model)
        enter = part.tensors["enter.weight"].to(model.device, model.dtype)
        self._enter = self.stack.ops.linear([enter], [None])

    def enter(self, x: Tensor) -> Tensor:
        """States of the last layer before the adapter, (tokens, width), as its blocks want them."""
        return self._enter(self.stack.unit(x))


class _Adapted(EntriesSession, LayerSession):
    def __init__(
        self, target: Target, layer: int, adapter: _Adapter, reuse: bool, sample: bool
    ) -> None:
        super().__init__(target, LayerPlan(0, layer), adapter.rows, reuse, sample)
        self._adapter = adapter
        self.use_entries([layer - 1], adapter.stack.new_cache(target.cache.rows, 1))

    def propose(self, rows: Sequence[int], texts: Texts, budget: Budget) -> Sequence[Draft]:
        self._entries.gather()
        for spans, states in self._entries.unread(rows):
            self._adapt(states[:, 0], spans)
        return super().propose(rows, texts, self._entries.allow(rows, texts, budget))

    def hidden(self, tokens: Tensor, layout: TokenLayout, rows: Sequence[int]) -> Tensor:
        entries = self._entries
        spans = [RowSpan(s.row, s.first - entries[s.row].first, 1) for s in layout.spans]
        return self._adapt(super().hidden(tokens, layout, rows), spans)

    def _adapt(self, x: Tensor, spans: Sequence[RowSpan]) -> Tensor:
        adapter, cache = self._adapter, self._entries.cache
        with torch.inference_mode():
            entered = adapter.enter(self.target.model.states(x))
            return adapter.stack.run(entered, cache, cache.layout_at(spans))
