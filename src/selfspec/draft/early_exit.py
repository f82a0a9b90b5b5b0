"""LayerSkip's self-speculative decoding: draft with layers 0 to E - 1 and the model's own norm and head, verify with the rest.

One cache serves both, and the hidden states that left layer E - 1 while drafting are kept, so that verification runs layers E to L - 1 only:
every layer runs exactly once for every token that is kept. Source: LayerSkip, section 4.3 ("KVQ cache").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..contract import Budget, Draft, ExitState
from ..errors import OptionError
from ..model.cache import Place
from ..model.plan import LayerPlan
from .base import Drafter, Drafting, Scene
from .chain import ChainDrafting


@dataclass(frozen=True)
class EarlyExit(Drafter):
    """Draft with the first layers."""

    name: ClassVar[str] = "early-exit"

    layer: int | None = None
    """How many layers draft (E); by default a quarter of the model's."""
    reuse: bool = True
    """Let verification go on from the draft's hidden states; False runs all layers again, for comparison."""
    vocabulary: int = 0
    """Score only that many of the most frequent tokens while drafting; 0 is all of them."""

    def start(self, scene: Scene) -> Drafting:
        layers = scene.model.layers
        layer = max(1, layers // 4) if self.layer is None else self.layer
        if not 0 < layer < layers:
            raise OptionError(f"exit layer {layer} is not inside this model of {layers} layers; choose 1 to {layers - 1}")
        return _Exiting(scene, layer, self.reuse, self.vocabulary)


class _Exiting(ChainDrafting):
    def __init__(self, scene: Scene, layer: int, reuse: bool, vocabulary: int) -> None:
        super().__init__(scene, vocabulary)
        self._plan = LayerPlan(0, layer)
        self._reuse = reuse
        self._states: dict[int, list[Tensor]] = {}

    def propose(self, rows: Sequence[int], texts: Sequence[Sequence[int]], budget: Budget) -> Draft:
        self._states = {row: [] for row in rows}
        return super().propose(rows, texts, budget)

    def hidden(self, tokens: Tensor, place: Place, rows: Sequence[int]) -> Tensor:
        model = self.scene.model
        x = model.run(model.embed(tokens), self._plan, self.scene.cache, place)
        for index, row in enumerate(rows):
            self._states[row].append(x[index : index + 1])
        return x

    def finish(self, tokens: list[list[int]], rows: Sequence[int]) -> Draft:
        if not self._reuse or not any(tokens):
            return Draft(tokens)
        empty = torch.empty(0, self.scene.model.shape.width, dtype=self.scene.model.dtype, device=self.scene.model.device)
        states = [torch.cat(self._states[row]) if self._states[row] else empty for row in rows]
        return Draft(tokens, resume=ExitState(self._plan.stop, states))
