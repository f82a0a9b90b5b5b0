"""Adaptive self-speculation by cosine similarity (ASD): each prompt chooses what is skipped.

While the prompt is read, the residual stream before and after each attention half is compared. ACS
is the average over positions of their cosine similarity. Skipped are attention halves with ACS >=
threshold, and of every n-th layer both halves (rule 1), but nothing of the last m layers (rule 2).
Source: "Draft on the Fly", section 3, Algorithm 1 and Table 2. "Every n-th" counts from 1, as in
its remark that n > 2 preserves the first layers. It costs no extra pass, but sees only what the
prefill reads: after a cached chat turn the new tokens. Rows of one batch share a draft, chosen by
the average over all their positions. Does not know when to stop drafting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from ...core.contract import Budget, Draft
from ...errors import OptionError
from ...model.compute.plan import LayerPlan
from ..base import DraftSession, Target, Texts
from ..chain import LayerSession
from ..stopping import StoppingDrafter


@dataclass(frozen=True)
class Cosine(StoppingDrafter):
    """Skip what changes this prompt's hidden states least."""

    name: ClassVar[str] = "cosine"

    threshold: float = 0.985
    """Skip attention halves whose input and output have at least this cosine, averaged over the
    prompt's tokens. Above 1 skips none by similarity."""
    every: int = 3
    """Skip both halves of every n-th layer (n), 2 or more; 0 skips none by this rule."""
    keep_last: int = 2
    """Never skip anything of this many last layers (m)."""
    reuse: bool = True
    """Verify from the draft's states before the first skip. False runs all layers, to compare."""
    vocabulary: int = 0
    """Score only token ids below this (often the frequent ones) and the prompt's. 0 scores all."""
    sample: bool = False
    """Under sampling, draw drafts at random and verify them by rejection: the same distribution,
    other tokens for a seed. Prompts then add nothing to a shorter vocabulary."""

    def __post_init__(self) -> None:
        if not self.threshold >= -1:
            raise OptionError(
                f"threshold={self.threshold} is below any cosine; use -1 to 1, or more to skip "
                "nothing by similarity"
            )
        if self.every < 0 or self.every == 1:
            raise OptionError(
                f"every={self.every} would skip all layers or means nothing; use 2 or more, or 0 "
                "for no such rule"
            )
        if self.keep_last < 0:
            raise OptionError(
                f"keep_last={self.keep_last} is negative; use 0 (any layer may be skipped) or more"
            )

    def start(self, target: Target) -> DraftSession:
        target.model.needs_layers("draft='cosine'")
        layers = target.model.layers
        if self.keep_last >= layers:
            raise OptionError(
                f"keep_last={self.keep_last} keeps all {layers} layers of this model, so nothing "
                "is skipped; use less"
            )
        return self.stopping(CosineDrafting(target, self), target.model, layers)

    def choose(self, cosines: Sequence[float]) -> tuple[frozenset[int], frozenset[int]]:
        """From each layer's cosine: the layers whose attention and those whose MLP are left out."""
        layers = range(len(cosines) - self.keep_last)
        nth = frozenset(layer for layer in layers if self.every and (layer + 1) % self.every == 0)
        return nth | {layer for layer in layers if cosines[layer] >= self.threshold}, nth


class CosineDrafting(LayerSession):
    """Watches the prefill, then drafts with what it chose, which `cosines` and `plan` say."""

    def __init__(self, target: Target, options: Cosine) -> None:
        super().__init__(target, None, options.vocabulary, options.reuse, options.sample)
        self._options = options
        # on the model's device: nothing is read back while prompts are read
        self._sums: dict[int, Tensor] = {}
        self._positions = [0] * target.model.layers
        self._chosen_at = 0  # positions that had been seen when the draft was chosen
        self.cosines: list[float] | None = None

    def observer(self, layer: int, attention: bool, before: Tensor, after: Tensor) -> None:
        """Shown the residual stream, (tokens, width), around every half of the prefill."""
        if not attention:
            return
        similarity = F.cosine_similarity(before.float(), after.float(), dim=-1).sum()
        self._sums[layer] = self._sums[layer] + similarity if layer in self._sums else similarity
        self._positions[layer] += len(before)

    def propose(self, rows: Sequence[int], texts: Texts, budget: Budget) -> Sequence[Draft]:
        if self.cosines is None or sum(self._positions) > self._chosen_at:
            self._chosen_at = sum(self._positions)
            # a layer that was not watched counts as changing everything: only rule 1 can skip it
            self.cosines = [
                float(self._sums[layer]) / count if count else float("-inf")
                for layer, count in enumerate(self._positions)
            ]
            chosen, mlp = self._options.choose(self.cosines)
            attention = frozenset(self.target.model.shape.free_to_skip(chosen))
            whole = not (attention or mlp)  # which is no draft
            self.use(None if whole else LayerPlan.skipping(len(self.cosines), attention, mlp))
        return super().propose(rows, texts, budget)
