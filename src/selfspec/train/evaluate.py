"""What each exit of a model is worth on a text: perplexity, and agreement with the whole model.

Exit N is the shared norm and head after the first N layers. Agreement is the share of positions at
which it names the same token as all layers do: the chance that a single greedy draft is kept,
measured on given text. Source: LayerSkip, Table 1 and Fig. 6, 8, 11. One pass through our own
layers serves all exits. Knows no training.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import OptionError
from ..model.compute.plan import LayerPlan
from ..model.layered import LayeredModel
from .data import Blocks

POSITIONS = 128  # of which logits exist at a time


@dataclass(frozen=True)
class ExitScore:
    """One exit: its layers, the mean loss of the next token, and its agreement."""

    layers: int
    loss: float
    agreement: float

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))

    def as_dict(self) -> dict[str, Any]:
        """With the perplexity, for JSON."""
        return {**asdict(self), "perplexity": self.perplexity}


def evaluate_exits(
    model: LayeredModel, blocks: Blocks, exits: Sequence[int] | None = None, most: int = 16
) -> list[ExitScore]:
    """Scores of the exits (numbers of layers, by default all) on at most `most` blocks. The whole
    model's come last."""
    chosen = sorted({*(exits or range(1, model.layers + 1)), model.layers})
    outside = [layer for layer in chosen if not 1 <= layer <= model.layers]
    if outside:
        raise OptionError(
            f"exit layer {outside[0]} is not inside this model of {model.layers} layers; choose 1 "
            f"to {model.layers}"
        )
    losses = dict.fromkeys(chosen, 0.0)
    agreed = dict.fromkeys(chosen, 0)
    positions = 0
    for index in range(min(most, len(blocks))):
        row = blocks[index]
        following, trained = row["labels"][1:], blocks.trained[index][1:]
        if not trained.any():
            continue
        places = trained.nonzero()[:, 0]
        scores = _read(model, row["input_ids"][:-1], following, places, chosen)
        positions += int(trained.sum())
        for layer, (loss, picks) in scores.items():
            losses[layer] += loss
            agreed[layer] += int((picks == scores[model.layers][1]).sum())
    if not positions:
        raise OptionError(
            "the text has no position at which a token is predicted; give longer text"
        )
    return [ExitScore(at, losses[at] / positions, agreed[at] / positions) for at in chosen]


def _read(
    model: LayeredModel, tokens: Tensor, following: Tensor, at: Tensor, exits: Sequence[int]
) -> dict[int, tuple[float, Tensor]]:
    """For each exit the summed loss at the positions `at`, and its choice of token at each."""
    device = model.device
    tokens, following, at = tokens.to(device), following.to(device), at.to(device)
    cache = model.new_cache(1, len(tokens))
    layout = cache.layout([len(tokens)])
    x, start, scores = model.embed(tokens), 0, {}
    for layer in exits:
        x = model.run(x, LayerPlan(start, layer), cache, layout)
        start = layer
        loss, picks = 0.0, []
        for some in at.split(POSITIONS):
            logits = model.head(x[some]).float()
            wanted = following[some]
            loss += float(torch.nn.functional.cross_entropy(logits, wanted, reduction="sum"))
            picks.append(logits.argmax(-1))
        scores[layer] = loss, torch.cat(picks)
    return scores
