"""What a pass is given beside hidden states. A value, handed on until something runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from .cache import KVCache, TokenLayout
from .plan import LayerPlan

HalfObserver = Callable[[int, bool, Tensor, Tensor], None]
"""observer(layer, is_attention, before, after): the stream (tokens, width) around a half."""


@dataclass(frozen=True)
class Call:
    """Which halves run, on what cache, and who looks on."""

    plan: LayerPlan
    cache: KVCache
    layout: TokenLayout
    collected: Sequence[int] = ()
    """The layers whose states are wanted too, in order."""
    observer: HalfObserver | None = None
    of_tokens: Tensor | None = None
    """What layers read of the tokens themselves, (tokens, columns of all layers)."""


Layers = Callable[[Tensor, Call], tuple[Tensor, ...]]
"""What runs a call: what comes out of the plan's halves, then what left each collected layer."""
