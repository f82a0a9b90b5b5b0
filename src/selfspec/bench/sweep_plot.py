"""The pictures of a sweep, from its JSON: heat map of speedups, speedup by number of skipped
halves, the threshold's course."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .layers_plot import pyplot_or_error
from .sweep_report import WINDOW, grid_speeds, skip_speeds, smoothed


def plot_sweep(run: dict[str, Any], path: Path) -> None:
    """Draw what was measured, one below the other; the file's suffix says what is written."""
    pyplot = pyplot_or_error()
    drawn = [
        part
        for part, found in (
            (_grid, grid_speeds(run)),
            (_skips, skip_speeds(run)),
            (_gamma, run["gamma"]),
        )
        if found
    ]
    figure, axes = pyplot.subplots(
        len(drawn) or 1,
        1,
        figsize=(8.5, 4.2 * (len(drawn) or 1)),
        layout="constrained",
        squeeze=False,
    )
    for part, each in zip(drawn, axes[:, 0], strict=False):
        part(figure, each, run)
    where = run["provenance"]
    threads = f"{where['threads']} thread{'s' if where['threads'] > 1 else ''}"
    figure.suptitle(f"{run['model']}, {run['dtype']}, {threads}, {where['cpu']}", fontsize=11)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _grid(figure: Any, axes: Any, run: dict[str, Any]) -> None:
    from matplotlib.colors import TwoSlopeNorm

    cells = {(cell.first, cell.drafts): cell.speedup for cell in grid_speeds(run)}
    exits, drafts = sorted({first for first, _ in cells}), sorted({count for _, count in cells})
    values = [[cells.get((layer, count), float("nan")) for count in drafts] for layer in exits]
    norm = TwoSlopeNorm(1.0, min(0.5, *cells.values()), max(1.5, *cells.values()))
    image = axes.imshow(values, origin="lower", aspect="auto", cmap="RdYlGn", norm=norm)
    for row, layer in enumerate(exits):
        for column, count in enumerate(drafts):
            if (layer, count) in cells:
                axes.text(
                    column, row, f"{cells[layer, count]:.2f}", ha="center", va="center", fontsize=9
                )
    axes.set_xticks(range(len(drafts)), [str(count) for count in drafts])
    axes.set_yticks(range(len(exits)), [str(layer) for layer in exits])
    axes.set_xlabel("drafts a round")
    axes.set_ylabel("exit layer")
    axes.set_title("early exit: speed, plain decoding = 1", fontsize=10)
    figure.colorbar(image, ax=axes)


def _skips(_: Any, axes: Any, run: dict[str, Any]) -> None:
    cells = skip_speeds(run)
    axes.plot(
        [cell.first for cell in cells], [cell.speedup for cell in cells], marker="o", label="speed"
    )
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_ylabel("speed, plain decoding = 1")
    axes.set_xlabel(f"halves left out while drafting, of {2 * run['layers']}")
    axes.set_ylim(0, None)
    other = axes.twinx()
    other.plot(
        [cell.first for cell in cells],
        [cell.acceptance for cell in cells],
        "--",
        color="C1",
        label="accepted",
    )
    other.set_ylim(0, 1)
    other.set_ylabel("accepted / drafted (dashed)")
    axes.set_title(f"layer skipping, halves chosen by {run['options']['by']}", fontsize=10)


def _gamma(_: Any, axes: Any, run: dict[str, Any]) -> None:
    course = smoothed(run)
    rounds = range(1, len(course) + 1)
    axes.plot(
        rounds,
        [each["threshold"] for each in run["gamma"]],
        linewidth=0.7,
        alpha=0.6,
        label="threshold",
    )
    axes.plot(rounds, [mean for mean, _ in course], label=f"mean of {WINDOW} rounds")
    axes.fill_between(rounds, [m - d for m, d in course], [m + d for m, d in course], alpha=0.2)
    axes.set_xlabel("round, from prompt to prompt")
    axes.set_ylabel("threshold")
    axes.legend(fontsize=8)
    axes.set_title("adaptive control", fontsize=10)
