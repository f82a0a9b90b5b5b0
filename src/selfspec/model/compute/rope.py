"""Rotary tables: cosine and sine by position, taken from the model's own rotary module, so that
every scaling is HF's own.

Computed in fixed chunks of positions: an entry is the same whenever and for whichever request it
was first needed.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .memo import Memo

CHUNK = 1024


@dataclass(frozen=True, eq=False)
class Angles(Memo):
    """Tables of one length, (positions, rotary / 2) float32 each."""

    cosines: Tensor
    sines: Tensor

    @property
    def rotary(self) -> int:
        return 2 * self.cosines.shape[1]


class RopeTable:
    """`cosines` and `sines` by position, grown by `reserve`, never beyond `context`.

    The limit matters: "dynamic" scaling changes its frequencies when it is asked for more, and a
    model inside its context must not notice. Beyond it such a model depends on how its text was cut
    into calls, so we do not go there. "longrope" does the same at the length of its pretraining,
    which is why such a model's context ends there (families.py), unless it is loaded for long
    texts.

    `beyond`: a position past that length, of which the module is told too, so that all positions
    turn by the frequencies of long texts. `kind`: which of the module's tables, where layers of
    different kinds rotate differently; "" where it has but one. `interleaved`: the module may
    repeat each angle for neighbours, not for the two halves of a head.
    """

    def __init__(
        self,
        module: nn.Module,
        context: int,
        device: torch.device,
        kind: str = "",
        interleaved: bool = False,
        beyond: int | None = None,
    ) -> None:
        self._module = module
        self._context = context
        self._device = device
        self._kind = (kind,) if kind else ()
        self._interleaved = interleaved
        self._beyond = [] if beyond is None else [beyond]
        self._lock = threading.Lock()
        self._reserved = 0  # positions that are known to be there
        self.tables = self._chunk(0)
        """As they are now. Another thread may let them grow, so whoever needs both takes this."""

    @property
    def cosines(self) -> Tensor:
        return self.tables.cosines

    @property
    def sines(self) -> Tensor:
        return self.tables.sines

    @property
    def rotary(self) -> int:
        """How many numbers of a head are rotated."""
        return self.tables.rotary

    def reserve(self, positions: int) -> None:
        if positions <= self._reserved:
            return
        with self._lock:
            while len(self.cosines) < min(positions, self._context):
                more = self._chunk(len(self.cosines))
                self.tables = Angles(
                    torch.cat([self.cosines, more.cosines]), torch.cat([self.sines, more.sines])
                )
            self._reserved = len(self.cosines)

    @torch.inference_mode()
    def _chunk(self, first: int) -> Angles:
        inside = range(first, min(first + CHUNK, self._context))
        positions = torch.tensor([[*inside, *self._beyond]], device=self._device)
        like = torch.empty(0, dtype=torch.float32, device=self._device)
        turns = self._module(like, positions, *self._kind)
        if isinstance(turns, Tensor):  # complex numbers, each angle once
            cosine, sine, once = turns.real, turns.imag, slice(None)
        else:
            cosine, sine = turns
            neighbours = self._interleaved and torch.equal(cosine[..., ::2], cosine[..., 1::2])
            once = slice(None, None, 2) if neighbours else slice(cosine.shape[-1] // 2)
        return Angles(
            cosine[0, : len(inside), once].contiguous(), sine[0, : len(inside), once].contiguous()
        )
