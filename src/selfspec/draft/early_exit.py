"""LayerSkip's self-speculative decoding: draft with layers 0 to E - 1 and the model's own norm and head, verify with the rest.

One cache serves both, and the hidden states that left layer E - 1 while drafting are kept, so that verification runs layers E
to L - 1 only: every layer runs exactly once for every token that is kept. Source: LayerSkip, section 4.3 ("KVQ cache").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..errors import OptionError
from ..model.plan import LayerPlan
from .base import Drafter, Drafting, Scene
from .chain import PartDrafting


@dataclass(frozen=True)
class EarlyExit(Drafter):
    """Draft with the first layers."""

    name: ClassVar[str] = "early-exit"

    layer: int | None = None
    """How many layers draft (E); by default a quarter of the model's."""
    reuse: bool = True
    """Let verification go on from the draft's hidden states; False runs all layers again, for comparison."""
    vocabulary: int = 0
    """Score only that many of the most frequent tokens, and the prompt's, while drafting; 0 is all of them."""
    tokens: tuple[int, ...] = ()
    """Score these tokens, by id, the prompt's and those of `vocabulary`, and no others: a task's own words. () is no list."""
    sample: bool = False
    """Under sampling, draw drafts at random and verify them by rejection: the same distribution, other tokens for a seed."""

    def start(self, scene: Scene) -> Drafting:
        layers = scene.model.layers
        layer = max(1, layers // 4) if self.layer is None else self.layer
        if not 0 < layer < layers:
            raise OptionError(f"exit layer {layer} is not inside this model of {layers} layers; choose 1 to {layers - 1}")
        return PartDrafting(scene, LayerPlan(0, layer), self.vocabulary, self.reuse, self.sample, self.tokens)
