"""Steps that are recorded once and replayed, because a GPU runs short kernels faster than it starts
them.

A step is a plan, a grid (`frame.py`) and a storage (`storage.py`). Its inputs lie in buffers that
never move. A call's tokens are copied there, the step runs, and its output is copied away before
another step overwrites it. On a CUDA device the second run of a step is recorded (`graphs.py`), and
later runs replay it. Elsewhere, and where recording fails, the same function simply runs. The head
is a step of its own. A recording contains addresses, so storages are part of a step's key, and a
step holds everything else that it reads. Does not know what a layer or a drafter is.
"""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..call import Call, Layers
from .frame import FIELDS, MAX_TOKENS, WIDTHS, Frame, bucket, grid_for, packed
from .graphs import CudaRecorder, Recorder, Recording, Work
from .storage import StaticCache, Storage

MAX_STEPS = 128  # recorded at the same time: the least recently used one is dropped
HEAD_TOKENS = (*WIDTHS, 64, 96, 128, 192, 256, 384, MAX_TOKENS)  # that a head's step takes

Head = Callable[[Tensor], Tensor]
Key = tuple[Hashable, ...]  # begins with a storage's number, or with the name of a head


@dataclass(eq=False)
class _Step:
    """How often a step ran and, once it is recorded, the recording and what it reads."""

    runs: int = 0
    recording: Recording | None = None
    reads: object = None  # held, so that the memory is not used for anything else


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
        self._head_inputs: dict[int, Tensor] = {}  # by the number of tokens
        self.recorder: Recorder | None = CudaRecorder(device) if device.type == "cuda" else None
        self.paused = False  # for measuring what recordings save
        nothing = f"there is nothing to record on a {device.type.upper()}"
        self.reason = "" if self.recorder else nothing  # why nothing is recorded

    @property
    def recorded(self) -> int:
        """How many steps are recorded now."""
        return sum(step.recording is not None for step in list(self._steps.values()))

    def run(
        self, layers: Layers, x: Tensor, call: Call, cache: StaticCache, reads: Callable[[], object]
    ) -> tuple[Tensor, ...] | None:
        """What `layers` makes of a call on this cache, or None if it does not fit a step.

        `reads()` gives the tensors that a step reads beside weights, buffers and storage.
        """
        storage, layout = cache.storage, call.layout
        grid = grid_for(layout, storage.rows, storage.slots)
        if grid is None:
            return None
        table = packed(layout, grid, cache.spare)
        with self._lock:
            self.follow()
            shape = (grid.rows, grid.width)
            if shape not in self._inputs:
                table_buffer = self._buffer(FIELDS, *shape, dtype=torch.int64)
                x_buffer = self._buffer(grid.tokens, self._width, dtype=self._dtype)
                self._inputs[shape] = _Inputs(table_buffer, x_buffer)
            inputs = self._inputs[shape]
            inputs.table.copy_(table, non_blocking=True)
            in_order = [span.row for span in layout.spans] == list(range(grid.rows))
            where = None  # the call's tokens are the grid's
            if in_order and len(x) == grid.tokens:
                inputs.x.copy_(x)
            else:
                where = inputs.table[-1].view(-1)[: len(x)]
                inputs.x.zero_()  # what padding computes must be finite
                inputs.x.index_copy_(0, where, x)

            def work() -> tuple[Tensor, ...]:
                frame = Frame.of(inputs.table, grid, storage.keys, storage.values)
                return layers(inputs.x, replace(call, layout=frame))

            key = (storage.number, call.plan, grid, *call.collected)
            states = self._run(key, work, lambda: (storage, inputs, reads()))
            return tuple(out.clone() if where is None else out[where] for out in states)

    def head(self, head: Head, name: Hashable, x: Tensor) -> Tensor:
        """head(x), which treats each row of x, (tokens, width), alone. `name` tells heads apart."""
        if not 0 < len(x) <= MAX_TOKENS:
            return head(x)
        size = bucket(len(x), HEAD_TOKENS)
        with self._lock:
            self.follow()
            if size not in self._head_inputs:
                self._head_inputs[size] = self._buffer(size, self._width, dtype=self._dtype)
            buffer = self._head_inputs[size]
            buffer[: len(x)] = x
            buffer[len(x) :] = 0
            (out,) = self._run((name, size), lambda: (head(buffer),), lambda: (buffer, name))
            return out[: len(x)].clone()

    def forget(self, storage: Storage) -> None:
        """Release the steps of a storage. None of them may be running."""
        with self._lock:
            for key in [key for key in self._steps if key[0] == storage.number]:
                self._release(key)

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """Meanwhile steps run without recordings."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    def give_up(self, reason: str) -> None:
        """Stop recording and replaying, with a warning."""
        self.reason, self.paused = reason, True
        warnings.warn(
            f"CUDA graphs are off for this model, which costs speed only: {reason}", stacklevel=2
        )

    def follow(self) -> None:
        """Let this thread's stream wait for earlier ones: they share buffers and storages."""
        if self.recorder is not None:
            self.recorder.follow()

    def _run(self, key: Key, work: Work, reads: Callable[[], object]) -> tuple[Tensor, ...]:
        """One run of a step. Its output is overwritten by the next."""
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
        """Record a step. If that fails, all steps run unrecorded: slower, with the same numbers."""
        assert self.recorder is not None
        recorded = [key for key, other in self._steps.items() if other.recording is not None]
        if len(recorded) >= MAX_STEPS:
            self.recorder.wait()
            self._release(recorded[0])
        try:
            step.recording = self.recorder.record(work)
        except torch.OutOfMemoryError:
            raise  # for the user to solve: the next step may be recorded
        except RuntimeError as error:
            self.recorder.wait()  # raises if the device itself is broken
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            self.give_up(f"recording a step failed: {reason}")

    def _release(self, key: Key) -> None:
        step = self._steps.pop(key)
        if step.recording is not None:
            step.recording.release()

    def _buffer(self, *shape: int, dtype: torch.dtype) -> Tensor:
        with torch.inference_mode(False):
            return torch.zeros(shape, dtype=dtype, device=self._device)
