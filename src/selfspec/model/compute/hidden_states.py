"""Taps: what left some layers, kept for a drafter that reads hidden states. Nobody pays for it who
does not ask.

A drafter owns one and the engine hands it to the passes of a generation; between two rounds the
drafter takes what has gathered. Does not know what the states are for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from .cache import TokenLayout


class StateCollector:
    """Hidden states after the named layers, pass by pass."""

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self._passes: list[tuple[TokenLayout, dict[int, Tensor]]] = []

    def put(self, layer: int, layout: TokenLayout, x: Tensor) -> None:
        """Called by a pass after each of the layers: (tokens, width), in the place's order."""
        if not self._passes or self._passes[-1][0] is not layout:
            self._passes.append((layout, {}))
        self._passes[-1][1][layer] = x

    def take(self) -> list[tuple[TokenLayout, Tensor]]:
        """The passes since the last call, (tokens, taps, width) each. One that did not run all the
        layers is left out: a draft's own states may have stood in for the first ones."""
        passes, self._passes = self._passes, []
        return [
            (layout, torch.stack([states[layer] for layer in self.layers], dim=1))
            for layout, states in passes
            if len(states) == len(self.layers)
        ]


def layers_of(collectors: Sequence[StateCollector]) -> list[int]:
    """The layers that anybody asks for, in order."""
    return sorted({layer for each in collectors for layer in each.layers})


def hand_out(
    collectors: Sequence[StateCollector],
    layout: TokenLayout,
    layers: Sequence[int],
    states: Iterable[Tensor],
) -> None:
    """Give what left these layers to those who asked for it."""
    for layer, x in zip(layers, states, strict=True):
        for collector in collectors:
            if layer in collector.layers:
                collector.put(layer, layout, x)
