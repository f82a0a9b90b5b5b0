"""`scripts/bench exit_figures FOLDER`: SpecEE's figures about predictors, from the samples that
`selfspec fit-exits` took.

How the candidates' shares shift from layer to layer (the paper's Fig. 5), what each kind of feature
is worth (6), layers beside the earliest possible and AdaInfer's (7), width (8), where exits are
(10), how often a token leaves near the exits before it (11), fewer samples (18). Nothing is
decoded. Does not know the model.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
import typer
from torch import Tensor

from benchmarks.command import Out, Show, Threads, made_by, result_path, run_command
from benchmarks.exit_looks import by_depth, few_looks
from selfspec.bench.schema import Result, read, write
from selfspec.exits.features import shares_of
from selfspec.train.exit_fitting import (
    FitOptions,
    Split,
    features,
    first_of,
    fit,
    oracle,
    right,
    scores,
    split,
    summary,
    walked,
)
from selfspec.train.exit_samples import Samples, load_samples
from selfspec.train.fit_exits import SAMPLES
from selfspec.trained.files import TrainedPart, load_part

KINDS = ("logits", "shares", "change")  # of features, in their order
HIDDEN, DEPTHS = 512, (1, 2, 3, 4)
THRESHOLDS = (0.5, 0.7, 0.9, 0.95, 0.97, 0.99)
THRESHOLD = 0.95  # with which few looks are chosen
WIDTHS = (16, 64, 256, 512, 1024)
FEW, EPOCHS = 4000, 8.0  # samples, and passes over them, with which widths are compared
LASTS = (1, 2, 3, 5, 8)
NEAR = 2


@dataclass
class FiguresRun(Result):
    """`scripts/bench exit_figures`."""

    kind: ClassVar[str] = "exit-figures"
    measured_by: ClassVar[str] = "scripts/bench exit_figures FOLDER"

    model: str
    layers: int
    samples: int
    held_out: int
    by_layer: list[dict[str, float]] = field(default_factory=list)
    """After so many layers: the share of the answer among the candidates, of the others' best, how
    often the answer is there, and how often tokens leave."""
    without: dict[str, dict[str, float]] = field(default_factory=dict)
    """With one kind of features shuffled among samples."""
    averages: dict[str, dict[str, float]] = field(default_factory=dict)
    widths: list[dict[str, float]] = field(default_factory=list)
    depths: list[dict[str, float]] = field(default_factory=list)
    few_looks: list[dict[str, Any]] = field(default_factory=list)
    """Layers to look at, chosen one after another."""
    near: list[dict[str, float]] = field(default_factory=list)
    curve: list[dict[str, float]] = field(default_factory=list)


def shift(samples: Samples, exits: Tensor, first: int = 1) -> list[dict[str, float]]:
    """Figures 5 and 10, layer by layer, over tokens whose answer is a candidate."""
    named = samples["answer"] >= 0
    shares, answers = shares_of(samples["logits"][named]), samples["answer"][named].long()
    at = answers[:, None, None].expand(-1, shares.shape[1], 1)
    own = shares.gather(2, at)[..., 0]
    others = shares.scatter(2, at, -1.0).amax(2)
    there = right(samples).float().mean(0)  # after `first` layers, and from there on
    return [
        {
            "layer": layer + first,
            "answer": float(own[:, layer].mean()),
            "best other": float(others[:, layer].mean()),
            "answer there": float(there[layer]),
            "exits": float((exits == layer + first).float().mean()),
        }
        for layer in range(shares.shape[1])
    ]


def accuracy(tensors: dict[str, Tensor], x: Tensor, samples: Samples) -> float:
    """How often predictors are right, over all layers."""
    return float(((scores(tensors, x) >= 0.5) == right(samples).T).float().mean())


def shuffled(tensors: dict[str, Tensor], samples: Samples) -> dict[str, dict[str, float]]:
    """Figure 6: what is lost where a kind of features says nothing about its sample."""
    x, order = features(samples), torch.randperm(len(samples["text"]), generator=_dice())
    count, found = x.shape[-1] // len(KINDS), {"all": {"accuracy": accuracy(tensors, x, samples)}}
    for place, kind in enumerate(KINDS):
        some, mine = slice(place * count, (place + 1) * count), x.clone()
        mine[..., some] = x[:, order, some]
        found[f"without {kind}"] = {"accuracy": accuracy(tensors, mine, samples)}
    return found


def averages(
    part: TrainedPart, tensors: dict[str, Tensor], samples: Samples, layers: int
) -> dict[str, dict[str, float]]:
    """Figure 7."""
    best = float(oracle(samples, layers).float().mean())
    found = {"earliest possible": {"layers": best, "agreement": 1.0}}
    for threshold in THRESHOLDS:
        exits, agreement = walked(tensors, samples, layers, threshold)
        found[f"predictors, threshold {threshold:g}"] = {
            "layers": float(exits.float().mean()),
            "agreement": agreement,
        }
    if "svm.weight" in part.tensors:
        weight, bias = part.tensors["svm.weight"], part.tensors["svm.bias"]
        says = (samples["lead"] * weight).sum(-1) + bias >= 0  # (samples, exits)
        first, gone = says.int().argmax(1), says.any(1)
        same = samples["same"].gather(1, first[:, None])[:, 0]
        exits = torch.where(gone, first + first_of(samples, layers), layers)
        found["AdaInfer"] = {
            "layers": float(exits.float().mean()),
            "agreement": float((same | ~gone).float().mean()),
        }
    return found


def widths(parts: Split, layers: int, timed: bool = True) -> list[dict[str, float]]:
    """Figure 8b: each fitted with the same few samples; the shortest time of one layer's predictor
    on one token, if times are taken."""
    few = {name: each[:FEW] for name, each in parts.fit.items()}
    found = []
    for hidden in WIDTHS:
        tensors = fit(few, FitOptions(hidden=hidden, epochs=EPOCHS))
        x = features(parts.held_out)
        measured = summary(tensors, parts.held_out, layers)
        row = {
            "hidden": float(hidden),
            "accuracy": accuracy(tensors, x, parts.held_out),
            "layers": measured["average_layers"],
            "agreement": measured["agreement"],
        }
        if timed:
            single = {name: each[:1] for name, each in tensors.items()}
            seconds = min(_seconds(single, x[:1, :1].contiguous()) for _ in range(100))
            row["microseconds"] = 1e6 * seconds
        found.append(row)
    return found


def _seconds(tensors: dict[str, Tensor], x: Tensor) -> float:
    begin = time.perf_counter()
    scores(tensors, x)
    return time.perf_counter() - begin


def near(exits: Tensor, texts: Tensor, layers: int) -> list[dict[str, float]]:
    """Figure 11: how often a token leaves within two layers of one of its text's last exits, and
    how many layers these are."""
    found = []
    for last in LASTS:
        hits = sizes = count = 0
        for text in texts.unique().tolist():
            mine = exits[texts == text].tolist()
            for at in range(last, len(mine)):
                close = {
                    layer
                    for each in mine[at - last : at]
                    for layer in range(max(1, each - NEAR), min(layers, each + NEAR) + 1)
                }
                hits, sizes, count = hits + (mine[at] in close), sizes + len(close), count + 1
        if count:  # texts may be shorter
            found.append({"last": last, "hit": hits / count, "layers": sizes / count})
    return found


def _dice() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def figures(folder: Path, part: TrainedPart, run: FiguresRun, timed: bool = True) -> None:
    """All of them."""
    parts = split(load_samples(folder / SAMPLES), 0.1)
    tensors, held = dict(part.tensors), parts.held_out
    exits, _ = walked(tensors, held, run.layers)
    run.held_out = len(exits)
    run.by_layer = shift(held, exits, first_of(held, run.layers))
    run.without = shuffled(tensors, held)
    run.averages = averages(part, tensors, held, run.layers)
    run.near = near(exits, held["text"], run.layers)
    run.curve = list(part.facts["held_out"]["curve"])
    run.widths = widths(parts, run.layers, timed)
    few = {name: each[:FEW] for name, each in parts.fit.items()}
    run.depths = by_depth(few, held, HIDDEN, DEPTHS, EPOCHS)
    run.few_looks = few_looks(tensors, parts, run.layers, THRESHOLD)


Rows = list[list[str]]
Section = tuple[str, list[str], Rows]


def _of_exits(run: FiguresRun) -> list[Section]:
    """What was looked at in the samples: a title, a head, rows."""
    by_layer = [
        [f"{row['layer']:.0f}", *(f"{row[name]:.1%}" for name in list(row)[1:])]
        for row in run.by_layer
    ]
    worth = [[name, f"{row['accuracy']:.1%}"] for name, row in run.without.items()]
    near = [[f"{r['last']:.0f}", f"{r['hit']:.1%}", f"{r['layers']:.1f}"] for r in run.near]
    return [
        (
            "Figures 5 and 10: shares among the candidates, where the answer is one; and exits.",
            ["after layer", "answer", "best other", "answer there", "exits"],
            by_layer,
        ),
        ("Figure 6: a kind of features shuffled.", ["features", "accuracy"], worth),
        (
            "Figure 11: a token leaves within two layers of its text's last exits (the paper, last "
            "5: 80%, 10.2 layers of 32).",
            ["last", "hit", "layers looked at"],
            near,
        ),
    ]


def _of_fits(run: FiguresRun) -> list[Section]:
    """What predictors are worth."""
    averages = [
        [name, f"{row['layers']:.2f}", f"{row['agreement']:.1%}"]
        for name, row in run.averages.items()
    ]
    widths = [
        [f"{row['hidden']:.0f}", *_worth(row, "layers"), *_microseconds(row)] for row in run.widths
    ]
    curve = [[f"{row['samples']:.0f}", *_worth(row, "average_layers")] for row in run.curve]
    head = ["accuracy", "layers", "agreement"]
    return [
        ("Figure 7: layers, beside the earliest possible.", ["", *head[1:]], averages),
        (
            f"Figure 8b: the hidden layer's width, fitted to {FEW} samples in {EPOCHS:g} passes.",
            ["width", *head, "microseconds"],
            widths,
        ),
        (
            f"Figure 8a: so many linear maps, {HIDDEN} wide (the paper takes 2).",
            ["maps", "accuracy", "weights a predictor"],
            [
                [f"{r['depth']:.0f}", f"{r['accuracy']:.1%}", f"{r['weights']:.0f}"]
                for r in run.depths
            ],
        ),
        (
            f"Few looks, chosen one after another, threshold {THRESHOLD:g}.",
            ["after layers", "layers", "looks", "agreement"],
            [
                [r["at"], f"{r['layers']:.2f}", f"{r['looks']:.2f}", f"{r['agreement']:.1%}"]
                for r in run.few_looks
            ],
        ),
        ("Figure 18: fewer samples.", ["samples", *head], curve),
    ]


def _microseconds(row: dict[str, float]) -> list[str]:
    return [f"{row['microseconds']:.0f}" if "microseconds" in row else "not taken"]


def _worth(row: dict[str, float], layers: str) -> list[str]:
    return [f"{row['accuracy']:.1%}", f"{row[layers]:.2f}", f"{row['agreement']:.1%}"]


def markdown(run: FiguresRun) -> str:
    """All figures as tables."""
    lines = [
        f"{run.model}, {run.layers} layers, {run.samples} samples, {run.held_out} of them held "
        "out. The figures' numbers are SpecEE's."
    ]
    for title, head, rows in (*_of_exits(run), *_of_fits(run)):
        lines += ["", title, "", f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
        lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines)


def exit_figures(
    folder: Annotated[
        Path | None, typer.Argument(help="What `selfspec fit-exits --curve --out` wrote.")
    ] = None,
    threads: Threads = 2,
    out: Out = None,
    show: Show = None,
    untimed: Annotated[
        bool, typer.Option("--untimed", help="Count only, on a machine with other work.")
    ] = False,
) -> None:
    """SpecEE's figures about predictors: probabilities by layer, features, layers, width, exits.

    Example: scripts/bench exit_figures my-exits
    """
    if show is not None:
        typer.echo(markdown(read(FiguresRun, show)))
        return
    if folder is None:
        raise typer.BadParameter("name the folder that `selfspec fit-exits` wrote")
    torch.set_num_threads(threads)
    part = load_part(folder)
    said: dict[str, Any] = dict(part.facts)
    run = FiguresRun(
        made_by("exit_figures", threads), said.get("model", ""), part.base["layers"],
        said["tokens"], 0,
    )  # fmt: skip
    figures(folder, part, run, not untimed)
    run.complete = True
    target = out or result_path("exit-figures")
    write(run, target)
    typer.echo(markdown(run))
    typer.echo(json.dumps({"file": target.name, "near": run.near}))


if __name__ == "__main__":
    run_command(exit_figures)
