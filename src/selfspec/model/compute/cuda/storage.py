"""Keys and values that stay where they are: storages that generations take and give back, and the
cache that lies in one.

A recorded step reads and writes fixed addresses, so the next generation has to lie where the last
one lay. When a cache is no longer used its storage goes back to the pool, with it the steps that
were recorded on it. Does not know steps or models.
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
from ..cache import KVCache, zeros

IDLE = 4  # storages kept for the next generation
_numbers = itertools.count()


@dataclass(frozen=True, eq=False)
class Storage:
    """(layers, rows, heads, slots, size) each. `number` is never used twice, unlike an address."""

    keys: Tensor
    values: Tensor
    number: int = field(default_factory=lambda: next(_numbers))

    @property
    def rows(self) -> int:
        return self.keys.shape[1]

    @property
    def slots(self) -> int:
        return self.keys.shape[3]


class StoragePool:
    """The storages of one model. `forget` hears of those whose memory is let go."""

    def __init__(
        self, dtype: torch.dtype, device: torch.device, forget: Callable[[Storage], None]
    ) -> None:
        self.dtype, self.device, self._forget = dtype, device, forget
        self._idle: list[Storage] = []
        # appending is atomic: a cache may die in any thread, in the midst of anything
        self._returned: deque[Storage] = deque()
        self._lock = threading.Lock()

    def take(self, shape: tuple[int, int, int, int], slots: int) -> Storage:
        """A storage for (layers, rows, heads, size) and at least so many slots, all zeros."""
        with self._lock:
            self._sort_in()
            fitting = [
                each
                for each in self._idle
                if each.rows == shape[1] and slots <= each.slots <= 2 * slots
            ]
            if fitting:
                # the one that was used last: its steps are recorded
                found = min(reversed(fitting), key=lambda each: each.slots)
                self._idle.remove(found)
                # what lies there is masked, but a masked NaN would still poison the sum
                found.keys.zero_()
                found.values.zero_()
                return found
            try:
                return self._new(shape, slots)
            except ResourceError:
                if not self._idle:
                    raise
                self._drop(len(self._idle))
                return self._new(shape, slots)

    def clear(self) -> None:
        """Let all go that nobody uses."""
        with self._lock:
            self._sort_in()
            self._drop(len(self._idle))

    def give(self, storage: Storage) -> None:
        """Takes a storage back; may be called from anywhere."""
        self._returned.append(storage)

    def _new(self, shape: tuple[int, int, int, int], slots: int) -> Storage:
        with torch.inference_mode(False):  # whoever comes later may write it in or out of that mode
            return Storage(*zeros(shape, slots, self.dtype, self.device))

    def _sort_in(self) -> None:
        while self._returned:
            self._idle.append(self._returned.popleft())
        self._drop(len(self._idle) - IDLE)

    def _drop(self, count: int) -> None:
        """Let the oldest go."""
        if count <= 0:
            return
        on_card = self.device.type == "cuda"
        if on_card:
            torch.cuda.synchronize(self.device)  # a step may still be running on it, on any stream
        for storage in self._idle[:count]:
            self._forget(storage)
        del self._idle[:count]
        if on_card:
            torch.cuda.empty_cache()


class StaticCache(KVCache):
    """A cache that lies in a storage of the pool. The storage's last slot is spare: padding is
    written there."""

    def __init__(
        self, pool: StoragePool, layers: int, rows: int, heads: int, size: int, capacity: int
    ) -> None:
        self._pool = pool
        self._held: list[Storage] = []  # one; a list, since the finaliser must see the present one
        finalizer = weakref.finalize(self, _give_back, pool, self._held)
        finalizer.atexit = False
        super().__init__(layers, rows, heads, size, capacity + 1, pool.dtype, pool.device)

    @property
    def storage(self) -> Storage:
        return self._held[-1]

    @property
    def spare(self) -> int:
        """The slot that nobody sees."""
        return self.storage.slots - 1

    @property
    def capacity(self) -> int:
        return self.spare

    def reserve(self, slots: int) -> None:
        super().reserve(slots if slots <= self.capacity else slots + 1)

    def _grow(self, capacity: int) -> None:
        super()._grow(capacity)
        while len(self._held) > 1:  # it grew: what it had is copied
            self._pool.give(self._held.pop(0))

    def _room(self, capacity: int) -> tuple[Tensor, Tensor]:
        storage = self._pool.take(self._shape, capacity)
        self._held.append(storage)
        return storage.keys, storage.values


def _give_back(pool: StoragePool, held: list[Storage]) -> None:
    while held:
        pool.give(held.pop())
