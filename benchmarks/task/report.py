"""Tables of a `scripts/bench task` result, from its JSON and nothing else. What falls short stays
in."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.ratios import median, milliseconds, ratio
from benchmarks.task.result import TaskRun, by_drafts
from selfspec.bench import tables
from selfspec.bench.html import Table
from selfspec.bench.tables import interval
from selfspec.bench.timing import Ratio

percent = partial(tables.percent, digits=1)


def speed(run: TaskRun, way: str) -> Ratio | None:
    """How many times as fast as plain decoding of the same weights: the median over utterances,
    each a pair."""
    return ratio(run.race["plain"].per_token, run.race[way].per_token)


def markdown(run: TaskRun) -> str:
    """Everything that has been measured so far."""
    measured = [_quality(run), _exits(run)] if run.quality else []
    measured += [_race(run), _grid(run)] if run.race else []
    return tables.markdown([*measured, _training(run), _where(run)])


def _quality(run: TaskRun) -> Table:
    """The shape of Table 5: exact match of whole models, and of exits alone."""
    exits = [str(layer) for layer in run.options.exits]
    rows = []
    for name, found in run.quality.items():
        pairs = [(found.exact, found.of), *((found.lossy[layer]) for layer in exits)]
        rows.append([name, *(f"{percent(right / of)} of {of}" for right, of in pairs)])
    header = ["model", "exact match", *(f"first {layer} layers alone" for layer in exits)]
    return Table(header, rows)


def _exits(run: TaskRun) -> Table:
    """Agreement of each exit with the whole model on the right answers."""
    layers = [score["layers"] for score in next(iter(run.quality.values())).exits]
    rows = []
    for name, found in run.quality.items():
        scores = [(percent(each["agreement"]), each["perplexity"]) for each in found.exits]
        rows.append([name, *(f"{agreement} / {value:.3g}" for agreement, value in scores)])
    return Table(["agreement / perplexity of exit", *map(str, layers)], rows)


def _grid(run: TaskRun) -> Table:
    """Speed and acceptance by exit and drafts a round."""
    own, others = run.options.drafts, run.options.other_drafts
    counts = sorted({*others, own})
    rows = []
    for layer in run.options.exits:
        cells = []
        for count in counts:
            way = f"E={layer}" if count == own else by_drafts(layer, count)
            found = speed(run, way)
            kept = percent(run.race[way].acceptance)
            cells.append(f"{found.value:.2f} ({kept})" if found else "-")
        rows.append([f"E={layer}", *cells])
    return Table(["speed (accepted/drafted)", *(f"K={count}" for count in counts)], rows)


def _race(run: TaskRun) -> Table:
    """The shape of Table 10: time per token by exit, with and without reuse."""
    exits, others = run.options.exits, run.options.other_drafts
    apart = {by_drafts(layer, drafts) for layer in exits for drafts in others}
    rows = []
    for way, entry in run.race.items():
        if way not in apart:
            differs = "not checked: lossy" if way.endswith("alone") else "NO"
            times = [milliseconds(median(entry.per_token)), interval(speed(run, way))]
            same = "yes" if entry.identical else differs
            rows.append([way, *times, percent(entry.acceptance), same])
    header = ["decoding", "ms a token", "speed, plain = 1", "accepted/drafted", "same tokens"]
    return Table(header, rows)


def _training(run: TaskRun) -> Table:
    rows = []
    for name, facts in run.training.items():
        line = facts["log"][-1] if facts["log"] else {}  # a run of few steps logs nothing
        losses = {int(key[5:]): value for key, value in line.items() if key.startswith("exit_")}
        last = f"{losses[max(losses)]:.4f}" if losses else "-"
        rows.append([name, str(facts["steps"]), f"{facts['tokens']:,}", last])
    header = ["training", "steps", "trained tokens", "last loss of the whole model"]
    return Table(header, rows)


def _where(run: TaskRun) -> str:
    made, options = run.provenance, run.options
    words = f"Draft vocabulary: {run.vocabulary} tokens and the prompt's. "
    return (
        f"{run.model}; generator {run.generator}, seed {options.seed}; K = {options.drafts}, "
        "greedy. "
        f"{words if run.vocabulary else ''}{made.threads} threads, {made.cpu}. Speeds: medians "
        "over "
        "utterances answered in turns, 95% intervals."
    )


def summary(run: TaskRun) -> dict[str, Any]:
    """The figures for machines: the last line of a run."""
    speeds = {way: speed(run, way) for way in run.race if way != "plain"}
    kept = {way: entry.acceptance for way, entry in run.race.items()}
    exact = [entry for way, entry in run.race.items() if not way.endswith("alone")]
    return {
        "kind": run.kind,
        "generator": run.generator,
        "exact": {name: round(each.exact / each.of, 4) for name, each in run.quality.items()},
        "acceptance": {way: round(share, 4) for way, share in kept.items() if share is not None},
        "speed": {way: round(found.value, 3) for way, found in speeds.items() if found is not None},
        "identical": all(entry.identical for entry in exact),
    }
