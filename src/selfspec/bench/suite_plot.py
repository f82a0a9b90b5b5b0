"""The picture of a suite result: speed by contestant, and how often drafts were kept by position. From the JSON alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import Unavailable
from .suite_schema import SuiteRun
from .suite_stats import Row, precisions, rows, turns_of

WIDTH = 9.0  # inches; at 150 dots an inch letters stay readable when a README shows the picture 800 pixels wide
FEWEST_TRIES = 20  # of a position, below which its share is chance


def draw(run: SuiteRun, path: Path) -> None:
    """Draw both, one above the other, for the first batch size and our precision; the file's suffix says what is written."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise Unavailable("plots need matplotlib: pip install 'selfspec[bench]'") from error
    batch, precision = run.plan.batches[0], (precisions(run) or [run.plan.dtype])[0]
    shown = [row for row in rows(run, batch) if row.over_best is not None and row.precision == precision]
    figure, (above, below) = pyplot.subplots(
        2, 1, figsize=(WIDTH, 4 + 0.35 * len(shown)), height_ratios=(3, 2), layout="constrained"
    )
    _speed(above, shown)
    _positions(below, run, shown, batch)
    figure.suptitle(
        f"{run.plan.model}, {precision}, {run.plan.threads} threads, {run.provenance.cpu}, batch {batch}", fontsize=10
    )
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _speed(axes: Any, shown: Sequence[Row]) -> None:
    """A bar each, fastest above: speed over the fastest plain decoding of all engines."""
    ordered = sorted((row for row in shown if row.over_best), key=lambda row: row.over_best.value if row.over_best else 0.0)
    for place, row in enumerate(ordered):
        assert row.over_best is not None
        low, high = row.over_best.value - row.over_best.low, row.over_best.high - row.over_best.value
        colour = "0.6" if row.baseline else ("C0" if row.engine == "selfspec" else "C1")
        axes.barh(place, row.over_best.value, xerr=[[max(0.0, low)], [max(0.0, high)]], color=colour, error_kw={"linewidth": 0.8})
        axes.text(0.02, place, f"{row.over_best.value:.2f}", va="center", fontsize=8, color="white")
    axes.set_yticks(range(len(ordered)), [row.contestant for row in ordered], fontsize=8)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("speed, the fastest plain decoding = 1 (grey: plain decoding; blue: ours; orange: others)")


def _positions(axes: Any, run: SuiteRun, shown: Sequence[Row], batch: int) -> None:
    for row in shown:
        counts = [turn.counts for turn in turns_of(run, row.contestant, batch) if turn.counts is not None]
        tries = [sum(c.drafted_at[at] for c in counts if at < len(c.drafted_at)) for at in range(len(row.by_position))]
        points = [
            (at, kept) for at, (kept, tried) in enumerate(zip(row.by_position, tries, strict=True), 1) if tried >= FEWEST_TRIES
        ]
        if points:
            axes.plot([at for at, _ in points], [kept for _, kept in points], marker="o", label=row.contestant)
    axes.set_xlabel(f"position in the draft (those tried at least {FEWEST_TRIES} times)")
    axes.set_ylabel("kept, if all before it were")
    axes.set_ylim(0, 1)
    axes.xaxis.get_major_locator().set_params(integer=True)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7)
