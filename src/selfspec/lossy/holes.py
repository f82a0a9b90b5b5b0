"""The published cache: a token that left early has no keys and values in the layers it skipped,
and later tokens attend to those that are there. Kept to be compared with.

Slots stay where they are, so positions are right. What a layer lacks is left out of what its
queries see.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..exits.stairs import Stairs
from ..model.compute.cache import KVCache, RowSpan, TokenLayout
from ..model.compute.plan import LayerPlan
from ..model.layered import LayeredModel
from ..model.stretch import run_stretch


@dataclass
class _Reached:
    """Of a row's slots from `first` on: how many layers each went through."""

    first: int
    layers: list[int] = field(default_factory=list)


class StairsWithHoles(Stairs):
    """Nobody is caught up with. A row's stair holds its newest token only."""

    def __init__(self, model: LayeredModel, cache: KVCache, taps: Sequence[int] = ()) -> None:
        super().__init__(model, cache, taps)
        self._reached: dict[int, _Reached] = {}

    def begin(self, row: int, first: int) -> None:
        super().begin(row, first)
        self._reached.setdefault(row, _Reached(first))

    def drop(self, row: int) -> None:
        super().drop(row)
        self._reached.pop(row, None)

    def climb(self, rows: Sequence[int], start: int, stop: int) -> Tensor:
        """Layers with the same holes are one stretch."""
        cuts = {
            layer for row in rows for layer in self._reached[row].layers if start < layer < stop
        }
        x = torch.cat([self[row].states[-1] for row in rows])
        for cut in sorted({*cuts, stop}):
            layout = self._layout(rows, cut)
            plan = LayerPlan(start, cut)
            x, left = run_stretch(self._model, x, plan, self._cache, layout, self._taps)
            for layer, states in left.items():
                for row, state in zip(rows, states.split(1), strict=True):
                    self[row].below[-1][layer] = state
            start = cut
        for row, state in zip(rows, x.split(1), strict=True):
            self[row].states[-1], self[row].layers[-1] = state, stop
        return x

    def _layout(self, rows: Sequence[int], stop: int) -> TokenLayout:
        """Each row's newest token, which sees the prompt and those that went as deep."""
        slots = [self._reached[row].first + len(self._reached[row].layers) for row in rows]
        firsts, seen = list[int](), list[tuple[int, ...]]()
        for row, slot in zip(rows, slots, strict=True):
            reached = self._reached[row]
            deep = (at for at, layers in enumerate(reached.layers) if layers >= stop)
            firsts.append(reached.first)
            seen.append((*(reached.first + at for at in deep), slot))
        self._cache.reserve(max(slots) + 1)
        row_ids, slot_ids, stops = torch.tensor([list(rows), slots, firsts]).unbind()
        spans = tuple(RowSpan(row, slot, 1) for row, slot in zip(rows, slots, strict=True))
        return TokenLayout(spans, row_ids, slot_ids, slot_ids, stops, tuple(seen))

    def leave(self, row: int, layer: int) -> None:
        """The newest token left there. The layers that it skipped pass it over."""
        reached = self._reached[row]
        slot = reached.first + len(reached.layers)
        reached.layers.append(layer)
        self._cache.pass_over(row, slot + 1, range(layer, self._model.layers))
