"""How a model's calls run: as they are written, or as steps that are recorded once and replayed.

A device that gains by recordings has `RecordedSteps`, all others have `EagerSteps`. Both give the
caches that their calls need. What a step is and how it is recorded is the business of
compute/cuda/. Does not know what the calls compute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from .compute.cache import KVCache
from .compute.call import Call, Layers
from .compute.cuda.steps import StepRunner
from .compute.cuda.storage import StaticCache, StoragePool
from .compute.linear import Linear
from .compute.memory import CacheShape
from .compute.recurrent_cache import RecurrentCache
from .compute.rope import RopeTable
from .compute.uneven_cache import UnevenCache
from .family import Shape
from .passes import WholePass

Heads = tuple[Linear, ...]
Score = Callable[[Tensor, Heads], Tensor]


class EagerSteps:
    """Every call runs as it is written."""

    def __init__(
        self, dtype: torch.dtype, device: torch.device, reason: str = "", unread: bool = False
    ) -> None:
        """`unread`: no call reads slots of a cache that were not written."""
        self._dtype, self._device, self._reason, self._unread = dtype, device, reason, unread

    @property
    def reason(self) -> str:
        """Why nothing is recorded; empty where steps are."""
        return self._reason

    def anew(self) -> EagerSteps:
        """The same for another view of the model, with nothing recorded yet."""
        return self

    @property
    def status(self) -> str:
        """Whether steps are replayed as CUDA graphs, or why not."""
        return f"no: {self.reason}"

    def new_cache(self, shape: Shape, rows: int, capacity: int) -> KVCache:
        """A cache for a model of this shape, on which these calls run."""
        sizes, on, unread = _sizes(shape, rows), (self._dtype, self._device), self._unread
        if shape.recurrent and shape.recurrent_size is not None:
            counts = len(shape.keyless), len(shape.recurrent)
            return RecurrentCache(sizes, *counts, shape.recurrent_size, capacity, *on, unread)
        keyless = len(shape.keyless)
        if shape.kinds:
            own = [kind for at, kind in enumerate(shape.kinds) if at not in shape.keyless]
            return UnevenCache(rows, own, capacity, *on, keyless, unread)
        layers, rows, heads, size = sizes
        return KVCache((layers - keyless, rows, heads, size), capacity, *on, keyless, unread)

    def run(self, layers: Layers, x: Tensor, call: Call) -> tuple[Tensor, ...]:
        """What `layers` makes of a call whose layout may still be on the host."""
        layout = call.layout.on(self._device)
        return layers(x, call if layout is call.layout else replace(call, layout=layout))

    def head(self, score: Score, heads: Heads, x: Tensor) -> Tensor:
        """score(x, heads)."""
        return score(x, heads)

    def at_once(self, head: Linear) -> WholePass | None:
        """All of the model as one call with this head, where that is how it runs."""
        return None

    def eagerly(self) -> AbstractContextManager[None]:
        """For measuring: meanwhile calls run as they are written."""
        return nullcontext()

    def give_up(self, reason: str) -> None:
        """Record and replay nothing any more."""

    def free_idle(self) -> None:
        """Give back the memory that only waits for the next generation."""


class RecordedSteps(EagerSteps):
    """Calls of a fixed shape are replayed, all others run as they are written.

    `ropes`: the rotary tables that the layers read. A table that grows moves, and a recorded step
    goes on reading the one of then, so each is made long enough for the cache beforehand.
    """

    def __init__(
        self, width: int, dtype: torch.dtype, device: torch.device, ropes: Sequence[RopeTable]
    ) -> None:
        super().__init__(dtype, device)
        self._width, self._ropes = width, ropes
        self.runner = StepRunner(device, width, dtype)
        self.pool = StoragePool(dtype, device, self.runner.forget)

    @property
    def reason(self) -> str:
        return self.runner.reason

    def anew(self) -> RecordedSteps:
        fresh = RecordedSteps(self._width, self._dtype, self._device, self._ropes)
        fresh.runner.reason = self.reason
        return fresh

    @property
    def status(self) -> str:
        if self.reason:
            return super().status
        return f"yes, as CUDA graphs ({self.runner.recorded} so far)"

    def new_cache(self, shape: Shape, rows: int, capacity: int) -> KVCache:
        self.runner.follow()
        return StaticCache(self.pool, _sizes(shape, rows), capacity)

    def run(self, layers: Layers, x: Tensor, call: Call) -> tuple[Tensor, ...]:
        if isinstance(call.cache, StaticCache) and call.observer is None:  # who has to be called
            for rope in self._ropes:
                rope.reserve(call.cache.capacity)
            states = self.runner.run(layers, x, call, call.cache, self._tables)
            if states is not None:
                return states
        return super().run(layers, x, call)

    def head(self, score: Score, heads: Heads, x: Tensor) -> Tensor:
        # several heads were put together for one request: not worth a step, nor kept for one
        if len(heads) > 1:
            return score(x, heads)
        return self.runner.head(lambda states: score(states, heads), heads, x)

    def eagerly(self) -> AbstractContextManager[None]:
        return self.runner.pausing()

    def give_up(self, reason: str) -> None:
        if not self.reason:
            self.runner.give_up(reason)

    def free_idle(self) -> None:
        self.pool.clear()

    def _tables(self) -> object:
        return [(rope.cosines, rope.sines) for rope in self._ropes]


def _sizes(shape: Shape, rows: int) -> CacheShape:
    return shape.layers, rows, shape.kv_heads, shape.head_size
