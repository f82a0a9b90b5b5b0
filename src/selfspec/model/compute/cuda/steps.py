"""Steps that are recorded once and replayed: a decoder's kernels are so short on a GPU that
launching them takes longer.

A step is a plan, a grid (`frame.py`) and a storage (`storage.py`). Its inputs lie in buffers that
stay where they are; what a call brings is copied there, the step runs, and what comes out is copied
away before another step may write over it. On a CUDA device the second run of a step is recorded
(`cuda_graphs.py`) and later ones replay it; elsewhere, and where recording fails, the same function
simply runs. The head is a step of its own. Addresses are baked into a recording, so storages are
part of a step's key and never move, and a step holds everything else that it reads. Does not know
what a layer or a drafter is.
"""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ..cache import KVCache, TokenLayout
from ..plan import LayerPlan
from .frame import FIELDS, MOST_TOKENS, Frame, Grid, bucket, grid_for, packed
from .graphs import CudaRecorder, Recorder, Recording, Work
from .storage import StaticCache, Storage

MOST_STEPS = 128  # recorded at the same time; the one that was not used for longest goes
# tokens that a head's step takes
HEADS = (
    1,
    2,
    3,
    4,
    6,
    8,
    12,
    16,
    24,
    32,
    48,
    64,
    96,
    128,
    192,
    256,
    384,
    MOST_TOKENS,
)

Layers = Callable[[Tensor, LayerPlan, KVCache, TokenLayout, Sequence[int]], tuple[Tensor, ...]]
Head = Callable[[Tensor], Tensor]
# a step of layers begins with its storage's number, a head's with its product
Key = tuple[Hashable, ...]


@dataclass(eq=False)
class _Step:
    """One step: how often it ran and, once it was recorded, the recording and what it reads."""

    runs: int = 0
    recording: Recording | None = None
    reads: object = None  # held, so that its memory is nobody else's


@dataclass(frozen=True)
class _Inputs:
    """The buffers of one shape."""

    table: Tensor  # (FIELDS, rows, width)
    x: Tensor  # (rows * width, model's width)


class StepRunner:
    """The steps of one model. One call at a time, from any thread."""

    def __init__(self, device: torch.device, width: int, dtype: torch.dtype) -> None:
        self._device, self._width, self._dtype = device, width, dtype
        self._lock = threading.RLock()
        self._steps: OrderedDict[Key, _Step] = OrderedDict()
        self._inputs: dict[tuple[int, int], _Inputs] = {}
        self._rows: dict[int, Tensor] = {}  # of each size: what a head reads
        self.recorder: Recorder | None = CudaRecorder(device) if device.type == "cuda" else None
        self.paused = False  # for measuring what recordings save
        self.reason = (
            "" if self.recorder else f"there is nothing to record on a {device.type.upper()}"
        )

    @property
    def recorded(self) -> int:
        """How many steps are recorded now."""
        return sum(step.recording is not None for step in list(self._steps.values()))

    def run(
        self,
        layers: Layers,
        x: Tensor,
        plan: LayerPlan,
        cache: StaticCache,
        layout: TokenLayout,
        collected: Sequence[int],
        reads: Callable[[], object],
    ) -> tuple[Tensor, ...] | None:
        """What `layers` makes of the call's hidden states, and what left the tapped layers; None if
        the call does not fit into a step. `reads()`: tensors that a step reads beside weights,
        buffers and storage."""
        storage = cache.storage
        grid = grid_for(layout, storage.rows, storage.slots)
        if grid is None:
            return None
        table = packed(layout, grid, cache.spare)
        with self._lock:
            self.follow()
            inputs = self._inputs_for(grid)
            inputs.table.copy_(table, non_blocking=True)
            everywhere = [span.row for span in layout.spans] == list(range(grid.rows)) and len(
                x
            ) == grid.tokens
            where = None if everywhere else inputs.table[-1].view(-1)[: len(x)]
            _fill(inputs.x, x, where)

            def work() -> tuple[Tensor, ...]:
                return layers(
                    inputs.x,
                    plan,
                    cache,
                    Frame.of(inputs.table, grid, storage.keys, storage.values),
                    collected,
                )

            found = self._run(
                (storage.number, plan, grid, *collected), work, lambda: (storage, inputs, reads())
            )
            return tuple(out.clone() if where is None else out[where] for out in found)

    def head(self, head: Head, name: Hashable, x: Tensor) -> Tensor:
        """head(x) for (tokens, width), whose rows do not depend on each other. `name` tells heads
        apart."""
        if not 0 < len(x) <= HEADS[-1]:
            return head(x)
        size = bucket(len(x), HEADS)
        with self._lock:
            self.follow()
            if size not in self._rows:
                self._rows[size] = self._buffer(size, self._width, dtype=self._dtype)
            buffer = self._rows[size]
            buffer[: len(x)] = x
            buffer[len(x) :] = 0
            (out,) = self._run((name, size), lambda: (head(buffer),), lambda: (buffer, name))
            return out[: len(x)].clone()

    def forget(self, storage: Storage) -> None:
        """Let go of the steps of a storage, which nothing may be running any more."""
        with self._lock:
            for key in [key for key in self._steps if key[0] == storage.number]:
                self._release(key)

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """Meanwhile steps just run."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    def give_up(self, reason: str) -> None:
        """Record nothing any more, and replay nothing."""
        self.reason, self.paused = reason, True
        warnings.warn(
            f"CUDA graphs are off for this model, which costs speed only: {reason}", stacklevel=2
        )

    def follow(self) -> None:
        """Let this thread's stream wait for what another one was given before: buffers and storages
        belong to both."""
        if self.recorder is not None:
            self.recorder.follow()

    def _run(self, key: Key, work: Work, reads: Callable[[], object]) -> tuple[Tensor, ...]:
        """One run of a step. What comes out is overwritten by the next."""
        if self.paused:
            return work()
        step = self._steps.setdefault(key, _Step())
        self._steps.move_to_end(key)
        step.runs += 1
        if step.recording is None and step.runs > 1 and not self.reason:
            self._record(step, work)
            step.reads = reads()
        if step.recording is None:
            return work()
        step.recording.replay()
        assert step.recording.out is not None
        return step.recording.out

    def _record(self, step: _Step, work: Work) -> None:
        """Record a step. If that fails the step, and every later one, just runs: slower, the same
        numbers."""
        assert self.recorder is not None
        recorded = [key for key, each in self._steps.items() if each.recording is not None]
        if len(recorded) >= MOST_STEPS:
            self.recorder.wait()
            self._release(recorded[0])
        try:
            step.recording = self.recorder.record(work)
        except torch.OutOfMemoryError:
            raise  # the user's to solve; the next step may be recorded
        except RuntimeError as error:
            self.recorder.wait()  # raises if the device itself is broken
            self.give_up(
                f"recording a step failed: "
                f"{next(iter(str(error).splitlines()), type(error).__name__)}"
            )

    def _release(self, key: Key) -> None:
        step = self._steps.pop(key)
        if step.recording is not None:
            step.recording.release()

    def _inputs_for(self, grid: Grid) -> _Inputs:
        key = (grid.rows, grid.width)
        if key not in self._inputs:
            table = self._buffer(FIELDS, grid.rows, grid.width, dtype=torch.int64)
            self._inputs[key] = _Inputs(
                table, self._buffer(grid.tokens, self._width, dtype=self._dtype)
            )
        return self._inputs[key]

    def _buffer(self, *shape: int, dtype: torch.dtype) -> Tensor:
        with torch.inference_mode(False):
            return torch.zeros(shape, dtype=dtype, device=self._device)


def _fill(buffer: Tensor, x: Tensor, where: Tensor | None) -> None:
    """Put a call's tokens where they stand in the grid; None: everywhere, in order."""
    if where is None:
        buffer.copy_(x)
        return
    buffer.zero_()  # what padding computes must be finite
    buffer.index_copy_(0, where, x)
