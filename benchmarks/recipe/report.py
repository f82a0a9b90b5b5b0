"""Tables and a picture of a `scripts/bench recipe` result, from its JSON and nothing else, the
paper's figures beside ours where it has them. What falls short stays in."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.recipe.arms import CONSTANT, OWN, SCRATCH, TASK, all_arms, names
from benchmarks.recipe.result import ArmRun, RecipeRun
from benchmarks.task.result import Race
from selfspec.bench import tables
from selfspec.bench.html import Table
from selfspec.train.plots import figure

percent = partial(tables.percent, digits=1)
PAPER_TASK = {3: ("76.0%", "2.0x"), 6: ("97.6%", "1.64x"), 9: ("98.9%", "1.24x")}
"""Table 10 on a card, by exit: after a quarter, half and three quarters of its 24 layers."""
PAPER_SCRATCH = ("77.4%", "1.76x")
"""Table 3: the model of 1.5 billion parameters, exit 8 of 24, on CNN/DM."""
LAST = 0.1  # share of the log that a final training loss is the mean of


def speed(race: Mapping[str, Race], way: str) -> float | None:
    """Plain decoding's mean seconds a token over the way's: all seconds over all tokens."""
    plain, other = race["plain"], race[way]
    if not sum(other.decoded) or not sum(plain.decoded):
        return None
    before = sum(plain.seconds) / sum(plain.decoded)
    return before / (sum(other.seconds) / sum(other.decoded))


def final_loss(arm: ArmRun) -> float | None:
    """Mean training loss of the whole model over the end of the run."""
    lines = [line for line in arm.training["log"] if any(key.startswith("exit_") for key in line)]
    if not lines:
        return None
    some = lines[-max(1, round(LAST * len(lines))) :]
    deepest = max(int(key[5:]) for key in some[-1] if key.startswith("exit_"))
    found: list[float] = [line[f"exit_{deepest}"] for line in some if f"exit_{deepest}" in line]
    return sum(found) / len(found)


def of_group(run: RecipeRun, group: str) -> dict[str, ArmRun]:
    """Its arms by name, in the order in which they are trained."""
    order = [name for name in names(all_arms(run.options)) if name.startswith(f"{group}/")]
    return {name: run.arms[name] for name in order if name in run.arms}


def markdown(run: RecipeRun) -> str:
    """Everything that has been measured so far."""
    parts: list[str | Table | None] = []
    for group, title in (
        (SCRATCH, "From scratch, on free text"),
        (TASK, "Fine-tuned for a task"),
        (OWN, "The demo, on its own text"),
    ):
        arms = of_group(run, group)
        if arms:
            parts += [f"**{title}**", _exits(arms), _steps(arms), _quality(run, arms)]
            parts += [*_race(group, arms), _training(arms)]
    return tables.markdown([*parts, _where(run)])


def _exits(arms: Mapping[str, ArmRun]) -> Table:
    """The shape of Figure 8 at its end: perplexity by exit."""
    layers = [score["layers"] for score in next(iter(arms.values())).looks[-1]["exits"]]
    rows = []
    for name, arm in arms.items():
        rows.append([name, *(f"{score['perplexity']:.3g}" for score in arm.looks[-1]["exits"])])
    return Table(["perplexity at exit", *map(str, layers)], rows)


def _steps(arms: Mapping[str, ArmRun]) -> Table:
    """The shape of Figure 11: what becomes of the middle exit during training."""
    looks = next(iter(arms.values())).looks
    middle = len(looks[0]["exits"]) // 2 - 1
    rows = []
    for name, arm in arms.items():
        found = (look["exits"][middle]["perplexity"] for look in arm.looks)
        rows.append([name, *(f"{value:.3g}" for value in found)])
    head = f"perplexity after {looks[0]['exits'][middle]['layers']} layers, by step"
    return Table([head, *(str(look["step"]) for look in looks)], rows)


def _quality(run: RecipeRun, arms: Mapping[str, ArmRun]) -> Table:
    """The shape of Table 5: exact match of whole models, and of exits alone."""
    rows = []
    for name, arm in arms.items():
        if arm.quality:
            seen, other = arm.quality["train"], arm.quality["held_out"]
            alone = (percent(right / of) for right, of in seen.lossy.values())
            rows.append(
                [name, percent(seen.exact / seen.of), percent(other.exact / other.of), *alone]
            )
    exits = [f"first {layer} layers alone" for layer in run.options.exits]
    return Table(["exact match", "trained phrasings", "others", *exits], rows)


def _race(group: str, arms: Mapping[str, ArmRun]) -> list[Table]:
    """The shape of Tables 3 and 10: acceptance with the whole vocabulary, and speed."""
    ways = [way for way in next(iter(arms.values())).race if way.startswith("E=")]
    drafting = [way for way in ways if not way.endswith("alone")]
    kept, fast = [], []
    for name, arm in arms.items():
        entries = [arm.race[way] for way in drafting]
        kept.append([name, *(percent(entry.acceptance) + _differs(entry) for entry in entries)])
        times = (tables.number(speed(arm.race, way), 2) for way in drafting)
        fast.append([name, *(f"{found}x" for found in times)])
    theirs: list[tuple[str, str]] = []
    if group == TASK:
        theirs = [PAPER_TASK.get(int(way[2:]), ("-", "-")) for way in drafting]
    if group == SCRATCH:
        theirs = [PAPER_SCRATCH, *[("-", "-")] * (len(drafting) - 1)]
    if theirs:
        kept.append(["the paper's LD+EE", *(one for one, _ in theirs)])
        fast.append(["the paper's LD+EE", *(one for _, one in theirs)])
    return [Table(["accepted/drafted", *drafting], kept), Table(["speed", *drafting], fast)]


def _differs(entry: Race) -> str:
    return "" if entry.identical else ", NOT the same tokens"


def _training(arms: Mapping[str, ArmRun]) -> Table:
    """The shape of Figure 12 at its end."""
    rows = []
    for name, arm in arms.items():
        facts = arm.training
        busy = [look["core_seconds_a_step"] for look in arm.looks if "core_seconds_a_step" in look]
        took = tables.number(facts["steps"] * statistics.mean(busy) / 60, 1) if busy else "-"
        loss = tables.number(final_loss(arm), 3)
        rows.append([name, str(facts["steps"]), f"{facts['tokens']:,}", took, loss])
    return Table(["training", "steps", "trained tokens", "core minutes", "loss at the end"], rows)


def _where(run: RecipeRun) -> str:
    chosen = run.options
    return (
        f"llama, {chosen.layers} layers, width {chosen.width}, vocabulary {chosen.vocabulary}; "
        f"texts {run.texts}, grammar {run.generator}; K = {chosen.drafts}, greedy, the whole "
        "vocabulary. Speed: mean time a token of plain decoding over the way's, same weights. "
        f"`{CONSTANT}` is layer dropout with its mean at every layer. "
        f"{tables.threads(run.provenance)}."
    )


def summary(run: RecipeRun) -> dict[str, Any]:
    """The figures for machines: the last line of a run."""
    found: dict[str, Any] = {}
    for name, arm in run.arms.items():
        ways = [way for way in arm.race if way.startswith("E=") and not way.endswith("alone")]
        found[name] = {
            "perplexity": round(arm.looks[-1]["exits"][-1]["perplexity"], 3),
            "accepted": {way: round(arm.race[way].acceptance or 0, 4) for way in ways},
            "speed": {way: round(speed(arm.race, way) or 0, 3) for way in ways},
            "identical": all(arm.race[way].identical for way in ways),
        }
        if arm.quality:
            found[name]["exact"] = round(arm.quality["train"].exact / arm.quality["train"].of, 4)
    return {"kind": run.kind, "arms": found}


def picture(run: RecipeRun, path: Path) -> None:
    """Perplexity of a middle exit and of the whole model over the steps (Figures 8 and 11), and
    the training loss (Figure 12), of the arms from scratch."""
    arms = of_group(run, SCRATCH)
    if not arms:
        return
    title = f"From scratch: {run.options.layers} layers, {run.options.steps} steps"
    with figure(path, title, 15, 4.5, 3) as (middle, last, losses):
        for name, arm in arms.items():
            steps = [look["step"] for look in arm.looks]
            half = run.options.layers // 2
            for axes, layer in ((middle, half), (last, run.options.layers)):
                values = [look["exits"][layer - 1]["perplexity"] for look in arm.looks]
                axes.plot(steps, values, marker="o", markersize=3, label=name)
                axes.set_title(f"perplexity after {layer} layers, held-out text")
                axes.set_yscale("log")
            key = f"exit_{run.options.layers}"
            points = [(line["step"], line[key]) for line in arm.training["log"] if key in line]
            if points:
                losses.plot(*zip(*points, strict=True), label=name, linewidth=1)
        losses.set_title("training loss of the whole model")
        for axes in (middle, last, losses):
            axes.set_xlabel("step")
            if axes.lines:
                axes.legend(fontsize=8)
