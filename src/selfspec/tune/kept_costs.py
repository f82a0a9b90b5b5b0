"""What a model's parts cost on this machine, measured once: a small file in the user's cache.

Costs follow from sizes and from who computes, so models of the same sizes share them. Before they
are believed again, a few whole passes are timed: another load, another system or another version
of selfspec shows there, and then all is measured anew.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from ..core.files import is_there, write_whole
from ..core.json_text import from_json
from ..core.machine import Machine, this_machine
from ..core.schema import Unfit, made
from ..core.user_cache import cache_root
from ..model.layered import LayeredModel
from .steps import Steps, compared, measure_quietly

SCHEMA = 1
HOLDS, FAR = 0.05, 0.15  # the median and the largest error of whole passes up to which they agree
LOOK = 2.0  # seconds of a comparison


@dataclass(frozen=True)
class Costs:
    """One file."""

    schema: int
    machine: Machine
    weights: str
    steps: Steps


def costs_of(
    model: LayeredModel,
    weights: str,
    seconds: float,
    tick: Callable[[float], None] = lambda share: None,
) -> tuple[Steps, bool]:
    """The costs of a model with this kind of weights, and whether they are those of before. Else
    they are measured, for about so many seconds, and kept if whole passes agree with them and
    nothing else ran meanwhile."""
    file, end = _file(model, weights), time.perf_counter() + seconds
    if (known := _read(file)) is not None:
        now = compared(model, known, min(LOOK, seconds))
        if _agree(now.errors):
            return now, True
    steps = measure_quietly(model, max(0.0, end - time.perf_counter()), tick)
    if not steps.busy and _agree(steps.errors):
        costs = Costs(SCHEMA, this_machine(), weights, steps)
        write_whole(file, json.dumps(asdict(costs), indent=1) + "\n")
    return steps, False


def _agree(errors: Sequence[float]) -> bool:
    """Whether whole passes take what their parts predict. Without any nobody knows."""
    sizes = [abs(error) for error in errors]
    return bool(sizes) and median(sizes) <= HOLDS and max(sizes) <= FAR


def _file(model: LayeredModel, weights: str) -> Path:
    """Where they are kept: by sizes, weights, who computes and the machine."""
    shape = model.shape
    told = shape, weights, model.ops.kernel, str(model.dtype), str(model.device), this_machine()
    digest = hashlib.sha256(repr(told).encode()).hexdigest()[:12]
    return cache_root() / "costs" / f"{shape.family}-{shape.layers}-{weights}-{digest}.json"


def _read(file: Path) -> Steps | None:
    """What is kept. A file that nobody can read is as good as none: it is written again."""
    if not is_there(file):
        return None
    try:
        found = made(Costs, from_json(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, Unfit):
        return None
    return found.steps if found.schema == SCHEMA else None
