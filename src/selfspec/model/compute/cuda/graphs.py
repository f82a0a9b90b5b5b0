"""Recording work as a CUDA graph and replaying it: the only module that calls torch.cuda.graph.

Recorded work must not copy from or to the host, and uses the same addresses in every replay. That
is up to `steps.py`. Here work runs once on the recording stream before it is recorded, so that
libraries make their handles, workspaces and plans. All graphs share one memory pool, so they must
not run at the same time: `follow` makes streams wait for each other. Other threads may use the
device while this one records ("thread_local"). Does not know what is recorded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

Work = Callable[[], tuple[Tensor, ...]]
# one at a time in this process, since recording begins with a synchronised device
_recording = threading.Lock()


class Recording(Protocol):
    """Work that was recorded; it has run once."""

    # written by every replay of this and of other recordings: copy it first
    out: tuple[Tensor, ...] | None

    def replay(self) -> None:
        """Run it again."""

    def release(self) -> None:
        """Free its memory. It must not be running."""


class Recorder(Protocol):
    """Makes recordings. Tests have their own."""

    def record(self, work: Work) -> Recording:
        """Raises RuntimeError if the work cannot be recorded."""

    def follow(self) -> None:
        """Let the current stream wait for the one that was used last."""

    def wait(self) -> None:
        """Wait until the device has nothing left to do."""


@dataclass(eq=False)
class _Graph:
    graph: torch.cuda.CUDAGraph
    out: tuple[Tensor, ...] | None

    def replay(self) -> None:
        self.graph.replay()

    def release(self) -> None:
        self.out = None
        self.graph.reset()


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
                with torch.cuda.stream(self._side):  # restores the stream if recording fails
                    work()
                    with torch.cuda.graph(
                        graph, self._pool(), self._side, capture_error_mode="thread_local"
                    ):
                        out = work()
            finally:
                current.wait_stream(self._side)
        return _Graph(graph, out)

    def _pool(self) -> Any:
        """The shared pool. A graph of its own keeps it: without any, it could not be used again."""
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
