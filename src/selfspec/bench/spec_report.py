"""Tables and plots of a `scripts/bench spec` result, from its JSON and nothing else. Rows that lose stay in."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from ..errors import OptionError, Unavailable
from .report import table

SPEC_SCHEMA = 1
PLAIN = "plain"
Turns = Sequence[dict[str, Any]]


def tasks_of(run: dict[str, Any]) -> list[str]:
    """The tasks, in the order in which they were asked."""
    return list(dict.fromkeys(turn["task"] for turn in run["turns"]))


def questions_of(run: dict[str, Any], method: str, task: str) -> dict[int, tuple[float, float]]:
    """For each question of a task: median seconds a token of plain decoding and of the method."""
    found = {}
    for question in dict.fromkeys(t["question"] for t in run["turns"] if t["task"] == task):
        costs = []
        for name in (PLAIN, method):
            turns = [
                t
                for t in run["turns"]
                if t["question"] == question and t["method"] == name and t["task"] == task and t["decoded"]
            ]
            costs.append(median(t["seconds"] / t["decoded"] for t in turns) if turns else None)
        if costs[0] is not None and costs[1] is not None:
            found[question] = (costs[0], costs[1])
    return found


def speedup(costs: Sequence[tuple[float, float]]) -> float:
    """Plain seconds a token over the method's, each the mean over questions."""
    return fmean(plain for plain, _ in costs) / fmean(method for _, method in costs)


def interval(groups: Sequence[Sequence[tuple[float, float]]], draws: int = 2000) -> tuple[float, float]:
    """95% interval of the mean over groups (tasks) of their speedups: a bootstrap over the questions of each."""
    chance = random.Random(0)
    values = sorted(fmean(speedup(chance.choices(list(group), k=len(group))) for group in groups) for _ in range(draws))
    return values[int(0.025 * draws)], values[int(0.975 * draws) - 1]


def rows(run: dict[str, Any]) -> list[dict[str, Any]]:
    """For each method: speedup of each task and of their mean with intervals, acceptance, identity, where the time went."""
    if run.get("schema_version") != SPEC_SCHEMA or run.get("kind") != "spec":
        raise OptionError(
            f"this is a result of kind {run.get('kind')!r}, version {run.get('schema_version')!r}; "
            "measure again with scripts/bench spec"
        )
    found = []
    for method in run["methods"]:
        groups = {task: list(questions_of(run, method, task).values()) for task in tasks_of(run)}
        groups = {task: costs for task, costs in groups.items() if costs}
        turns = [turn for turn in run["turns"] if turn["method"] == method]
        seconds = sum(turn["seconds"] for turn in turns)
        found.append(
            {
                "method": method,
                "tasks": {task: (speedup(costs), *interval([costs])) for task, costs in groups.items()},
                "mean": (fmean(speedup(costs) for costs in groups.values()), *interval(list(groups.values()))),
                "tokens_per_verification": sum(t["decoded"] for t in turns) / sum(t["verifications"] for t in turns),
                "acceptance": sum(t["accepted"] for t in turns) / max(1, sum(t["drafted"] for t in turns)),
                "draft_share": sum(t["draft_seconds"] for t in turns) / seconds,
                "verify_share": sum(t["verify_seconds"] for t in turns) / seconds,
                "identical": all(turn["identical"] for turn in turns),
                "by_position": by_position(turns),
            }
        )
    return found


def by_position(turns: Turns) -> list[float]:
    """For each depth the share of drafts kept among those whose predecessors were all kept."""
    depth = max((len(turn["drafted_at"]) for turn in turns), default=0)
    sums = [[sum(t[key][at] for t in turns if at < len(t[key])) for key in ("accepted_at", "drafted_at")] for at in range(depth)]
    return [kept / tried for kept, tried in sums if tried]


def markdown(run: dict[str, Any]) -> str:
    """The table: speed over plain decoding of the same engine, by task, with the interval of the mean."""
    tasks = tasks_of(run)
    header = ["method", *tasks, "mean of tasks", "tokens/verification", "accepted/drafted", "draft time", "same tokens"]
    lines = []
    for row in rows(run):
        mean, low, high = row["mean"]
        cells = [f"{row['tasks'][task][0]:.2f}{_mark(row['tasks'][task])}" if task in row["tasks"] else "-" for task in tasks]
        rest = [f"{row['tokens_per_verification']:.2f}", f"{row['acceptance']:.0%}", f"{row['draft_share']:.0%}"]
        lines.append([row["method"], *cells, f"{mean:.2f} ({low:.2f}-{high:.2f})", *rest, "yes" if row["identical"] else "NO"])
    first = run["turns"][0]["prompt_tokens"] if run["turns"] else 0
    note = (
        f"\nSpeed over plain decoding ({run['model']}, {run['dtype']}, {run['kernel']} kernels, "
        f"{run['provenance']['threads']} threads, {run['provenance']['cpu']}); "
        f"{run['sample']} questions a task, up to {run['new_tokens']} new tokens. "
        "- below: significantly slower than plain."
    )
    return table(header, lines) + note if first else "nothing was measured"


def _mark(value: tuple[float, float, float]) -> str:
    return " -" if value[2] < 1 else ""


def plot(run: dict[str, Any], path: Path) -> None:
    """Speed by task and method, and acceptance by position, side by side."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise Unavailable("plots need matplotlib: pip install 'selfspec[bench]'") from error
    drafted = [row for row in rows(run) if row["method"] != PLAIN]
    tasks = tasks_of(run)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(14, 5), width_ratios=(3, 2), layout="constrained")
    width = 0.8 / max(1, len(drafted))
    for index, row in enumerate(drafted):
        places = [at + (index - (len(drafted) - 1) / 2) * width for at in range(len(tasks))]
        left.bar(places, [row["tasks"].get(task, (0, 0, 0))[0] for task in tasks], width, label=row["method"])
        if row["by_position"]:
            right.plot(range(1, len(row["by_position"]) + 1), row["by_position"], marker="o", label=row["method"])
    left.axhline(1, color="black", linewidth=0.8)
    left.set_xticks(range(len(tasks)), tasks, rotation=15)
    left.set_ylabel("speed over plain decoding")
    left.legend(fontsize=8)
    right.set_xlabel("position in the draft")
    right.set_ylabel("kept, if all before it were kept")
    right.set_ylim(0, 1)
    right.legend(fontsize=8)
    figure.suptitle(f"{run['model']}, {run['dtype']}, {run['provenance']['cpu']}")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
