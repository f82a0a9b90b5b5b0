"""A tuning as one picture: the best over time, which halves are left out (as in Draft & Verify's
Figure 6), and predicted next to measured speeds. Needs matplotlib. Measures nothing."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..bench.pictures import COLOURS, pyplot_or_error
from ..core.files import writing
from .search import split

if TYPE_CHECKING:
    from .run import Found

BEST = 10  # skip sets whose halves are counted


def draw(found: Found, layers: int, title: str, path: Path) -> None:
    """The picture; the file's suffix says what is written."""
    pyplot = pyplot_or_error()
    figure, axes = pyplot.subplots(
        3, 1, figsize=(8.5, 9.0), height_ratios=(3, 1.6, 4), layout="constrained"
    )
    _over_time(axes[0], found)
    _halves(axes[1], found, layers)
    _predicted(axes[2], found)
    figure.suptitle(title, fontsize=11)
    with writing(path):
        figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _empty(axes: Any, words: str) -> None:
    axes.text(0.5, 0.5, words, ha="center", va="center", transform=axes.transAxes)
    axes.set_xticks([])
    axes.set_yticks([])


def _over_time(axes: Any, found: Found) -> None:
    axes.set_title("Skip sets in the order of the search", fontsize=10)
    if not found.tried:
        return _empty(axes, "no skip set was looked at")
    values = [tried.value for tried in found.tried]
    seconds = found.seconds or list(range(len(values)))
    values, seconds = values[-len(seconds) :], seconds[-len(values) :]
    axes.plot(seconds, values, ".", color="0.6", markersize=4, label="a skip set")
    axes.step(
        seconds, list(accumulate(values, max)), where="post", color=COLOURS["tint"], label="best"
    )
    axes.axhline(1.0, color="0.3", linewidth=0.8, linestyle="--", label="plain decoding")
    axes.set_xlabel("seconds of the search", fontsize=9)
    axes.set_ylabel("times plain decoding", fontsize=9)
    axes.legend(fontsize=8, loc="lower right")


def _halves(axes: Any, found: Found, layers: int) -> None:
    axes.set_title(f"Halves left out, of the best {BEST} skip sets (best: framed)", fontsize=10)
    if not found.tried:
        return _empty(axes, "no skip set was looked at")
    sets = dict.fromkeys(
        tried.halves for tried in sorted(found.tried, key=lambda tried: -tried.value)
    )
    best = list(sets)[:BEST]
    shares = [[0.0] * layers, [0.0] * layers]
    for halves in best:
        for row, skipped in enumerate(split(halves, layers)):
            for layer in skipped:
                shares[row][layer] += 1 / len(best)
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    for row, skipped in enumerate(split(best[0], layers)):
        for layer in skipped:
            box = ([layer - 0.45, layer + 0.45, layer + 0.45, layer - 0.45, layer - 0.45],
                   [row - 0.42, row - 0.42, row + 0.42, row + 0.42, row - 0.42])  # fmt: skip
            axes.plot(*box, color=COLOURS["bad"], linewidth=1.5)
    axes.set_yticks([0, 1], ["attention", "MLP"], fontsize=9)
    axes.set_xticks(range(0, layers, max(1, layers // 15)))
    axes.set_xlabel("layer", fontsize=9)


def _predicted(axes: Any, found: Found) -> None:
    axes.set_title("Predicted next to measured", fontsize=10)
    ways = [way for way in found.ways if way.predicted and way.measured]
    if not ways:
        return _empty(axes, "no way that was timed could be predicted")
    both = [value for way in ways for value in (way.predicted or 0.0, way.measured or 0.0)]
    ends = [0.9 * min(*both, 1.0), 1.1 * max(*both, 1.0)]
    axes.plot(ends, ends, color="0.6", linewidth=0.8, linestyle="--")
    for number, way in enumerate(ways):
        measured = way.measured or 0.0
        error = [[measured - (way.low or measured)], [(way.high or measured) - measured]]
        name = str(way)
        name = name if len(name) <= 60 else name[:57] + "..."
        axes.errorbar(
            [way.predicted],
            [measured],
            yerr=error,
            fmt="o",
            capsize=3,
            label=name,
            color=f"C{number}",
        )
    axes.set_xlabel("predicted, times plain decoding", fontsize=9)
    axes.set_ylabel("measured (95%)", fontsize=9)
    axes.legend(fontsize=7, loc="upper left")
