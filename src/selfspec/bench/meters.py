"""What the system says of a turn beside its seconds, the most memory a process used and the energy
where the machine counts it; and how fast memory can be read.

Memory: Linux keeps a process's largest resident size (VmHWM in /proc/PID/status), and writing 5 to
/proc/PID/clear_refs starts it anew. Energy: Intel's and AMD's RAPL counters under
/sys/class/powercap (whole packages, other processes included), and NVIDIA's total through NVML.
Knows no peers and no model; where the system says nothing the answer is None, with the reason.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from .timing import Contestant, interleave, timed

PROC = Path("/proc")
POWERCAP = Path("/sys/class/powercap")
SMALLEST_BUFFER = 256 * 2**20  # beyond a last-level cache, else it is the cache that is measured
LARGEST_BUFFER = 2**30


class PeakMemory:
    """The largest resident size of one process since `start`."""

    def __init__(self, pid: int, proc: Path = PROC) -> None:
        self._folder = proc / str(pid)
        self._running = False

    def start(self) -> None:
        """Forget what was before."""
        try:
            (self._folder / "clear_refs").write_text("5")
            self._running = True
        except OSError:  # not Linux, or not allowed: then nothing can be said of a single turn
            self._running = False

    def read(self) -> int | None:
        """Bytes; None where the system cannot start anew, so that an earlier peak would be taken
        for this one."""
        return self._size("VmHWM") if self._running else None

    def now(self) -> int | None:
        """Bytes resident at this moment. Asked for before `read`, it is never above it: reading
        takes memory too."""
        return self._size("VmRSS")

    def _size(self, name: str) -> int | None:
        try:
            lines = (self._folder / "status").read_text().splitlines()
        except OSError:
            return None
        return next(
            (int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None
        )


@dataclass(frozen=True)
class Counter:
    """A counter of microjoules that starts over after `wraps`."""

    name: str
    read: Callable[[], float]
    wraps: float


class EnergyMeter:
    """Joules since `start`, summed over what the machine counts."""

    def __init__(self, counters: Sequence[Counter], said: str) -> None:
        self._counters, self.said = counters, said
        self._before: list[float] = []

    @classmethod
    def find(cls, powercap: Path = POWERCAP, gpu: bool = True) -> EnergyMeter:
        """What there is to read here; `said` names it, or says why there is nothing."""
        counters, reasons = _rapl(powercap)
        if gpu:
            counters += _nvml()
        if not counters:
            return cls([], "not measured: " + "; ".join(reasons))
        names = ", ".join(counter.name for counter in counters)
        return cls(counters, f"counted by {names}; other processes are in it")

    def start(self) -> None:
        """Take the readings before a turn."""
        self._before = [counter.read() for counter in self._counters]

    def read(self) -> float | None:
        """Joules since then."""
        if not self._counters:
            return None
        pairs = zip(self._counters, self._before, strict=True)
        return sum((counter.read() - before) % counter.wraps for counter, before in pairs) / 1e6


def _rapl(powercap: Path) -> tuple[list[Counter], list[str]]:
    counters, reasons = [], []
    for folder in sorted(powercap.glob("intel-rapl:*")):
        if folder.name.count(":") != 1:  # a part of a package, which is in the package's own count
            continue
        file = folder / "energy_uj"
        try:
            _microjoules(file)
            wraps = float((folder / "max_energy_range_uj").read_text()) + 1
        except (OSError, ValueError) as error:
            reasons.append(f"{folder.name}: {getattr(error, 'strerror', None) or error}")
            continue
        counters.append(Counter(folder.name, partial(_microjoules, file), wraps))
    return counters, reasons or ["the system has no RAPL counter (no intel-rapl under powercap)"]


def _microjoules(file: Path) -> int:
    return int(file.read_text())


def _nvml() -> list[Counter]:
    """NVIDIA's total energy since the driver was loaded, in millijoules."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return []
    count = ctypes.c_uint()
    if library.nvmlInit_v2() or library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return []
    counters = []
    for index in range(count.value):
        device, total = ctypes.c_void_p(), ctypes.c_ulonglong()
        read = partial(library.nvmlDeviceGetTotalEnergyConsumption, device, ctypes.byref(total))
        if not library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) and not read():
            counters.append(Counter(f"gpu{index}", partial(_after, read, total), float("inf")))
    return counters


def _after(read: Callable[[], object], total: ctypes.c_ulonglong) -> float:
    """What a call writes into `total`, millijoules, as microjoules."""
    read()
    return total.value * 1e3


def read_bandwidth(size: int, repetitions: int = 7) -> dict[str, list[float]]:
    """Bytes a second at which memory can be read with torch's present number of threads, by way of
    reading."""
    count, ways = ways_to_read(size)
    seconds = interleave(ways, repetitions)
    return {name: [count / value for value in seconds.of(name)] for name in ways}


def ways_to_read(size: int) -> tuple[int, dict[str, Contestant]]:
    """Three ways to read about so many bytes of memory, and how many they are.

    One token must read every weight once, so weight bytes over bandwidth is a floor that no plain
    decoding can go under. No single way reaches the limit on every machine: a sum may be bound by
    its additions, a matrix-vector product by its kernel. What is wanted is the most the memory can
    do, so a reader takes the best of all. The buffer is about as large as the weights are.
    """
    import torch

    values = min(max(size, SMALLEST_BUFFER), LARGEST_BUFFER) // 4
    buffer = torch.ones(values // 1024, 1024)
    vector = torch.ones(1024)
    flat = buffer.view(-1)
    ways: dict[str, Callable[[], object]] = {
        "sum": lambda: flat.sum(),
        "dot": lambda: torch.dot(flat, flat),
        "matrix-vector": lambda: torch.mv(buffer, vector),
    }
    return buffer.numel() * 4, {name: timed(way) for name, way in ways.items()}
