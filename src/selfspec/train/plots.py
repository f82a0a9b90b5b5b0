"""A training run in pictures: loss by exit over the steps, agreement and perplexity by exit.

matplotlib is optional and imported here alone in this room. Takes the report as it is in JSON, so
an old one can be drawn again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..core.files import writing
from ..errors import Unavailable


def require_matplotlib() -> Any:
    """pyplot without a screen, or an error that says what to install."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise Unavailable(
            "plots need matplotlib: pip install 'selfspec[train]' (or plot=False, --no-plot)"
        ) from error
    return pyplot


def plot_training(report: dict[str, Any], path: Path) -> None:
    """Loss by exit over the steps on the left, what each exit is worth on the right."""
    with figure(path, f"{report['model']}, {report['steps']} steps", 14, 5, 2) as (left, right):
        _losses(left, report["log"])
        _exits(right, report["exits"])


def plot_exits(scores: dict[str, list[dict[str, Any]]], path: Path, title: str) -> None:
    """Agreement and perplexity by exit, a line for each named model or time."""
    with figure(path, title, 8, 5) as (axes,):
        _exits(axes, scores)


@contextmanager
def figure(path: Path, title: str, width: float, height: float, plots: int = 1) -> Iterator[Any]:
    """Axes for plots side by side, saved when they are drawn."""
    pyplot = require_matplotlib()
    size = (width, height)
    figure, axes = pyplot.subplots(1, plots, figsize=size, layout="constrained", squeeze=False)
    yield axes[0]
    figure.suptitle(title)
    with writing(path):
        figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _losses(axes: Any, log: list[dict[str, Any]]) -> None:
    names = {name for line in log for name in line if name.startswith("exit_")}
    exits = sorted(int(name.removeprefix("exit_")) for name in names)
    for index, layer in enumerate(exits):
        points = [(line["step"], line[f"exit_{layer}"]) for line in log if f"exit_{layer}" in line]
        shade = (index + 1) / len(exits)
        style = {"color": (1 - shade, 0.2, shade), "linewidth": 1 + shade}
        # of a single point no line can be seen
        axes.plot(*zip(*points, strict=True), label=f"exit {layer}", marker="o", ms=3, **style)
    axes.set_xlabel("step")
    axes.set_ylabel("loss by exit")
    if exits:
        axes.legend(fontsize=7, ncols=1 + len(exits) // 12)


def _exits(axes: Any, scores: dict[str, list[dict[str, Any]]]) -> None:
    other = axes.twinx()
    for name, lines in scores.items():
        layers = [line["layers"] for line in lines]
        agreement, perplexity = (
            [line[key] for line in lines] for key in ("agreement", "perplexity")
        )
        drawn = axes.plot(layers, agreement, marker="o", label=f"agreement, {name}")
        color = drawn[0].get_color()
        other.plot(layers, perplexity, "--", color=color, label=f"perplexity, {name}")
    axes.set_xlabel("exit after this many layers")
    axes.set_ylabel("agreement with the whole model's next token")
    axes.set_ylim(0, 1.02)
    other.set_yscale("log")
    other.set_ylabel("perplexity (dashed)")
    axes.legend(fontsize=8, loc="center left")


def plot_part(report: dict[str, Any], path: Path) -> None:
    """A small part: loss over the steps on the left, the share of right drafts on the right."""
    log, title = report["log"], f"{report['kind']}, {report['tokens']:,} tokens"
    steps = [line["step"] for line in log]
    with figure(path, title, 12, 4.5, 2) as (left, right):
        left.plot(steps, [line["loss"] for line in log], marker="o", markersize=3)
        left.set_ylabel("loss")
        for depth in range(len(report["acceptance"])):
            shares = [line["acceptance"][depth] for line in log]
            right.plot(steps, shares, marker="o", markersize=3, label=f"draft {depth + 1}")
        right.set_ylabel("right, given that those before were (held-out text)")
        right.set_ylim(0, 1)
        right.legend()
        for axes in (left, right):
            axes.set_xlabel("step")
