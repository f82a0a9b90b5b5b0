"""A recorder without a GPU, as strict as a CUDA graph: what was recorded is replayed, operation by
operation, where it lay.

Python does not run again, addresses are those of the recording, recording computes nothing that may
be used, a replay destroys what other recordings left behind, and reading from the device or copying
from the host while recording is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

HOST = (
    "_local_scalar_dense",
    "nonzero",
    "_unique2",
    "unique_dim",
    "lift_fresh",
    "_to_copy",
    "is_nonzero",
    "masked_select",
)


class _Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.played: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in HOST and not (name == "_to_copy" and "device" not in (kwargs or {})):
            raise RuntimeError(f"operation not permitted while recording: {name}")
        out = func(*args, **(kwargs or {}))
        self.played.append((func, args, kwargs or {}, out))
        return out


class TapeRecording:
    def __init__(self, recorder: TapeRecorder, played: list[Any], out: tuple[Tensor, ...]) -> None:
        self._recorder, self._played = recorder, played
        self.out: tuple[Tensor, ...] | None = out
        self.released = False
        _destroy(out)

    def replay(self) -> None:
        assert not self.released, "a recording was replayed after its memory was let go"
        self._recorder.replays += 1
        for other in self._recorder.made:
            if other is not self and other.out is not None:
                _destroy(other.out)
        for func, args, kwargs, then in self._played:
            now = func(*args, **kwargs)
            for old, new in zip(tree_leaves(then), tree_leaves(now), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

    def release(self) -> None:
        self.released, self.out = True, None


def _destroy(out: tuple[Tensor, ...]) -> None:
    for tensor in out:
        tensor.fill_(torch.nan)


class TapeRecorder:
    """Put in the place of a `CudaRecorder` by `recording`."""

    def __init__(self) -> None:
        self.made: list[TapeRecording] = []
        self.replays = 0

    def record(self, work: Callable[[], tuple[Tensor, ...]]) -> TapeRecording:
        work()
        with _Tape() as tape:
            out = work()
        self.made.append(TapeRecording(self, tape.played, out))
        return self.made[-1]

    def follow(self) -> None:
        pass

    def wait(self) -> None:
        pass


def recording(model: Any) -> TapeRecorder:
    """Let a model whose kernel is "static" record its steps."""
    recorder = TapeRecorder()
    model.steps.runner.recorder, model.steps.runner.reason = recorder, ""
    return recorder
