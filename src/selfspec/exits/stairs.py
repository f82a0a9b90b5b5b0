"""Tokens of one text that stand at different layers, the earlier ones never less deep.

A token may leave the layers where it likes. Before a later one goes deeper, those that left at its
layer go on beside it, in the same call: its attention needs their keys and values, and the weights
are read once for all. So what a layer holds never has a gap, no layer is run twice for a token, and
all of them may go on from where they stand. Does not know why a token leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..core.contract import ExitStates
from ..model.compute.cache import KVCache, RowSpan
from ..model.compute.plan import LayerPlan
from ..model.layered import LayeredModel
from ..model.stretch import run_stretch


@dataclass
class Stair:
    """One row's tokens from slot `first` on."""

    first: int
    layers: list[int] = field(default_factory=list)
    """How many layers each has run."""
    states: list[Tensor] = field(default_factory=list)
    """What left its last one, (1, width) each."""
    below: list[dict[int, Tensor]] = field(default_factory=list)
    """What left those layers that somebody asked for, (1, width) each."""

    @property
    def exits(self) -> ExitStates | None:
        """From where verification may go on; None if no layer was run."""
        ran = sum(layer > 0 for layer in self.layers)
        if not ran:
            return None
        below = {}
        for layer in sorted({layer for each in self.below[:ran] for layer in each}):
            nothing = torch.zeros_like(next(e[layer] for e in self.below[:ran] if layer in e))
            below[layer] = torch.cat([each.get(layer, nothing) for each in self.below[:ran]])
        return ExitStates(self.layers[:ran], torch.cat(self.states[:ran]), below=below)

    def forget_done(self, layers: int) -> None:
        """Let go of the first tokens that have run all of so many layers."""
        done = sum(layer == layers for layer in self.layers)
        self.first += done
        del self.layers[:done], self.states[:done], self.below[:done]


class Stairs:
    """The stairs of some rows, on one cache. `taps`: layers whose states are handed on."""

    def __init__(self, model: LayeredModel, cache: KVCache, taps: Sequence[int] = ()) -> None:
        self._model, self._cache, self._taps = model, cache, taps
        self._rows: dict[int, Stair] = {}

    def __getitem__(self, row: int) -> Stair:
        return self._rows[row]

    def __contains__(self, row: int) -> bool:
        return row in self._rows

    def begin(self, row: int, first: int) -> None:
        """A row's stair has no token yet; the next one's slot is `first`."""
        self._rows[row] = Stair(first)

    def drop(self, row: int) -> None:
        self._rows.pop(row, None)

    def step_on(self, rows: Sequence[int], x: Tensor) -> None:
        """Another token of each of these rows, by its embedding."""
        for row, state in zip(rows, x.split(1), strict=True):
            self._rows[row].layers.append(0)
            self._rows[row].states.append(state)
            self._rows[row].below.append({})

    def climb(self, rows: Sequence[int], start: int, stop: int) -> Tensor:
        """Carry the last token of each row from layer `start` on to `stop`, and beside it every
        token that it catches up with. Gives the last tokens' states, (rows, width)."""
        between = {
            layer for row in rows for layer in self._rows[row].layers if start < layer < stop
        }
        for cut in sorted({*between, stop}):
            self._run(rows, start, cut)
            start = cut
        return torch.cat([self._rows[row].states[-1] for row in rows])

    def _run(self, rows: Sequence[int], start: int, stop: int) -> None:
        spans, states = [], list[Tensor]()
        for row in rows:
            stair = self._rows[row]
            here = stair.layers.index(start)
            spans.append(RowSpan(row, stair.first + here, len(stair.layers) - here))
            states += stair.states[here:]
        x = states[0] if len(states) == 1 else torch.cat(states)
        layout = self._cache.layout_at(spans)
        plan = LayerPlan(start, stop)
        x, left = run_stretch(self._model, x, plan, self._cache, layout, self._taps)
        for span, piece in layout.pieces:
            stair = self._rows[span.row]
            stair.layers[-span.count :] = [stop] * span.count
            stair.states[-span.count :] = x[piece].split(1)
            for layer, of_all in left.items():
                own = of_all[piece].split(1)
                for below, state in zip(stair.below[-span.count :], own, strict=True):
                    below[layer] = state
