"""Collect samples, fit predictors, measure them on held-out text, and write them as one part."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from ..core.files import require_output
from ..errors import OptionError
from ..exits.features import need_rows
from ..exits.part import KIND
from ..llm import LLM
from ..trained.files import DESCRIPTION, TrainedPart, signature
from .exit_fitting import FitOptions, by_layer, curve, exit_shares, fit, fit_svms, split, summary
from .exit_samples import Collected, SampleOptions, collect, load_samples
from .own_text import Question

SAMPLES = "samples"  # the folder beside the part
CURVE = (0.02, 0.1, 0.25, 0.5, 1.0)


@dataclass(frozen=True)
class Observer:
    """Whom to tell how far it is."""

    collecting: Callable[[Collected], None] | None = None
    fitting: Callable[[int, int, float], None] | None = None


@dataclass(frozen=True)
class ExitReport:
    """What was fitted, and what it is worth on held-out text."""

    done: bool
    samples: int
    seconds: float
    layers: list[dict[str, Any]]
    summary: dict[str, float]
    curve: list[dict[str, float]]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def fit_exits(
    llm: LLM,
    questions: Callable[[Collected], Iterable[Question]],
    out: Path,
    taking: SampleOptions | None = None,
    options: FitOptions | None = None,
    *,
    max_seconds: float | None = None,
    with_curve: bool = False,
    observer: Observer | None = None,
    facts: dict[str, Any] | None = None,
) -> ExitReport:
    """Predictors for a model, in the folder `out`. Samples are kept in a folder below it, and a run
    that was stopped goes on with them."""
    taking, options, observer = (
        taking or SampleOptions(),
        options or FitOptions(),
        observer or Observer(),
    )
    _require_exits(llm, taking.first)
    require_output(out / DESCRIPTION)
    begin = time.perf_counter()
    done = collect(
        llm, questions, out / SAMPLES, taking, max_seconds=max_seconds, tell=observer.collecting
    )
    if done.stopped:
        return ExitReport(False, done.samples, time.perf_counter() - begin, [], {}, [])
    parts, layers = split(load_samples(out / SAMPLES), options.held_out), llm.model.layers
    tensors = fit(parts.fit, options, observer.fitting)
    svms = fit_svms(parts.fit, options.seed) if options.adainfer else {}
    report = ExitReport(
        True,
        done.samples,
        time.perf_counter() - begin,
        by_layer(tensors, parts.held_out, layers),
        summary(tensors, parts.held_out, layers),
        curve(parts, options, layers, CURVE) if with_curve else [],
    )
    settings = {
        "candidates": taking.candidates,
        "source": taking.source,
        "hidden": options.hidden,
        "layers": list(range(taking.first, layers)),
        "exits": exit_shares(tensors, parts.fit, layers),
    }
    said = {
        "tokens": done.samples,
        "options": {**asdict(taking), **asdict(options)},
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "held_out": report.as_dict(),
        **(facts or {}),
    }
    pool = {"vocabulary": torch.tensor(taking.pool, dtype=torch.int32)} if taking.pool else {}
    TrainedPart(KIND, signature(llm.model), settings, {**tensors, **svms, **pool}, said).save(out)
    return report


def _require_exits(llm: LLM, first: int) -> None:
    """Raise unless there is a layer to look after."""
    need_rows(llm.model)
    layers = llm.model.layers
    if layers < 2:
        raise OptionError("a model of one layer has no exit; there is nothing to fit")
    if first >= layers:
        raise OptionError(
            f"first={first} leaves no exit in this model of {layers} layers; use 1 to {layers - 1}"
        )
