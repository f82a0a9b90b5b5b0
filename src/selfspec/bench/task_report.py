"""Tables of a `scripts/bench task` result, from its JSON and nothing else. What falls short stays
in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .report import interval, milliseconds, table
from .schema import read_result
from .timing import Ratio, median, ratio

TASK_SCHEMA = 1


def load_task(path: Path) -> dict[str, Any]:
    """Read a result; another file is an error that says so."""
    return read_result(path, "task", TASK_SCHEMA, "scripts/bench task")


def per_token(entry: dict[str, Any]) -> list[float | None]:
    """Seconds a token of each utterance; one that ended with its first token has none."""
    return [s / n if n else None for s, n in zip(entry["seconds"], entry["decoded"], strict=True)]


def speed(run: dict[str, Any], way: str) -> Ratio | None:
    """How many times as fast as plain decoding of the same weights: the median over utterances,
    each a pair."""
    return ratio(per_token(run["race"]["plain"]), per_token(run["race"][way]))


def acceptance(entry: dict[str, Any]) -> float | None:
    """Accepted over drafted; None where nothing was drafted."""
    return entry["accepted"] / entry["drafted"] if entry["drafted"] else None


def markdown(run: dict[str, Any]) -> str:
    """Everything that has been measured so far."""
    parts = [_quality(run), _exits(run), _race(run), _grid(run), _training(run), _where(run)]
    return "\n\n".join(part for part in parts if part)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _quality(run: dict[str, Any]) -> str:
    """The shape of Table 5: exact match of whole models, and of exits alone."""
    if not run["quality"]:
        return ""
    exits = [str(layer) for layer in run["options"]["exits"]]
    header = ["model", "exact match", *(f"first {layer} layers alone" for layer in exits)]
    rows = [
        [
            name,
            f"{_percent(found['exact'] / found['of'])} of {found['of']}",
            *(
                f"{_percent(right / of)} of {of}"
                for right, of in (found["lossy"][layer] for layer in exits)
            ),
        ]
        for name, found in run["quality"].items()
    ]
    return table(header, rows)


def _exits(run: dict[str, Any]) -> str:
    """Agreement of each exit with the whole model on the right answers."""
    if not run["quality"]:
        return ""
    layers = [score["layers"] for score in next(iter(run["quality"].values()))["exits"]]
    rows = [
        [
            name,
            *(
                f"{_percent(score['agreement'])} / {score['perplexity']:.3g}"
                for score in found["exits"]
            ),
        ]
        for name, found in run["quality"].items()
    ]
    return table(["agreement / perplexity of exit", *map(str, layers)], rows)


def by_drafts(layer: int, drafts: int) -> str:
    """The way of decoding with another number of drafts than the others have."""
    return f"E={layer}, K={drafts}"


def _grid(run: dict[str, Any]) -> str:
    """Speed and acceptance by exit and drafts a round."""
    exits, own, others = (run["options"][name] for name in ("exits", "drafts", "other_drafts"))
    if not run["race"]:
        return ""
    rows = []
    for layer in exits:
        ways = {drafts: by_drafts(layer, drafts) for drafts in others} | {own: f"E={layer}"}
        cells = []
        for drafts in sorted(ways):
            found = speed(run, ways[drafts])
            cells.append(
                f"{found.value:.2f} ({_percent(acceptance(run['race'][ways[drafts]]))})"
                if found
                else "-"
            )
        rows.append([f"E={layer}", *cells])
    return table(
        ["speed (accepted/drafted)", *(f"K={drafts}" for drafts in sorted({*others, own}))], rows
    )


def _race(run: dict[str, Any]) -> str:
    """The shape of Table 10: time per token by exit, with and without reuse."""
    if not run["race"]:
        return ""
    apart = {
        by_drafts(layer, drafts)
        for layer in run["options"]["exits"]
        for drafts in run["options"]["other_drafts"]
    }
    header = ["decoding", "ms a token", "speed, plain = 1", "accepted/drafted", "same tokens"]
    rows = [
        [
            way,
            milliseconds(median(per_token(entry))),
            interval(speed(run, way)),
            _percent(acceptance(entry)),
            "yes"
            if entry["identical"]
            else ("not checked: lossy" if way.endswith("alone") else "NO"),
        ]
        for way, entry in run["race"].items()
        if way not in apart
    ]
    return table(header, rows)


def _training(run: dict[str, Any]) -> str:
    if not run["training"]:
        return ""
    header = ["training", "steps", "trained tokens", "last loss of the whole model"]
    rows = []
    for name, facts in run["training"].items():
        line = facts["log"][-1] if facts["log"] else {}  # a run of few steps logs nothing
        losses = {int(key[5:]): value for key, value in line.items() if key.startswith("exit_")}
        last = f"{losses[max(losses)]:.4f}" if losses else "-"
        rows.append([name, str(facts["steps"]), f"{facts['tokens']:,}", last])
    return table(header, rows)


def _where(run: dict[str, Any]) -> str:
    made, options = run["provenance"], run["options"]
    words = (
        f"Draft vocabulary: {run['vocabulary']} tokens and the prompt's. "
        if run["vocabulary"]
        else ""
    )
    return (
        f"{run['model']}; generator {run['generator']}, seed {options['seed']}; K = "
        f"{options['drafts']}, greedy. {words}"
        f"{made['threads']} threads, {made['cpu']}. Speeds: medians over utterances answered in "
        f"turns, 95% intervals."
    )


def summary(run: dict[str, Any]) -> dict[str, Any]:
    """The figures for machines: the last line of a run."""
    ways = {way: speed(run, way) for way in run["race"] if way != "plain"}
    return {
        "kind": run["kind"],
        "generator": run["generator"],
        "exact": {
            name: round(found["exact"] / found["of"], 4) for name, found in run["quality"].items()
        },
        "acceptance": {
            way: round(share, 4)
            for way, e in run["race"].items()
            if (share := acceptance(e)) is not None
        },
        "speed": {way: round(found.value, 3) for way, found in ways.items() if found is not None},
        "identical": all(
            entry["identical"] for way, entry in run["race"].items() if not way.endswith("alone")
        ),
    }
