"""The peer processes of a run: started beside each other, asked in turns, and started again when
one had to be ended.

Knows how a turn is measured: seconds from outside, the process's largest memory, the machine's
energy. Does not know questions, what is compared, or what a result looks like on disk.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from .meters import EnergyMeter, PeakMemory
from .peers import Peer, PeerFailed, PeerSpec, Reply
from .schema import EngineRow

# before each turn: threads of the peer that worked last may spin for a moment
SETTLE_SECONDS = 0.02
ECHOES = 21


@dataclass(frozen=True)
class Measured(Reply):
    """One turn, with the first tokens timed even where the peer does not stream."""

    peak_memory_bytes: int | None
    joules: float | None


@dataclass
class Engines:
    """Every peer of a run by name."""

    specs: Mapping[str, PeerSpec]
    folder: Path
    dtype: str
    device: str
    threads: int
    limit: float
    energy: EnergyMeter
    start: Callable[[PeerSpec, int, float], Peer] = Peer
    settle: float = SETTLE_SECONDS
    weights: str = "auto"
    _running: dict[str, Peer] = field(default_factory=dict)

    def open(self, row: EngineRow, ids: Sequence[int]) -> None:
        """Start one and write down what that took; raises PeerFailed. `ids` are as long as what it
        will be sent."""
        self.specs[row.name].install()
        begin = time.perf_counter()
        engine = self._begin(row.name)
        if row.load_seconds is None:
            row.load_seconds = time.perf_counter() - begin
        row.precision, row.versions = engine.precision, dict(engine.versions)
        row.pipe_seconds = median(engine.echo(ids) for _ in range(ECHOES))

    def _begin(self, name: str) -> Peer:
        engine = self.start(self.specs[name], self.threads, self.limit)
        try:
            engine.load(self.folder, self.dtype, self.device, self.weights)
        except PeerFailed:
            engine.close()
            raise
        self._running[name] = engine
        return engine

    def get(self, name: str) -> Peer:
        """A living one: one that had to be ended is started again, for its other methods."""
        engine = self._running.get(name)
        if engine is None:
            raise PeerFailed("not started")
        if engine.dead:
            engine.close()
            del self._running[name]
            return self._begin(name)
        return engine

    def measure(
        self,
        name: str,
        rows: Sequence[Sequence[int]],
        new_tokens: int,
        eos: Sequence[int],
        options: Mapping[str, Any],
    ) -> Measured:
        """One turn of one engine."""
        engine = self.get(name)
        memory = PeakMemory(engine.pid)
        time.sleep(self.settle)
        memory.start()
        self.energy.start()
        reply = engine.answer(rows, new_tokens, eos, options)
        joules, peak = self.energy.read(), memory.read()
        first, count = reply.first_seconds, reply.first_tokens
        if first is None:  # another call for one token says when decoding begins
            first, count = engine.answer(rows, 1, eos, options).seconds, len(rows)
        counts = dict(reply.counts or {})
        peak = counts.pop("peak_memory_bytes", peak)
        return Measured(reply.rows, reply.seconds, first, count, counts, peak, joules)

    def close(self) -> None:
        """End all processes."""
        for engine in self._running.values():
            engine.close()
        self._running.clear()
