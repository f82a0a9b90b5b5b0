"""Tables of a `scripts/bench spec` result, from its JSON and nothing else. Rows that lose stay in."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from ..errors import OptionError
from .report import table
from .spec_costs import CostModel

SPEC_SCHEMA = 2
AIM = 0.92  # of the speed that the cost model predicts
PLAIN = "plain"
Turns = Sequence[dict[str, Any]]


def load_spec(path: Path) -> dict[str, Any]:
    """Read a result; another file is an error that says so."""
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise OptionError(f"There is no result file {path.name!r}. Make one with: scripts/bench spec") from error
    except ValueError as error:
        raise OptionError(f"{path.name} is not a benchmark result: {error}. Measure again with: scripts/bench spec") from error
    found = (run.get("kind"), run.get("schema_version")) if isinstance(run, dict) else None
    if found != ("spec", SPEC_SCHEMA):
        raise OptionError(f"{path.name} holds {found}, not ('spec', {SPEC_SCHEMA}). Measure again with: scripts/bench spec")
    return dict(run)


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
                "slower": [task for task, costs in groups.items() if len(costs) > 1 and interval([costs])[1] < 1],
                "mean": (fmean(speedup(costs) for costs in groups.values()), *interval(list(groups.values()))),
                "tokens_per_verification": sum(t["decoded"] for t in turns) / sum(t["verifications"] for t in turns),
                "acceptance": sum(t["accepted"] for t in turns) / max(1, sum(t["drafted"] for t in turns)),
                "draft_share": sum(t["draft_seconds"] for t in turns) / seconds,
                "verify_share": sum(t["verify_seconds"] for t in turns) / seconds,
                "identical": all(turn["identical"] for turn in turns),
                "by_position": by_position(turns),
                "reached": reached(run, method),
            }
        )
    return found


def reached(run: dict[str, Any], method: str) -> tuple[float, float, float] | None:
    """Measured speed over the cost model's, with a 95% interval over questions; None without step times."""
    costs = CostModel(run["steps"])
    pairs = []
    for task in tasks_of(run) if costs.known else []:
        for question in dict.fromkeys(turn["question"] for turn in run["turns"] if turn["task"] == task):
            turns = [t for t in run["turns"] if (t["task"], t["question"]) == (task, question) and t["decoded"]]
            passes = [t["verify_seconds"] / t["verifications"] for t in turns if t["method"] == PLAIN]
            mine = [t for t in turns if t["method"] == method]
            if passes and mine:
                pairs.append((sum(costs.seconds(t, median(passes)) for t in mine), sum(t["seconds"] for t in mine)))
    if not pairs:
        return None

    def of(sample: Sequence[tuple[float, float]]) -> float:
        return sum(predicted for predicted, _ in sample) / sum(measured for _, measured in sample)

    chance = random.Random(len(pairs))
    values = sorted(of(chance.choices(pairs, k=len(pairs))) for _ in range(2000))
    return of(pairs), values[50], values[1949]


def by_position(turns: Turns) -> list[float]:
    """For each depth the share of drafts kept among those whose predecessors were all kept."""
    depth = max((len(turn["drafted_at"]) for turn in turns), default=0)
    sums = [[sum(t[key][at] for t in turns if at < len(t[key])) for key in ("accepted_at", "drafted_at")] for at in range(depth)]
    return [kept / tried for kept, tried in sums if tried]


def markdown(run: dict[str, Any]) -> str:
    """The table: speed over plain decoding of the same engine, by task, with the interval of the mean."""
    tasks = tasks_of(run)
    header = ["method", *tasks, "mean of tasks", "tokens/verification", "accepted/drafted", "draft time"]
    header += ["measured/predicted", "same tokens"]
    lines = []
    for row in rows(run):
        mean, low, high = row["mean"]
        cells = [
            f"{row['tasks'][task][0]:.2f}{' -' if task in row['slower'] else ''}" if task in row["tasks"] else "-"
            for task in tasks
        ]
        rest = [f"{row['tokens_per_verification']:.2f}", f"{row['acceptance']:.0%}", f"{row['draft_share']:.0%}"]
        rest.append(_reached(row["reached"]))
        lines.append([row["method"], *cells, f"{mean:.2f} ({low:.2f}-{high:.2f})", *rest, "yes" if row["identical"] else "NO"])
    first = run["turns"][0]["prompt_tokens"] if run["turns"] else 0
    note = (
        f"\nSpeed over plain decoding ({run['model']}, {run['dtype']}, {run['kernel']} kernels, "
        f"{run['provenance']['threads']} threads, {run['provenance']['cpu']}); "
        f"{run['sample']} questions a task, up to {run['new_tokens']} new tokens. "
        "-: significantly slower than plain (one question alone cannot say). "
        "Measured/predicted: speed over what the cost model makes of acceptance and of step "
        f"times measured alone; {AIM:.0%} is the aim."
    )
    return table(header, lines) + note if first else "nothing was measured"


def _reached(value: tuple[float, float, float] | None) -> str:
    return "-" if value is None else f"{value[0]:.0%} ({value[1]:.0%}-{value[2]:.0%})"
