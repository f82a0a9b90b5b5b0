"""Which machine this is: the processor, its cores, the threads that are used."""

from __future__ import annotations

import os
import platform
import re
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
    """The processor as the system names it. Rented machines often say the maker alone, such as
    "AMD EPYC", of whatever generation: then with the numbers that tell which, and with AVX2 where
    that is all they show: some hide the longer vectors that the processor has."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        lines = []
    facts = {
        key.strip(): value.strip() for key, _, value in (each.partition(":") for each in lines)
    }
    name = facts.get("model name", "")
    if name and not re.search(r"\d", name) and "cpu family" in facts:
        flags = facts.get("flags", "").split()
        longest = ", AVX2" if "avx2" in flags and "avx512f" not in flags else ""
        name = f"{name} (family {facts['cpu family']} model {facts.get('model', '?')}{longest})"
    return name or platform.processor() or platform.machine() or "unknown CPU"
