"""Recording work as a CUDA graph and replaying it; the only module that says torch.cuda.graph.

Its rules, as `capture.py` has to keep them: what is recorded may neither read from the device nor
copy from the host, and reads and writes the same addresses in every replay. Kept here: work runs
once on the recording stream before it is recorded, which makes handles, workspaces and the plans of
libraries; all graphs share one memory pool, so they must not run at the same time, and `follow`
makes streams wait for each other; other threads may go on using the device while this one records
("thread_local"). Does not know what is recorded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

Work = Callable[[], tuple[Tensor, ...]]
# one at a time in this process: recording begins with a synchronised device
_recording = threading.Lock()


class Recording(Protocol):
    """Work that was recorded; it has run once."""

    # written by every replay, and by other recordings' too: copy it away first
    out: tuple[Tensor, ...] | None

    def replay(self) -> None:
        """Run it again."""

    def release(self) -> None:
        """Let go of its memory. It must not be running."""


class Recorder(Protocol):
    """Makes recordings. Tests have one of their own."""

    def record(self, work: Work) -> Recording:
        """Raises RuntimeError if the work cannot be recorded."""

    def follow(self) -> None:
        """Called before anything is given to the device: what other streams were given comes
        first."""

    def wait(self) -> None:
        """Until the device has nothing left to do."""


class _Graph:
    """One CUDA graph."""

    def __init__(self, graph: torch.cuda.CUDAGraph, out: tuple[Tensor, ...]) -> None:
        self._graph = graph
        self.out: tuple[Tensor, ...] | None = out

    def replay(self) -> None:
        self._graph.replay()

    def release(self) -> None:
        self.out = None
        self._graph.reset()


class CudaRecorder:
    """Recordings on one device that share a memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)
        self._last: torch.cuda.Stream | None = None
        self._first: torch.cuda.CUDAGraph | None = None

    def record(self, work: Work) -> Recording:
        current, graph = torch.cuda.current_stream(self._device), torch.cuda.CUDAGraph()
        with _recording:
            self._side.wait_stream(current)
            try:
                # this one brings the old stream back even where recording fails half-way
                with torch.cuda.stream(self._side):
                    work()
                    with torch.cuda.graph(
                        graph, self._pool(), self._side, capture_error_mode="thread_local"
                    ):
                        out = work()
            finally:
                current.wait_stream(self._side)
        return _Graph(graph, out)

    def _pool(self) -> Any:
        """The pool that all share, kept alive by a graph of its own: one whose last graph is gone
        cannot be used again."""
        if self._first is None:
            first = torch.cuda.CUDAGraph()
            with torch.cuda.graph(first, stream=self._side, capture_error_mode="thread_local"):
                torch.zeros(1, device=self._device)
            self._first = first
        return self._first.pool()

    def follow(self) -> None:
        stream = torch.cuda.current_stream(self._device)
        if self._last is not None and stream != self._last:
            stream.wait_stream(self._last)
        self._last = stream

    def wait(self) -> None:
        torch.cuda.synchronize(self._device)
