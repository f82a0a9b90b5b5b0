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


def _angles(
    module: nn.Module | Tensor, like: Tensor, positions: Tensor, kind: tuple[str, ...]
) -> tuple[Tensor, Tensor]:
    """Cosines and sines."""
    if isinstance(module, Tensor):
        sine, cosine = module.to(like)[positions].chunk(2, dim=-1)
        return cosine, sine
    made = module(like, positions, *kind)
    return (made.real, made.imag) if isinstance(made, Tensor) else made


def _each_once(angles: Tensor, interleaved: bool) -> slice:
    """Which of a module's angles are all of them: it may say each twice."""
    half = angles.shape[-1] // 2
    if interleaved and torch.equal(angles[..., ::2], angles[..., 1::2]):
        return slice(None, None, 2)
    return slice(half if torch.equal(angles[..., :half], angles[..., half:]) else None)


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
    repeat each angle for neighbours, not for the two halves of a head. It may also say each once,
    or give complex numbers, or be a table of sines, then cosines, by position.
    """

    def __init__(
        self,
        module: nn.Module | Tensor,
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
        cosine, sine = _angles(self._module, like, positions, self._kind)
        once = _each_once(cosine, self._interleaved)
        return Angles(
            cosine[0, : len(inside), once].contiguous(), sine[0, : len(inside), once].contiguous()
        )
