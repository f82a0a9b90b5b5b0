"""The picture of a `scripts/bench spec` result: speed by task and drafter, acceptance by position. Made from the JSON alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import Unavailable
from .spec_report import PLAIN, rows, tasks_of

WIDTH = 9.0  # inches; at 150 dots an inch letters stay readable when a README shows the picture 800 pixels wide
FEWEST_TRIES = 20  # of a position, below which its share is chance


def plot(run: dict[str, Any], path: Path) -> None:
    """Draw both, one above the other; the file's suffix says what is written (.png, .svg)."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise Unavailable("plots need matplotlib: pip install 'selfspec[bench]'") from error
    figure, (above, below) = pyplot.subplots(2, 1, figsize=(WIDTH, 7.5), height_ratios=(3, 2), layout="constrained")
    drafted = [row for row in rows(run) if row["method"] != PLAIN]
    _speed(above, drafted, tasks_of(run))
    _positions(below, run, drafted)
    handles, names = above.get_legend_handles_labels()  # one legend, below: over the bars it would hide some
    if drafted:
        figure.legend(handles, names, fontsize=9, ncols=2 if max(map(len, names)) > 24 else 3, loc="outside lower center")
    figure.suptitle(f"{run['model']}, {run['dtype']}, {run['provenance']['threads']} threads, {run['provenance']['cpu']}")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _speed(axes: Any, drafted: list[dict[str, Any]], tasks: list[str]) -> None:
    groups = [*tasks, "mean of tasks"]
    width = 0.8 / max(1, len(drafted))
    for index, row in enumerate(drafted):
        values = [row["tasks"].get(task, (0.0, 0.0, 0.0)) for task in tasks] + [row["mean"]]
        places = [at + (index - (len(drafted) - 1) / 2) * width for at in range(len(groups))]
        errors = [[value - low for value, low, _ in values], [high - value for value, _, high in values]]
        axes.bar(
            places, [value for value, _, _ in values], width * 0.92, yerr=errors, label=row["method"], error_kw={"linewidth": 0.8}
        )
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(groups)), [group.replace("_", " ") for group in groups], rotation=15)
    axes.set_ylabel("speed, plain decoding = 1")


def _positions(axes: Any, run: dict[str, Any], drafted: list[dict[str, Any]]) -> None:
    for index, row in enumerate(drafted):
        turns = [turn for turn in run["turns"] if turn["method"] == row["method"]]
        tries = [sum(t["drafted_at"][at] for t in turns if at < len(t["drafted_at"])) for at in range(len(row["by_position"]))]
        shown = [
            (at, kept) for at, (kept, tried) in enumerate(zip(row["by_position"], tries, strict=True), 1) if tried >= FEWEST_TRIES
        ]
        if shown:
            colour = f"C{index}"  # that of its bars, also where another one has nothing to show
            axes.plot([at for at, _ in shown], [kept for _, kept in shown], marker="o", color=colour)
    axes.set_xlabel(f"position in the draft (those tried at least {FEWEST_TRIES} times)")
    axes.set_ylabel("kept, if all before it were")
    axes.set_ylim(0, 1)
    axes.xaxis.get_major_locator().set_params(integer=True)
