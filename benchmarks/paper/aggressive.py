"""Which halves to leave out when most of the attention is to go: Draft & Verify's Appendix F leaves
out three quarters of the attention and a third of the MLP halves.

So much is left out that hardly a draft is kept before training, so drafts kept say nothing. Halves
are judged by how likely the model's own text stays without them: one after another goes, each time
the one that costs least, until both counts are reached. Then each is exchanged for one that stayed,
if that is better. Knows no training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from selfspec.model.compute.plan import LayerPlan
from selfspec.model.layered import LayeredModel
from selfspec.tune.probe import Text
from selfspec.tune.search import Halves, split

ATTENTION, MLP = 0.75, 0.325  # of the layers: the paper's 30 and 13 of 40
WIDTH = 4  # halves that are looked at before one goes
EXCHANGES = 12


def counts(layers: int) -> tuple[int, int]:
    """Attention and MLP halves to leave out."""
    return min(layers - 1, round(ATTENTION * layers)), max(1, round(MLP * layers))


class Surprise:
    """How unlikely the model's own text becomes without some halves: nats a token, in the mean."""

    def __init__(self, model: LayeredModel, texts: Sequence[Text]) -> None:
        self._model, self._texts = model, texts
        self._known: dict[Halves, float] = {}

    def __call__(self, halves: Halves) -> float:
        if halves not in self._known:
            plan = LayerPlan.skipping(self._model.layers, *split(halves, self._model.layers))
            found = torch.cat([self._of(plan, text) for text in self._texts])
            self._known[halves] = float(found.mean())
        return self._known[halves]

    @torch.inference_mode()
    def _of(self, plan: LayerPlan, text: Text) -> torch.Tensor:
        model, ids = self._model, torch.tensor(list(text.ids), device=self._model.device)
        cache = model.new_cache(1, len(ids))
        x = model.run(model.embed(ids[:-1]), plan, cache, cache.layout([len(ids) - 1]))
        logs = model.head(x[text.prompt - 1 :]).float().log_softmax(-1)
        return -logs.gather(1, ids[text.prompt :, None])[:, 0]


def aggressive(
    layers: int, surprise: Callable[[Halves], float], say: Callable[[str], None]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The layers whose attention and whose MLP are left out."""
    most = counts(layers)
    alone = {half: surprise(frozenset({half})) for half in range(2 * layers)}
    gone: Halves = frozenset()
    while len(gone) < sum(most):
        room = [count - len(part) for count, part in zip(most, split(gone, layers), strict=True)]
        left = [half for half in alone if half not in gone and room[half >= layers]]
        offers = sorted(left, key=alone.__getitem__)[:WIDTH]
        gone = min((gone | {half} for half in offers), key=surprise)
        say(f"{len(gone)} of {sum(most)} halves left out, {surprise(gone):.2f} nats a token")
    return split(_exchanged(layers, gone, alone, surprise), layers)


def _exchanged(
    layers: int, gone: Halves, alone: dict[int, float], surprise: Callable[[Halves], float]
) -> Halves:
    """Halves that cost most alone come back, for one of their kind that costs least."""
    for half in sorted(gone, key=lambda half: -alone[half])[:EXCHANGES]:
        others = [
            other for other in alone if other not in gone and (other >= layers) == (half >= layers)
        ]
        offers = [gone - {half} | {other} for other in sorted(others, key=alone.__getitem__)[:2]]
        gone = min([gone, *offers], key=surprise)
    return gone
