"""Where and how a run was made: commit, versions, machine, threads. Knows nothing of what was
measured; writes no paths."""

from __future__ import annotations

import datetime
import os
import platform
import re
import subprocess
from pathlib import Path

import psutil

from ..core.machine import cpu_name
from .schema import Provenance

RECORDED = re.compile(r"(OMP|MKL|KMP|GOMP)_[A-Z_]+|SELFSPEC_(?!CACHE)[A-Z_]+")
CHECKOUT = Path(__file__).resolve().parents[3]


def scrub(text: str) -> str:
    """Take absolute paths out of a message: a result file is published, a home folder is not."""
    return re.sub(r"(?<![\w.<:/])/(?:[\w.@+~-]+/)+[\w.@+~-]*", "<path>/", text)


def results_folder() -> Path:
    """Where results go when nothing is said: among the committed ones in a checkout, else here."""
    folder = CHECKOUT / "benchmarks" / "results"
    return folder if folder.is_dir() else Path.cwd()


def gather(command: str, threads: int, versions: dict[str, str]) -> Provenance:
    """Everything a reader needs to judge or repeat the numbers."""
    # results do not count, a run writes them itself
    changed = git("status", "--porcelain", "--", ".", ":!benchmarks/results")
    recorded = sorted(key for key in os.environ if RECORDED.fullmatch(key))
    return Provenance(
        command=scrub(command),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        commit=git("rev-parse", "HEAD"),
        uncommitted_changes=None if changed is None else bool(changed),
        cpu=cpu_name(),
        cores=os.cpu_count() or 1,
        threads=threads,
        memory_bytes=psutil.virtual_memory().total,
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        versions=dict(sorted(versions.items())),
        environment={key: scrub(os.environ[key]) for key in recorded},
    )


def slug(name: str) -> str:
    """A name for a file: 'AMD EPYC 7B13' becomes 'amd-epyc-7b13'."""
    plain = name.lower().replace("(r)", "").replace("(tm)", "")
    return re.sub(r"[^a-z0-9]+", "-", plain).strip("-")


def git(*arguments: str, checkout: Path = CHECKOUT) -> str | None:
    """What git says of a checkout, or None when there is no git or no checkout (an installed
    wheel)."""
    try:
        words = ["git", "-C", str(checkout), *arguments]
        done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
