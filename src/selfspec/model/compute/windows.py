"""What a layer sees of the tokens before: all, the last ones, or those of a chunk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import overload

from torch import Tensor


@dataclass(frozen=True)
class Chunks:
    """A window that begins anew every `size` positions: what is seen is a token's own chunk."""

    size: int


Window = int | Chunks
"""What a layer sees of the tokens before: the last ones, itself counted, or those of its chunk."""


@overload
def reach(window: Window, positions: int) -> int: ...
@overload
def reach(window: Window, positions: Tensor) -> Tensor | int: ...
def reach(window: Window, positions: int | Tensor) -> int | Tensor:
    """How many tokens a window holds at a position, itself counted."""
    return positions % window.size + 1 if isinstance(window, Chunks) else window
