"""The picture of a suite result: speed by contestant, and how often drafts were kept by position.
From the JSON alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import Unavailable
from .suite_schema import OURS, SuiteRun
from .suite_stats import Row, precisions, rows, tasks_of, turns_of
from .timing import Ratio

# inches; at 150 dots an inch letters stay readable when a README shows the picture 800 pixels wide
WIDTH = 9.0
FEWEST_TRIES = 20  # of a position, below which its share is chance


def draw(run: SuiteRun, path: Path) -> None:
    """Draw both, one above the other, for the first batch size and our precision; the file's suffix
    says what is written."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise Unavailable("plots need matplotlib: pip install 'selfspec[bench]'") from error
    batch, precision = run.plan.batches[0], (precisions(run) or [run.plan.dtype])[0]
    found = [(row, row.over_best) for row in rows(run, batch) if row.precision == precision]
    shown = sorted(
        ((row, speed) for row, speed in found if speed is not None), key=lambda pair: pair[1].value
    )
    height = 1.2 + 0.32 * len(shown)
    figure, (above, below) = pyplot.subplots(
        2, 1, figsize=(WIDTH, height + 3.4), height_ratios=(height, 2.6), layout="constrained"
    )
    _speed(above, run, shown, batch)
    _positions(below, run, [row for row, _ in reversed(shown)], batch)
    lines, names = below.get_legend_handles_labels()  # outside: over the lines it would hide some
    if names:
        figure.legend(lines, names, fontsize=7, ncols=2, loc="outside lower center")
    figure.suptitle(
        f"{run.plan.model}, {precision}, {run.plan.threads} threads, {run.provenance.cpu}, batch "
        f"{batch}",
        fontsize=10,
    )
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _speed(axes: Any, run: SuiteRun, shown: Sequence[tuple[Row, Ratio]], batch: int) -> None:
    """A bar each, fastest above, with its interval; a mark for every task."""
    for place, (row, speed) in enumerate(shown):
        colour = "0.75" if row.baseline else ("#7fb0d8" if row.engine == OURS else "#f0bb85")
        errors = [[max(0.0, speed.value - speed.low)], [max(0.0, speed.high - speed.value)]]
        axes.barh(place, speed.value, xerr=errors, color=colour, error_kw={"linewidth": 0.8})
    for index, task in enumerate(tasks_of(run)):
        by_name = {row.contestant: row.over_best for row in rows(run, batch, task)}
        points = [
            (ratio.value, place)
            for place, (row, _) in enumerate(shown)
            if (ratio := by_name[row.contestant])
        ]
        axes.plot(
            *zip(*points, strict=True),
            "o",
            markersize=3.5,
            color=f"C{index}",
            label=task.replace("_", " "),
        )
    axes.set_yticks(
        range(len(shown)),
        [f"{row.contestant}  {speed.value:.2f}" for row, speed in shown],
        fontsize=8,
    )
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel(
        "speed, the fastest plain decoding = 1\nbars: mean of tasks; grey: plain decoding, blue: "
        "ours, orange: others"
    )
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))


def _positions(axes: Any, run: SuiteRun, shown: Sequence[Row], batch: int) -> None:
    for row in shown:
        counts = [
            turn.counts for turn in turns_of(run, row.contestant, batch) if turn.counts is not None
        ]
        tries = [
            sum(c.drafted_at[at] for c in counts if at < len(c.drafted_at))
            for at in range(len(row.by_position))
        ]
        points = [
            (at, kept)
            for at, (kept, tried) in enumerate(zip(row.by_position, tries, strict=True), 1)
            if tried >= FEWEST_TRIES
        ]
        if points:
            axes.plot(
                [at for at, _ in points],
                [kept for _, kept in points],
                marker="o",
                label=row.contestant,
            )
    axes.set_xlabel(f"position in the draft (those tried at least {FEWEST_TRIES} times)")
    axes.set_ylabel("kept, if all before it were")
    axes.set_ylim(0, 1)
    axes.xaxis.get_major_locator().set_params(integer=True)
