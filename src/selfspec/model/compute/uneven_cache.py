"""Keys and values of layers whose heads differ in number and size.

Each row of a layer has room for the widest layer's heads, and every layer fills the beginning of it
in its own way: heads x slots x size. Does not know why layers differ.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .cache import KVCache

Kinds = Sequence[tuple[int, int]]
"""Of each layer the heads of keys and their size."""


class UnevenCache(KVCache):
    """A cache whose layers lie each in its own way."""

    def __init__(
        self,
        rows: int,
        kinds: Kinds,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        keyless: int = 0,
        unread: bool = False,
    ) -> None:
        """`kinds`: of the layers that have keys."""
        self._kinds = kinds
        widest = max(heads * size for heads, size in kinds)
        super().__init__((len(kinds), rows, 1, widest), capacity, dtype, device, keyless, unread)

    def of_layer(self, layer: int) -> tuple[Tensor, Tensor]:
        keys, values = self._tensors
        return self._layer(keys, layer), self._layer(values, layer)

    def _layer(self, room: Tensor, layer: int) -> Tensor:
        """(rows, heads, slots, size)."""
        heads, size = self._kinds[layer]
        rows, _, slots, _ = room[layer].shape
        shape, strides = (rows, heads, slots, size), (room.stride(1), slots * size, size, 1)
        return room[layer].as_strided(shape, strides)

    def _carry_over(self, room: tuple[Tensor, Tensor], known: int) -> None:
        for layer in range(len(self._kinds)):
            for new, old in zip(room, self._tensors, strict=True):
                into, held = self._layer(new, layer), self._layer(old, layer)
                into[: held.shape[0], :, :known] = held[:, :, :known]

    def copy(self, source: int, target: int, length: int) -> None:
        for layer in range(len(self._kinds)):
            for room in self.of_layer(layer):
                room[target, :, :length] = room[source, :, :length]
        self._lengths[target] = [min(known, length) for known in self._lengths[source]]

    def _move(self, row: int, first: int, source: Sequence[int]) -> None:
        slots = torch.tensor(source, device=self.keys.device)
        for layer in range(len(self._kinds)):
            for room in self.of_layer(layer):
                room[row, :, first : first + len(source)] = room[row, :, slots]
