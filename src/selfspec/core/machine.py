"""Which machine this is: the processor, its cores, the threads that are used."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Machine:
    """What decides about speed, as far as a name can say it."""

    cpu: str
    cores: int
    threads: int

    def __str__(self) -> str:
        return f"{self.cpu}, {self.cores} cores, {self.threads} threads"


def this_machine() -> Machine:
    """The one that runs this, with as many threads as torch takes now."""
    return Machine(cpu_name(), os.cpu_count() or 1, torch.get_num_threads())


def cpu_name() -> str:
    """The processor as the system names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(iter(named), "") or platform.processor() or platform.machine() or "unknown CPU"
