"""What the system says of a turn beside its seconds: the most memory a process used, and energy
where the machine counts it.

Memory: Linux keeps a process's largest resident size (VmHWM in /proc/PID/status), and writing 5 to
/proc/PID/clear_refs starts it anew. Energy: Intel's and AMD's RAPL counters under
/sys/class/powercap (whole packages, other processes included), and NVIDIA's total through NVML.
Knows no peers and no model; where the system says nothing the answer is None, with the reason.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
POWERCAP = Path("/sys/class/powercap")


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
        if not self._running:
            return None
        try:
            lines = (self._folder / "status").read_text().splitlines()
        except OSError:
            return None
        return next(
            (int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), None
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
        return cls(
            counters,
            "counted by "
            + ", ".join(counter.name for counter in counters)
            + "; other processes are in it",
        )

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
    counters = []
    reasons = []
    for folder in sorted(powercap.glob("intel-rapl:*")):
        if folder.name.count(":") != 1:  # a part of a package, which is in the package's own count
            continue
        file = folder / "energy_uj"
        try:
            int(file.read_text())
            wraps = float((folder / "max_energy_range_uj").read_text()) + 1
        except (OSError, ValueError) as error:
            reasons.append(f"{folder.name}: {getattr(error, 'strerror', None) or error}")
            continue
        counters.append(Counter(folder.name, lambda file=file: int(file.read_text()), wraps))  # type: ignore[misc]
    return counters, reasons or ["the system has no RAPL counter (no intel-rapl under powercap)"]


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
        device, value = ctypes.c_void_p(), ctypes.c_ulonglong()
        if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)):
            continue

        def read(device: ctypes.c_void_p = device) -> float:
            total = ctypes.c_ulonglong()
            library.nvmlDeviceGetTotalEnergyConsumption(device, ctypes.byref(total))
            return total.value * 1e3

        if not library.nvmlDeviceGetTotalEnergyConsumption(device, ctypes.byref(value)):
            counters.append(Counter(f"gpu{index}", read, float("inf")))
    return counters
