"""A whole run for a small part: load, keep the model's states, train (or go on), save, report.

The output folder holds the part (`part.json`, `part.safetensors`), its card (`README.md`), the
report (`training.json`, `training.png`), what the model computes on the text (`states/`, which may
be deleted or shared between runs) and `checkpoint.safetensors`, which may be deleted. Knows no
command line.
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
from ..model.layered import LayeredModel
from ..model.load.loading import load
from ..trained.files import TrainedPart, load_part, signature
from ..trained.kinds import KINDS
from ..trained.successors import SUCCESSORS, Successors
from . import checkpoints, plots
from .draft_head import HeadRecipe, likeliest, stream_size
from .parts import FrozenModel, PartOptions, PartRecipe, Progress, train_part
from .states import StateOptions, States, gather, kept_options
from .successors import CountOptions, count, measure, places

REPORT = "training.json"


@dataclass(frozen=True)
class PartReport:
    """What a run gave so far."""

    kind: str
    folder: Path
    done: bool  # False if the time was up: the same command goes on
    step: int
    tokens: int  # trained in all steps
    seconds: float  # of all steps, those before an interruption too
    acceptance: tuple[float, ...]
    """By depth, on held-out text: the share of drafts that are right, if those before were."""
    log: tuple[dict[str, Any], ...] = ()

    @property
    def drafter(self) -> str:
        """The drafter that takes the part."""
        return KINDS[self.kind].drafter

    def as_dict(self) -> dict[str, Any]:
        """What JSON can hold. The folder stays out, so that it can be moved."""
        values = {**vars(self), "acceptance": list(self.acceptance), "log": list(self.log)}
        return {"schema": 1} | {name: value for name, value in values.items() if name != "folder"}


@dataclass(frozen=True)
class Observer:
    """Is told how a run goes on."""

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
    observer: Observer | None = None,
) -> PartReport:
    """Train a part (by default a draft head) on text that the model wrote. Called again after an
    interruption, it goes on where it was.

    `states`: a folder to keep the model's states in, or one where an earlier run kept them.
    `start_from`: a part to begin with.
    """
    recipe, options = recipe or HeadRecipe(), options or PartOptions()
    observer, began = observer or Observer(), time.monotonic()
    sources = [os.fspath(file) for file in files]
    folder = _prepare(Path(out), sources, plot)
    kept = Path(states) if states else folder / "states"
    loaded = load(model, dtype="float32", device="cuda" if torch.cuda.is_available() else "cpu")
    layered = from_transformers(loaded.model, owned=False)
    base, layers = signature(layered), recipe.state_layers(layered.shape)
    wanted = StateOptions(layers, length=length, held_out=held_out)
    go_on = _reading(observer, began, options.max_minutes)
    if not gather(layered, base, sources, kept, wanted, go_on):
        return PartReport(recipe.kind, folder, False, 0, 0, 0.0, ())
    text = States(kept)
    frozen = _frozen(loaded.model, layered, text, recipe.vocabulary)
    del layered
    trained = recipe.training(frozen, options)
    if start_from is not None:
        trained.begin_with(load_part(start_from))
    identity = {
        "base": base["values"],
        "recipe": {"kind": recipe.kind, **vars(recipe)},
        "options": {**asdict(options), "max_minutes": None},
        "text": _text_name(text),
        "start_from": None if start_from is None else str(start_from),
    }
    left = options.max_minutes
    if left is not None:
        left = max(1e-6, left - (time.monotonic() - began) / 60)
    limited = replace(options, max_minutes=left)
    run, done = train_part(trained, text, folder, limited, identity, observer.training)
    acceptance = tuple(run.log[-1]["acceptance"]) if run.log else ()
    report = PartReport(
        recipe.kind, folder, done, run.step, run.tokens, run.seconds, acceptance, tuple(run.log)
    )
    facts = _facts(report, loaded.name, text)
    facts |= {"recipe": dict(vars(recipe)), "options": asdict(options)}
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
    observer: Observer | None = None,
) -> PartReport:
    """Count what the model says after tokens and pairs of them, on text that it wrote. `states` may
    be those of another part."""
    options, observer, began = options or CountOptions(), observer or Observer(), time.monotonic()
    sources = [os.fspath(file) for file in files]
    folder = _prepare(Path(out), sources, plot=False)
    kept = Path(states) if states else folder / "states"
    loaded = load(model, dtype="float32", device="cuda" if torch.cuda.is_available() else "cpu")
    layered = from_transformers(loaded.model, owned=True)
    base, vocabulary = signature(layered), layered.shape.vocabulary
    wanted = kept_options(kept) or StateOptions((), length=length, held_out=held_out)
    if not gather(layered, base, sources, kept, wanted, _reading(observer, began, max_minutes)):
        return PartReport(SUCCESSORS, folder, False, 0, 0, 0.0, ())
    text = States(kept)
    tensors = count(places(text, text.trained), vocabulary, options)
    part = TrainedPart(SUCCESSORS, base, {"vocabulary": vocabulary}, tensors)
    acceptance = measure(Successors(part).after, text, text.held_out)
    seconds = time.monotonic() - began
    report = PartReport(SUCCESSORS, folder, True, 1, text.tokens, seconds, acceptance)
    facts = _facts(report, loaded.name, text) | {"options": asdict(options)}
    replace(part, facts=facts).save(folder)
    _write_report(folder, report, facts, plot=False)
    return report


def _prepare(out: Path, sources: Sequence[str], plot: bool) -> Path:
    """The output folder. What would fail late and can be known now fails here."""
    if not sources:
        raise DataError(
            "no data was named to train on; make some with: selfspec data MODEL --prompts FILES"
        )
    require(sources)
    if plot:
        plots.require_matplotlib()
    if (out / "config.json").exists():
        raise OptionError(f"{out} holds a model; name a folder of its own for the part")
    checkpoints.make_folder(out)
    return out


def _reading(observer: Observer, began: float, max_minutes: float | None) -> Callable[[int], bool]:
    def go_on(tokens: int) -> bool:
        spent = time.monotonic() - began
        observer.reading(tokens, round(tokens / spent))
        return spent < 60 * (max_minutes or math.inf)

    return go_on


def _facts(report: PartReport, model: str, text: States) -> dict[str, Any]:
    """What a part says of itself."""
    said = report.as_dict()
    return {name: said[name] for name in said if name not in ("log", "schema")} | {
        "model": Path(model).name,
        "text": {
            "conversations": len(text.trained),
            "tokens": text.tokens,
            "held_out": len(text.held_out),
        },
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }


def _frozen(network: Any, layered: LayeredModel, text: States, vocabulary: int) -> FrozenModel:
    """The model to train for, with the tokens that are likeliest in its text."""
    family, shape = family_of(network.config), layered.shape
    assert family is not None  # states were taken from its layers
    network.requires_grad_(False)
    tokens = likeliest(text.frequencies(shape.vocabulary), vocabulary).to(network.device)
    scale = stream_size(layered, text.batch(text.trained[:1])["tokens"][0].tolist())
    return FrozenModel(network, family, shape, tokens, scale)


def _text_name(states: States) -> str:
    return hashlib.blake2b(" ".join(sorted(states.names)).encode(), digest_size=8).hexdigest()


def _write_report(folder: Path, report: PartReport, facts: dict[str, Any], plot: bool) -> None:
    checkpoints.write_json(folder / REPORT, {**report.as_dict(), **facts})
    (folder / "README.md").write_text(_card(report, facts), encoding="utf-8")
    if plot:
        plots.plot_part(report.as_dict(), folder / "training.png")


def _card(report: PartReport, facts: dict[str, Any]) -> str:
    """What somebody who finds the folder wants to know."""
    shares = enumerate(report.acceptance, start=1)
    rows = "".join(f"| {depth} | {share:.1%} |\n" for depth, share in shares)
    text, made = facts["text"], "Counted"
    unfinished = "" if report.done else " Not finished."
    if report.kind != SUCCESSORS:
        minutes = f"{report.seconds / 60:.0f} minutes"
        made = f"Trained for {report.step} steps ({report.tokens:,} tokens, {minutes})"
    return f"""# A {report.kind} for {facts["model"]}

Drafts for this model and for no other. What is generated stays the model's own text.
Use it with selfspec:

    selfspec generate MODEL "Your prompt" --stats \\
      --draft {report.drafter} --draft-option part={report.folder.name}

{made} on {text["conversations"]:,} answers
of the model itself ({text["tokens"]:,} tokens with their prompts).{unfinished}
On answers to prompts that were not trained, draft k is the model's own next token, given that
those before it were, in

| draft | right |
|---|---|
{rows}
Settings and curves: `part.json`, `training.json`.
"""
