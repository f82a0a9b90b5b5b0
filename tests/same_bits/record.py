"""The record on disk, the processes that compute the variants, and what a comparison says.

Each variant needs a process of its own: kernels are loaded once, and torch chooses its own
instructions when it starts. Knows neither selfspec nor what the digests are of.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RECORD = Path(__file__).with_name("record.json")
_V2 = {"sse4_2", "ssse3", "popcnt", "cx16"}
_V3 = _V2 | {"avx2", "fma", "bmi1", "bmi2", "f16c", "movbe"}
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


@dataclass(frozen=True)
class Variant:
    """How the kernels are compiled, which instructions torch may use, and what that needs."""

    march: str
    torch: str
    needs: frozenset[str]


VARIANTS = {  # in this order: a variant's number decides a part of its cases
    "avx512": Variant("x86-64-v4", "avx512", frozenset(_V4)),
    "avx2": Variant("x86-64-v3", "avx2", frozenset(_V3)),
    "plain": Variant("x86-64-v2", "default", frozenset(_V2)),
}


def cpu() -> dict[str, str]:
    """Of the first processor: its maker (vendor_id), its name (model name) and its flags."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().split("\n\n")[0].splitlines() if info.exists() else []
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}


def why_not(variant: str) -> str:
    """Why this machine cannot run a variant; "" if it can."""
    missing = VARIANTS[variant].needs - set(cpu().get("flags", "").split())
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"the record is of x86-64 processors, and this is {platform.machine()}"
    return f"this processor lacks {', '.join(sorted(missing))}" if missing else ""


def start(variant: str) -> subprocess.Popen[str]:
    """Compute a variant in another process."""
    chosen = VARIANTS[variant]
    here = str(Path(__file__).parents[1])
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([here, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        "ATEN_CPU_CAPABILITY": chosen.torch,
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }
    number = str(list(VARIANTS).index(variant))
    command = [sys.executable, "-m", "same_bits", "--compute", number, chosen.march]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True)


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    """What such a process found: `made` (where) and what `cases.computed` says."""
    out, error = process.communicate()
    if process.returncode:
        raise RuntimeError(f"a variant could not be computed:\n{error[-3000:]}")
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def read() -> dict[str, Any]:
    record: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    return record


# ----------------------------------------------------------------------------------- comparison

PLACE = ("maker", "torch", "compiler")  # where these are equal, bits must be


@dataclass(frozen=True)
class Verdict:
    """What a comparison with the record found."""

    elsewhere: list[str]
    """In what this place differs from that of the record."""
    texts: list[str]
    """What differs in the texts; so `bits` for logits and log-probabilities."""
    bits: list[str]
    faults: list[str]
    """What is wrong whatever the record says."""

    @property
    def failed(self) -> bool:
        return bool(self.faults or self.texts or (self.bits and not self.elsewhere))

    def __str__(self) -> str:
        said = ["Processor maker, torch and compiler are those of the record."]
        if self.elsewhere:
            said = [f"Made elsewhere than the record: {'; '.join(self.elsewhere)}."]
        said += _listed("Wrong in itself", self.faults)
        said += _listed("TEXTS differ from the record", self.texts)
        said += _listed("BITS of logits or log-probabilities differ from the record", self.bits)
        if self.bits and not self.texts:
            said.append("All texts are those of the record.")
        if self.failed:
            said.append("A change that is meant needs a new record: tests/same_bits/__init__.py.")
        return "\n".join(said)


def _listed(title: str, lines: list[str], most: int = 12) -> list[str]:
    if not lines:
        return []
    more = [f"  and {len(lines) - most} more"] if len(lines) > most else []
    return [f"{title} ({len(lines)}):", *(f"  {line}" for line in lines[:most]), *more]


def compare(found: dict[str, Any], record: dict[str, Any], variant: str) -> Verdict:
    """What one variant's process found, beside the record."""
    made, was = found["made"], record["made"]
    elsewhere = [
        f"{each} {made[each]}, recorded {was[each]}" for each in PLACE if made[each] != was[each]
    ]
    verdict = Verdict(elsewhere, [], [], [])
    verdict.faults.extend(f"not the text of plain decoding: {each}" for each in found["strays"])
    verdict.faults.extend(f"no draft kept, or none rejected: {each}" for each in found["idle"])
    ours, theirs = dict(_leaves(found["models"])), dict(_leaves(record["variants"][variant]))
    for path in sorted(ours.keys() | theirs.keys()):
        if ours.get(path) != theirs.get(path):
            there = "" if path in ours and path in theirs else " (only in one of both)"
            kind = verdict.texts if "texts" in path[1] else verdict.bits
            kind.append(": ".join(path) + there)
    return verdict


def _leaves(
    tree: dict[str, Any], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], str]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*path, name))
        else:
            yield (*path, name), value


def make_anew() -> None:
    """Overwrite the record. Needs a machine that runs all variants."""
    for variant in VARIANTS:
        if reason := why_not(variant):
            raise SystemExit(f"no record can be made here: {variant}: {reason}")
    processes = {variant: start(variant) for variant in VARIANTS}
    found = {variant: finish(process) for variant, process in processes.items()}
    for variant, each in found.items():
        if wrong := each["strays"] + each["idle"]:
            raise SystemExit(f"no record of what is wrong in itself: {variant}: {wrong}")
    made = found["avx512"]["made"]
    variants = {variant: each["models"] for variant, each in found.items()}
    text = json.dumps({"made": made, "variants": variants}, indent=1)
    RECORD.write_text(text + "\n", encoding="utf-8")
