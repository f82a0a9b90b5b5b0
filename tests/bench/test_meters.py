"""Memory and energy as the system tells them, from files that are made here."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from selfspec.bench.meters import EnergyMeter, PeakMemory


def a_process(folder: Path, kilobytes: int) -> None:
    (folder / "7").mkdir(exist_ok=True)
    (folder / "7" / "status").write_text(
        f"Name:\tx\nVmPeak:\t 99999 kB\nVmHWM:\t {kilobytes} kB\nVmRSS:\t {kilobytes - 1} kB\n"
    )
    (folder / "7" / "clear_refs").touch()


def test_the_largest_resident_size_since_the_start(tmp_path: Path) -> None:
    """Catches an earlier peak taken for this turn's, kilobytes taken for bytes, virtual memory for
    resident, and the peak taken for what is resident now."""
    a_process(tmp_path, 5)
    memory = PeakMemory(7, tmp_path)
    assert memory.read() is None, "not started"
    memory.start()
    assert (tmp_path / "7" / "clear_refs").read_text() == "5"
    a_process(tmp_path, 3)
    assert memory.read() == 3 * 1024
    assert memory.now() == 2 * 1024


def test_where_the_system_says_nothing_there_is_nothing(tmp_path: Path) -> None:
    """Catches a benchmark that fails without /proc, or shows a peak that may be another turn's."""
    memory = PeakMemory(8, tmp_path)
    memory.start()
    assert memory.read() is None and memory.now() is None


@pytest.mark.skipif(
    not os.access(f"/proc/{os.getpid()}/clear_refs", os.W_OK),
    reason="this system cannot start a peak anew",
)
def test_a_real_process_forgets_its_peak() -> None:
    """Catches a kernel interface that changed: 80 MB that were given back must not be in the next
    turn's peak."""
    memory = PeakMemory(os.getpid())
    with mmap.mmap(-1, 80_000_000) as block:  # given back for sure, unlike an allocator's
        block[::4096] = bytes([1]) * len(range(0, len(block), 4096))
        memory.start()
        high = memory.read()
    memory.start()
    low = memory.read()
    assert high is not None and low is not None and high - low > 40_000_000


def a_counter(folder: Path, name: str, microjoules: int, largest: int = 1_000_000) -> Path:
    (folder / name).mkdir(exist_ok=True)
    (folder / name / "energy_uj").write_text(f"{microjoules}\n")
    (folder / name / "max_energy_range_uj").write_text(f"{largest}\n")
    return folder / name / "energy_uj"


def test_packages_are_summed_and_their_parts_are_not(tmp_path: Path) -> None:
    """Catches a core's energy counted twice, microjoules taken for joules, and a counter that began
    anew as negative energy."""
    first, second = (
        a_counter(tmp_path, "intel-rapl:0", 100),
        a_counter(tmp_path, "intel-rapl:1", 999_000),
    )
    a_counter(tmp_path, "intel-rapl:0:0", 5)
    meter = EnergyMeter.find(tmp_path, gpu=False)
    meter.start()
    first.write_text("500100")
    second.write_text("200")
    assert meter.read() == pytest.approx(0.5 + 0.001201)
    assert meter.said == "counted by intel-rapl:0, intel-rapl:1; other processes are in it"


def test_without_a_counter_the_reason_is_said(tmp_path: Path) -> None:
    """Catches zero joules where nobody counted."""
    meter = EnergyMeter.find(tmp_path, gpu=False)
    meter.start()
    assert meter.read() is None and "no RAPL counter" in meter.said
    (tmp_path / "intel-rapl:0").mkdir()
    assert "intel-rapl:0: No such file" in EnergyMeter.find(tmp_path, gpu=False).said
