"""A whole run for a small part: load, keep the model's states, train (or go on), save the part with
a card, report.

What lies in the output folder: `part.json` and `part.safetensors`, the part; `README.md`, its card;
`training.json` and `training.png`, the report; `states/`, what the model computes on the text,
which can be deleted or shared between runs; `checkpoint.safetensors`, which can be deleted. Knows
no command line.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers

from ..core.text_rows import require
from ..errors import DataError, OptionError
from ..model.families import family_of
from ..model.from_transformers import from_transformers
from ..model.load.loading import load
from ..trained.files import TrainedPart, load_part, signature
from ..trained.successors import SUCCESSORS, Successors
from . import checkpoints, plots
from .draft_head import HeadRecipe, likeliest, stream_size
from .parts import PartOptions, PartRecipe, Progress, Run, train_part
from .states import StateOptions, States, gather, kept_options
from .successors import CountOptions, count, measure, places

REPORT = "training.json"
# who drafts with a part
DRAFTER_OF = {
    "draft-head": "draft-head",
    "exit-adapter": "early-exit",
    "draft-lora": "layer-skip",
    SUCCESSORS: "recycle",
}


@dataclass(frozen=True)
class PartReport:
    """What a run gave so far."""

    kind: str
    folder: Path
    done: bool
    """False if the time was up; the same command goes on."""
    step: int
    tokens: int
    """Trained in all steps."""
    seconds: float
    """Of all steps, those before an interruption too."""
    acceptance: tuple[float, ...]
    """By depth, on held-out text: the share of drafts that are right, among those whose
    predecessors were."""
    log: tuple[dict[str, Any], ...] = ()

    @property
    def drafter(self) -> str:
        """The drafter that takes the part."""
        return DRAFTER_OF[self.kind]

    def as_dict(self) -> dict[str, Any]:
        """What JSON can hold; the folder stays out, so that it can be moved."""
        return {
            "schema": 1,
            "kind": self.kind,
            "done": self.done,
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "acceptance": list(self.acceptance),
            "log": list(self.log),
        }


@dataclass(frozen=True)
class StopCheck:
    """Told how a run goes on."""

    reading: Callable[[int, int], None] = lambda done, tokens_per_second: None
    training: Callable[[Progress], None] = lambda progress: None


def train_small_part(
    model: str,
    files: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    recipe: PartRecipe | None = None,
    options: PartOptions | None = None,
    length: int = StateOptions.length,
    held_out: float = StateOptions.held_out,
    states: str | os.PathLike[str] | None = None,
    start_from: str | os.PathLike[str] | None = None,
    plot: bool = True,
    observer: StopCheck | None = None,
) -> PartReport:
    """Train a part (a draft head, if no other recipe is named) on text that the model wrote. Called
    again after an interruption, it goes on where it was.

    `states`: a folder to keep the model's states in, or one where an earlier run kept them.
    `start_from`: a part to begin with.
    """
    recipe, options, observer = (
        recipe or HeadRecipe(),
        options or PartOptions(),
        observer or StopCheck(),
    )
    began = time.monotonic()
    sources = [os.fspath(file) for file in files]
    folder = _prepare(Path(out), sources, plot)
    kept = Path(states) if states else folder / "states"
    loaded = load(model, dtype="float32", device="cuda" if torch.cuda.is_available() else "cpu")
    layered = from_transformers(loaded.model, owned=False)
    base, shape = signature(layered), layered.shape
    wanted = StateOptions(recipe.collectors(shape), length=length, held_out=held_out)
    complete = gather(
        layered, base, sources, kept, wanted, _reading(observer, began, options.max_minutes)
    )
    if not complete:
        return PartReport(recipe.kind, folder, False, 0, 0, 0.0, ())
    found = States(kept)
    scale = stream_size(layered, found.batch(found.trained[:1])["tokens"][0].tolist())
    del layered
    vocabulary = likeliest(found.frequencies(shape.vocabulary), recipe.vocabulary)
    family = family_of(loaded.model.config)
    assert family is not None, (
        "a model without a family has no layers that states could be taken from"
    )
    loaded.model.requires_grad_(False)
    vocabulary = vocabulary.to(loaded.model.device)
    trained = recipe.training(loaded.model, family, shape, vocabulary, scale, options)
    if start_from is not None:
        trained.begin_with(load_part(start_from))
    identity = {
        "base": base["values"],
        "recipe": {"kind": recipe.kind, **vars(recipe)},
        "options": {**asdict(options), "max_minutes": None},
        "text": _text_name(found),
        "start_from": None if start_from is None else str(start_from),
    }
    left = (
        None
        if options.max_minutes is None
        else max(1e-6, options.max_minutes - (time.monotonic() - began) / 60)
    )
    run, done = train_part(
        trained, found, folder, replace(options, max_minutes=left), identity, observer.training
    )
    report = _report(recipe.kind, folder, run, done)
    facts = _facts(report, loaded.name, found) | {
        "recipe": dict(vars(recipe)),
        "options": asdict(options),
    }
    TrainedPart(recipe.kind, base, trained.settings(), trained.tensors(), facts).save(folder)
    _write_report(folder, report, facts, plot)
    return report


def train_successors(
    model: str,
    files: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    options: CountOptions | None = None,
    length: int = StateOptions.length,
    held_out: float = StateOptions.held_out,
    states: str | os.PathLike[str] | None = None,
    max_minutes: float | None = None,
    observer: StopCheck | None = None,
) -> PartReport:
    """Count what the model says after tokens and pairs of them, on text that it wrote. `states` may
    be those of another part."""
    options, observer, began = options or CountOptions(), observer or StopCheck(), time.monotonic()
    sources = [os.fspath(file) for file in files]
    folder = _prepare(Path(out), sources, plot=False)
    kept = Path(states) if states else folder / "states"
    loaded = load(model, dtype="float32", device="cuda" if torch.cuda.is_available() else "cpu")
    layered = from_transformers(loaded.model, owned=True)
    base, vocabulary = signature(layered), layered.shape.vocabulary
    wanted = kept_options(kept) or StateOptions((), length=length, held_out=held_out)
    if not gather(layered, base, sources, kept, wanted, _reading(observer, began, max_minutes)):
        return PartReport(SUCCESSORS, folder, False, 0, 0, 0.0, ())
    found = States(kept)
    settings = {"vocabulary": vocabulary}
    tensors = count(places(found, found.trained), vocabulary, options)
    part = TrainedPart(SUCCESSORS, base, settings, tensors)
    acceptance = measure(Successors(part).after, found, found.held_out)
    report = PartReport(
        SUCCESSORS, folder, True, 1, found.tokens, time.monotonic() - began, acceptance
    )
    facts = _facts(report, loaded.name, found) | {"options": asdict(options)}
    replace(part, facts=facts).save(folder)
    _write_report(folder, report, facts, plot=False)
    return report


def _prepare(out: Path, sources: Sequence[str], plot: bool) -> Path:
    """The output folder. What would fail late and can be known now fails here."""
    if not sources:
        raise DataError(
            "no data was named, so there is nothing to train on; make some with: selfspec data "
            "MODEL --prompts FILES"
        )
    require(sources)
    if plot:
        plots.require_matplotlib()
    if (out / "config.json").exists():
        raise OptionError(f"{out} holds a model; name a folder of its own for the part")
    checkpoints.make_folder(out)
    return out


def _reading(observer: StopCheck, began: float, max_minutes: float | None) -> Callable[[int], bool]:
    def go_on(tokens: int) -> bool:
        spent = time.monotonic() - began
        observer.reading(tokens, round(tokens / spent))
        return spent < 60 * (max_minutes or math.inf)

    return go_on


def _facts(report: PartReport, model: str, found: States) -> dict[str, Any]:
    """What a part says of itself."""
    return {
        **{
            name: value for name, value in report.as_dict().items() if name not in ("log", "schema")
        },
        "model": Path(model).name,
        "text": {
            "conversations": len(found.trained),
            "tokens": found.tokens,
            "held_out": len(found.held_out),
        },
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }


def _text_name(states: States) -> str:
    return hashlib.blake2b(" ".join(sorted(states.names)).encode(), digest_size=8).hexdigest()


def _report(kind: str, folder: Path, run: Run, done: bool) -> PartReport:
    acceptance = tuple(run.log[-1]["acceptance"]) if run.log else ()
    return PartReport(
        kind, folder, done, run.step, run.tokens, run.seconds, acceptance, tuple(run.log)
    )


def _write_report(folder: Path, report: PartReport, facts: dict[str, Any], plot: bool) -> None:
    checkpoints.write_json(folder / REPORT, {**report.as_dict(), **facts})
    (folder / "README.md").write_text(_card(report, facts), encoding="utf-8")
    if plot:
        plots.plot_part(report.as_dict(), folder / "training.png")


def _card(report: PartReport, facts: dict[str, Any]) -> str:
    """What somebody who finds the folder wants to know."""
    rows = "".join(
        f"| {depth} | {share:.1%} |\n" for depth, share in enumerate(report.acceptance, start=1)
    )
    text, made = facts["text"], "Counted"
    unfinished = "" if report.done else " Not finished."
    if report.kind != SUCCESSORS:
        minutes = f"{report.seconds / 60:.0f} minutes"
        made = f"Trained for {report.step} steps ({report.tokens:,} tokens, {minutes})"
    return f"""# A {report.kind} for {facts["model"]}

Drafts for this model and for no other. What is generated stays the model's own text.
Use it with selfspec:

    selfspec generate MODEL "Your prompt" --draft {report.drafter} \\
      --draft-option part={report.folder.name} --stats

{made} on {text["conversations"]:,} answers
of the model itself ({text["tokens"]:,} tokens with their prompts).{unfinished}
On answers to prompts that were not trained, draft k is the model's own next token, given that
those before it were, in

| draft | right |
|---|---|
{rows}
Settings and curves: `part.json`, `training.json`.
"""
