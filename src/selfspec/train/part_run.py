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
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..core import door
from ..core.files import clear_left_over, write_whole
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
from .live_states import LiveStates
from .parts import FrozenModel, PartOptions, PartRecipe, Progress, train_part
from .states import StateOptions, States, Text, gather, kept_options, read_conversations
from .successors import CountOptions, count, measure, places

REPORT = "training.json"
# cuDNN's plans each new shape for a tenth of a second, and no two batches have the same shape
STEADY_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


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
    weights: str = StateOptions.weights,
    states: str | os.PathLike[str] | None = None,
    start_from: str | os.PathLike[str] | None = None,
    plot: bool = True,
    observer: Observer | None = None,
) -> PartReport:
    """Train a part (by default a draft head) on text that the model wrote. Called again after an
    interruption, it goes on where it was.

    `states`: a folder to keep the model's states in, or one where an earlier run kept them. On a
    card none are kept unless a folder is named.
    `start_from`: a part to begin with.
    """
    recipe, options = recipe or HeadRecipe(), options or PartOptions()
    observer, deadline = observer or Observer(), _deadline(options.max_minutes)
    job = _Job(model, files, out, states, weights, plot, owned=False)
    layers = recipe.state_layers(job.layered.shape)
    wanted = StateOptions(layers, length=length, held_out=held_out, weights=weights)
    live = states is None and computes_live(job.network.device)
    text = job.read_live(wanted) if live else job.read(wanted, deadline, observer)
    if text is None:
        return PartReport(recipe.kind, job.folder, False, 0, 0, 0.0, ())
    text.train_only(options.of_text)
    frozen = _frozen(job.network, job.layered, text, recipe.vocabulary)
    del job.layered  # from here on only the network itself is needed
    trained = recipe.training(frozen, options)
    if start_from is not None:
        trained.begin_with(load_part(start_from))
    identity = {
        "base": job.base["values"],
        "recipe": {"kind": recipe.kind, **vars(recipe)},
        "options": {**asdict(options), "max_minutes": None},
        "text": hashlib.blake2b(" ".join(sorted(text.names)).encode(), digest_size=8).hexdigest(),
        "start_from": None if start_from is None else str(start_from),
    }
    with sdpa_kernel(STEADY_ATTENTION):
        run, done = train_part(trained, text, job.folder, identity, deadline, observer.training)
    acceptance = tuple(run.log[-1]["acceptance"]) if run.log else ()
    report = PartReport(
        recipe.kind, job.folder, done, run.step, run.tokens, run.seconds, acceptance, tuple(run.log)
    )
    said = {"recipe": dict(vars(recipe)), "options": asdict(options)}
    part = TrainedPart(recipe.kind, job.base, trained.settings(), trained.tensors(), said)
    job.save(part, report, text)
    return report


def train_successors(
    model: str,
    files: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    options: CountOptions | None = None,
    length: int = StateOptions.length,
    held_out: float = StateOptions.held_out,
    weights: str = StateOptions.weights,
    states: str | os.PathLike[str] | None = None,
    max_minutes: float | None = None,
    observer: Observer | None = None,
) -> PartReport:
    """Count what the model says after tokens and pairs of them, on text that it wrote. `states` may
    be those of another part."""
    options, began = options or CountOptions(), time.monotonic()
    asked = StateOptions((), length=length, held_out=held_out, weights=weights)
    wanted = kept_options(_states_of(out, states)) or asked
    job = _Job(model, files, out, states, wanted.weights)
    text = job.read(wanted, _deadline(max_minutes), observer or Observer())
    if text is None:
        return PartReport(SUCCESSORS, job.folder, False, 0, 0, 0.0, ())
    vocabulary, said = job.layered.shape.vocabulary, {"options": asdict(options)}
    tensors = count(places(text, text.trained), vocabulary, options)
    part = TrainedPart(SUCCESSORS, job.base, {"vocabulary": vocabulary}, tensors, said)
    acceptance = measure(Successors(part).longest, text, text.held_out)
    seconds = time.monotonic() - began
    report = PartReport(SUCCESSORS, job.folder, True, 1, text.tokens, seconds, acceptance)
    job.save(part, report, text)
    return report


def computes_live(device: torch.device) -> bool:
    """Whether states are computed again faster than they are read: on a card, not on a CPU."""
    return device.type != "cpu"


def _deadline(max_minutes: float | None) -> float:
    limit = door.minutes("max_minutes", max_minutes)
    return time.monotonic() + (math.inf if limit is None else 60 * limit)


def _states_of(out: str | os.PathLike[str], states: str | os.PathLike[str] | None) -> Path:
    """The folder for the states of a run."""
    return Path(states) if states else Path(out) / "states"


class _Job:
    """The model and the text of a run, and the folder for its part."""

    def __init__(
        self,
        model: str,
        files: Sequence[str | os.PathLike[str]],
        out: str | os.PathLike[str],
        states: str | os.PathLike[str] | None,
        weights: str = StateOptions.weights,
        plot: bool = False,
        owned: bool = True,
    ) -> None:
        """Load the model. What would fail late and can be known now fails here."""
        self.sources, self.plot = [os.fspath(file) for file in files], plot
        self.folder = Path(out)
        self.kept = _states_of(out, states)
        if not self.sources:
            raise DataError(
                "no data was named to train on; make some with: selfspec data MODEL --prompts FILES"
            )
        require(self.sources)
        if plot:
            plots.require_matplotlib()
        if (self.folder / "config.json").exists():
            raise OptionError(f"{out} holds a model; name a folder of its own for the part")
        checkpoints.make_folder(self.folder)
        clear_left_over(self.folder)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cuda" and weights == "float32":
            weights = "auto"  # torch's products there are of the model's own numbers
        loaded = load(model, dtype="float32", device=device)
        self.name, self.network = Path(loaded.name).name, loaded.model
        self.layered = from_transformers(self.network, owned=owned, weights=weights)
        self.base = signature(self.layered)

    def read(self, wanted: StateOptions, deadline: float, observer: Observer) -> States | None:
        """What the model computes on the text; None if the deadline came before its end."""
        began = time.monotonic()

        def go_on(tokens: int) -> bool:
            now = time.monotonic()
            observer.reading(tokens, round(tokens / (now - began)))
            return now < deadline

        done = gather(self.layered, self.base, self.sources, self.kept, wanted, go_on)
        return States(self.kept) if done else None

    def read_live(self, wanted: StateOptions) -> Text:
        """The text, on which the model computes when it is trained."""
        family = family_of(self.network.config)
        assert family is not None  # from_transformers() knows its layers
        shape = self.layered.shape
        rows = read_conversations(self.sources, wanted, shape.vocabulary)
        return LiveStates(self.network, family, shape, rows, wanted)

    def save(self, part: TrainedPart, report: PartReport, text: Text) -> None:
        """Write the part, its report and its card."""
        said = report.as_dict()
        facts = {name: said[name] for name in said if name not in ("log", "schema")} | {
            "model": self.name,
            "text": {
                "conversations": len(text.trained),
                "tokens": text.tokens,
                "held_out": len(text.held_out),
            },
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            **part.facts,
        }
        replace(part, facts=facts).save(self.folder)
        checkpoints.write_json(self.folder / REPORT, {**said, **facts})
        write_whole(self.folder / "README.md", _card(report, facts))
        if self.plot:
            plots.plot_part(said, self.folder / "training.png")


def _frozen(network: Any, layered: LayeredModel, text: Text, vocabulary: int) -> FrozenModel:
    """The model to train for, with the tokens that are likeliest in its text."""
    family, shape = family_of(network.config), layered.shape
    assert family is not None  # states were taken from its layers
    network.requires_grad_(False)
    tokens = likeliest(text.frequencies(shape.vocabulary), vocabulary).to(network.device)
    scale = stream_size(layered, text.batch(text.trained[:1])["tokens"][0].tolist())
    return FrozenModel(network, family, shape, tokens, scale)


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
