"""LayerPlan: which halves of which layers run. An immutable value, handed to `run`; never model
state."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property

from ...errors import OptionError
from .memo import Memo


@dataclass(frozen=True)
class LayerPlan(Memo):
    """Layers `start` to `stop - 1`, less the attention and MLP halves that are skipped.

    A skipped half leaves the residual stream as it is. Skipped attention writes nothing to the
    cache, so that layer's length stays behind and a later full pass has to fill it.
    """

    start: int
    stop: int
    skipped_attention: frozenset[int] = frozenset()
    skipped_mlp: frozenset[int] = frozenset()

    @classmethod
    def skipping(
        cls, layers: int, attention: Iterable[int] = (), mlp: Iterable[int] = ()
    ) -> LayerPlan:
        """All of a model of `layers` layers but the named halves."""
        return cls(0, layers, frozenset(attention), frozenset(mlp))

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise OptionError(
                f"a plan of layers {self.start} to {self.stop} (exclusive) runs nothing; ask for "
                f"0 <= start < stop"
            )
        inside = range(self.start, self.stop)
        outside = sorted((self.skipped_attention | self.skipped_mlp) - set(inside))
        if outside:
            raise OptionError(
                f"skipped layer {outside[0]} is outside the plan's layers {self.start} to "
                f"{self.stop - 1}; leave it out of the skip set"
            )
        if not self.halves:
            raise OptionError(
                f"the plan skips every half of layers {self.start} to {self.stop - 1}, so nothing "
                f"would run; keep at least one"
            )

    @cached_property
    def halves(self) -> tuple[tuple[int, bool], ...]:
        """(layer, is_attention) in the order in which they run."""
        return tuple(
            (layer, attention)
            for layer in range(self.start, self.stop)
            for attention, skipped in ((True, self.skipped_attention), (False, self.skipped_mlp))
            if layer not in skipped
        )

    @cached_property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers whose cache this plan reads and writes."""
        return tuple(layer for layer, attention in self.halves if attention)

    def left(self, layers: Collection[int]) -> list[int]:
        """Those of some layers that this plan runs to their end."""
        if not layers:
            return []
        return [layer for layer, attention in self.halves if not attention and layer in layers]

    def check(self, layers: int) -> None:
        """Raise unless the plan fits a model of that many layers."""
        if self.stop > layers:
            raise OptionError(
                f"layer {self.stop - 1} was asked for, but this model has layers 0 to "
                f"{layers - 1}; choose one of those"
            )
