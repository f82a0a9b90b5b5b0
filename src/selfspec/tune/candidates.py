"""Ways to draft that can be predicted: a plan of the model or of its copy, drafted as a chain.

A candidate says what its drafts cost in halves, and what `LLM.generate` is to be told to use it.
With the measured parts of a pass and the probe's agreement, tokens a second follow. A way of
drafting whose drafts cannot be probed (guesses from the text, trained parts) is timed instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..model.compute.plan import LayerPlan
from ..model.layered import LayeredModel
from ..profile import Way
from .probe import Agreement
from .rounds import Host
from .steps import Steps

MOST_DRAFTS = 24  # of a round that is predicted


@dataclass(frozen=True)
class Plain:
    """What plain decoding takes here, measured by the candidate's side."""

    context: float
    """Entries that the cache holds in the mean."""
    host: Host
    """What a round takes beside its passes."""
    rows: int = 1
    """Rows that are decoded together."""


@dataclass(frozen=True)
class Prediction:
    """What a candidate is expected to do."""

    tokens: int
    """Drafts a round."""
    gain: float
    """Its speed over plain decoding's."""
    acceptance: float
    """Kept over drafted."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """A chain of drafts by a plan of `model`, a view of the target."""

    model: LayeredModel
    plan: LayerPlan
    draft: str
    draft_options: dict[str, Any]
    steps: Steps
    """What the parts of `model`'s passes cost."""

    def way(self, tokens: int, predicted: float | None = None) -> Way:
        """What `LLM.generate` is told."""
        return Way(self.draft, self.draft_options, "fixed", {"tokens": tokens}, predicted)

    @property
    def halves(self) -> tuple[int, int]:
        """Attention and MLP halves that a draft runs."""
        attention = len(self.plan.attention_layers)
        return attention, len(self.plan.halves) - attention

    @property
    def shared(self) -> int:
        """First layers that drafts run as the model does, so that verification need not."""
        if self.draft == "quantised":
            return 0
        skipped = self.plan.skipped_attention | self.plan.skipped_mlp
        return min(skipped, default=self.plan.stop)

    def round_seconds(self, target: Steps, layers: int, tokens: int, plain: Plain) -> float:
        """Drafting so many tokens and verifying them, in every row."""
        context, rows, host = plain.context, plain.rows, plain.host
        if not tokens:
            return plain_round(target, layers, plain)
        draft = self.steps.pass_seconds(self.halves, rows, 1, context, rows) + host.drafting(rows)
        scored = rows * (tokens + 1)
        seconds = host.round(rows, tokens + 1)
        if self.shared:
            rest = (layers - self.shared,) * 2
            draft += self.steps.fixed * (self.shared < self.plan.stop)  # two stretches, not one
            seconds += target.pass_seconds((self.shared,) * 2, rows, 1, context, 0)
        else:
            rest = (layers, layers)
        seconds += target.pass_seconds(rest, rows, tokens + 1, context, scored)
        return tokens * draft + seconds

    def predicted(
        self, agreement: Agreement, target: Steps, layers: int, plain: Plain
    ) -> Prediction:
        """The best number of drafts, and what it brings."""
        alone = self.round_seconds(target, layers, 0, plain)
        found: list[Prediction] = []
        for tokens in range(1, MOST_DRAFTS + 1):
            kept = agreement.expected(tokens)
            seconds = self.round_seconds(target, layers, tokens, plain)
            found.append(Prediction(tokens, (1 + kept) * alone / seconds, kept / tokens))
        return max(found, key=lambda each: each.gain)


def plain_round(target: Steps, layers: int, plain: Plain, tokens: int = 1) -> float:
    """One round without drafts; or with so many tokens a row, but for the making of the drafts."""
    rows = plain.rows
    passed = target.pass_seconds((layers, layers), rows, tokens, plain.context, rows * tokens)
    return passed + plain.host.round(rows, tokens)


def skipping(
    model: LayeredModel, steps: Steps, attention: Sequence[int], mlp: Sequence[int]
) -> Candidate:
    """Drafts without these halves, but with those whose keys others read."""
    attention = model.shape.free_to_skip(attention)
    options = {"attention": sorted(attention), "mlp": sorted(mlp)}
    plan = LayerPlan.skipping(model.layers, attention, mlp)
    return Candidate(model, plan, "layer-skip", options, steps)


def exiting(model: LayeredModel, steps: Steps, layer: int) -> Candidate:
    """Drafts by the first layers."""
    return Candidate(model, LayerPlan(0, layer), "early-exit", {"layer": layer}, steps)


def copied(copy: LayeredModel, steps: Steps, weights: str) -> Candidate:
    """Drafts by a copy in fewer bits alone."""
    options = {"weights": weights, "first": "none"}
    return Candidate(copy, copy.full_plan, "quantised", options, steps)
