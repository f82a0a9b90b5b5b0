"""Memory for keys and values that never moves: a pool of storages, and a cache that borrows one.

A recorded step reads and writes fixed addresses, so the next generation has to use the memory of
the last one. When a cache is gone, its storage goes back to the pool, and the steps that were
recorded on it stay valid. Does not know steps or models.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ....errors import ResourceError
from ..cache import KVCache
from ..memory import CacheShape, room_for

IDLE = 4  # storages kept for the next generation
_numbers = itertools.count()


@dataclass(frozen=True, eq=False)
class Storage:
    """Memory for a cache. Its `number` is never used again, as an address would be."""

    keys: Tensor  # (layers, rows, heads, slots, size)
    values: Tensor
    number: int = field(default_factory=lambda: next(_numbers))

    @property
    def shape(self) -> CacheShape:
        layers, rows, heads, _, size = self.keys.shape
        return layers, rows, heads, size

    @property
    def rows(self) -> int:
        return self.keys.shape[1]

    @property
    def slots(self) -> int:
        return self.keys.shape[3]


class StoragePool:
    """The storages of one model. `forget` is called for each before it is freed."""

    def __init__(
        self, dtype: torch.dtype, device: torch.device, forget: Callable[[Storage], None]
    ) -> None:
        self.dtype, self.device, self._forget = dtype, device, forget
        self._idle: list[Storage] = []
        # appending is atomic: a cache may die in any thread, in the midst of anything
        self._returned: deque[Storage] = deque()
        self._lock = threading.Lock()

    def take(self, shape: CacheShape, slots: int) -> Storage:
        """A storage of this shape with at least `slots` slots, all zeros."""
        with self._lock:
            self._sort_in()
            fitting = (s for s in self._idle if slots <= s.slots <= 2 * slots)
            idle = [s for s in fitting if s.shape == shape]
            if idle:
                # the smallest, and of equal ones that which was used last: its steps are recorded
                storage = min(reversed(idle), key=lambda storage: storage.slots)
                self._idle.remove(storage)
                # old numbers are masked, but a masked NaN would still poison the sum
                storage.keys.zero_()
                storage.values.zero_()
                return storage
            try:
                return self._new(shape, slots)
            except ResourceError:
                if not self._idle:
                    raise
                self._free(len(self._idle))
                return self._new(shape, slots)

    def clear(self) -> None:
        """Free all storages that are not in use."""
        with self._lock:
            self._sort_in()
            self._free(len(self._idle))

    def give(self, storage: Storage) -> None:
        """Take a storage back. May be called from anywhere."""
        self._returned.append(storage)

    def _new(self, shape: CacheShape, slots: int) -> Storage:
        with torch.inference_mode(False):  # so that it can be written in and out of that mode
            return Storage(*room_for(shape, slots, self.dtype, self.device))

    def _sort_in(self) -> None:
        while self._returned:
            self._idle.append(self._returned.popleft())
        self._free(len(self._idle) - IDLE)

    def _free(self, count: int) -> None:
        """Free the oldest."""
        if count <= 0:
            return
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.cuda.synchronize(self.device)  # a step may still be running on it, on any stream
        for storage in self._idle[:count]:
            self._forget(storage)
        del self._idle[:count]
        if on_gpu:
            torch.cuda.empty_cache()


class StaticCache(KVCache):
    """A cache in a storage of the pool, whose last slot is spare: padding is written there."""

    def __init__(self, pool: StoragePool, shape: CacheShape, capacity: int) -> None:
        self._pool = pool
        self._held: list[Storage] = []  # one, in a list that the finaliser sees too
        finalizer = weakref.finalize(self, _give_back, pool, self._held)
        finalizer.atexit = False
        super().__init__(shape, capacity + 1, pool.dtype, pool.device)

    @property
    def storage(self) -> Storage:
        return self._held[-1]

    @property
    def spare(self) -> int:
        """The slot that no token sees."""
        return self.storage.slots - 1

    @property
    def capacity(self) -> int:
        return self.spare

    def reserve(self, slots: int) -> None:
        super().reserve(slots if slots <= self.capacity else slots + 1)

    def _grow(self, capacity: int) -> None:
        super()._grow(capacity)
        while len(self._held) > 1:  # the old one was copied into the new one
            self._pool.give(self._held.pop(0))

    def _room(self, capacity: int) -> tuple[Tensor, Tensor]:
        storage = self._pool.take(self._shape, capacity)
        self._held.append(storage)
        return storage.keys, storage.values


def _give_back(pool: StoragePool, held: list[Storage]) -> None:
    while held:
        pool.give(held.pop())
