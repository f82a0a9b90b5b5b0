"""Bars, heat maps and curves of a report as one picture, PNG or SVG: what `html.py` shows on a
page. Needs matplotlib. Knows no benchmark."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..core.files import writing
from ..errors import Unavailable
from .html import Bars, Curves, Heat

COLOURS = {"good": "#1a7f37", "bad": "#c42b1c", "tint": "#2563eb"}
LONGEST, LONGEST_NAME = 9, 16  # characters of a cell, and of a column's name
Picture = Bars | Heat | Curves


def pyplot_or_error() -> Any:
    """pyplot without a screen, or an error that says what to install."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise Unavailable(
            "pictures need matplotlib: pip install 'selfspec[bench]' (a page in HTML needs nothing)"
        ) from error
    return pyplot


def draw(title: str, pictures: Sequence[tuple[str, Picture]], path: Path) -> None:
    """Pictures with their titles, one below the other; the file's suffix says what is written."""
    pyplot = pyplot_or_error()
    sizes = [_size(picture) for _, picture in pictures] or [(8.0, 1.0)]
    width, heights = max(wide for wide, _ in sizes), [high for _, high in sizes]
    figure, axes = pyplot.subplots(
        len(sizes), 1, figsize=(width, sum(heights) + 0.5), height_ratios=heights,
        layout="constrained", squeeze=False,
    )  # fmt: skip
    for (name, picture), each in zip(pictures, axes[:, 0], strict=False):
        each.set_title(name, fontsize=10)
        if isinstance(picture, Bars):
            _bars(each, picture)
        elif isinstance(picture, Heat):
            _heat(each, picture)
        else:
            _curves(each, picture)
    figure.suptitle(title, fontsize=11)
    with warnings.catch_warnings():  # scripts that the font lacks show as boxes; the page has them
        warnings.filterwarnings("ignore", message="Glyph")
        with writing(path):
            figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _size(picture: Picture) -> tuple[float, float]:
    """Inches, width and height."""
    if isinstance(picture, Bars):
        return 9.0, 0.8 + 0.3 * len(picture.bars)
    if isinstance(picture, Heat):
        return max(9.0, 1.5 + 0.58 * len(picture.columns)), 1.3 + 0.27 * len(picture.rows)
    return 9.0, 3.2


def _bars(axes: Any, picture: Bars) -> None:
    for place, bar in enumerate(reversed(picture.bars)):
        low, high = bar.low or bar.value, bar.high or bar.value
        error = [[max(0.0, bar.value - low)], [max(0.0, high - bar.value)]]
        axes.barh(place, bar.value, xerr=error, color=COLOURS[picture.tone(bar)], alpha=0.65)
    names = [f"{bar.name}  {bar.value:.2f}" for bar in reversed(picture.bars)]
    axes.set_yticks(range(len(names)), names, fontsize=8)
    if picture.mark is not None:
        axes.axvline(picture.mark, color="black", linewidth=0.8, linestyle="--")


def _heat(axes: Any, picture: Heat) -> None:
    from matplotlib.patches import Rectangle

    for row, (_, cells) in enumerate(picture.rows):
        for column, cell in enumerate(cells):
            axes.text(column, row, _short(cell.text), ha="center", va="center", fontsize=8)
            colour, strength = COLOURS[cell.tone], 0.62 * cell.bounded
            corner = (column - 0.5, row - 0.5)
            axes.add_patch(Rectangle(corner, 1, 1, linewidth=0, facecolor=colour, alpha=strength))
    axes.set_xlim(-0.5, len(picture.columns) - 0.5)
    axes.set_ylim(len(picture.rows) - 0.5, -0.5)
    names = [_short(name, LONGEST_NAME) for name in picture.columns]
    turned = {"rotation": 60, "ha": "right"} if max(map(len, names), default=0) > 4 else {}
    axes.set_xticks(range(len(names)), names, fontsize=8, **turned)
    axes.set_yticks(range(len(picture.rows)), [name for name, _ in picture.rows], fontsize=8)
    axes.set_ylabel(picture.corner)


def _curves(axes: Any, picture: Curves) -> None:
    for line in picture.drawn:
        xs, ys = [x for x, _ in line.points], [y for _, y in line.points]
        style = {"marker": "o", "markersize": 3.5} if line.dots else {"linewidth": 0.9}
        axes.plot(xs, ys, color=f"C{line.index}", label=line.name, **style)
        if line.band:
            lows, highs = [low for low, _ in line.band], [high for _, high in line.band]
            axes.fill_between(xs, lows, highs, color=f"C{line.index}", alpha=0.2)
    if picture.mark is not None:
        axes.axhline(picture.mark, color="black", linewidth=0.8, linestyle="--")
    if picture.span is not None:
        axes.set_ylim(*picture.span)
    if len(picture.drawn) > 1:
        axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    axes.set_xlabel(picture.x_name, fontsize=9)
    axes.set_ylabel(picture.y_name, fontsize=9)


def _short(text: str, most: int = LONGEST) -> str:
    """Cut to a width; a dollar would start a formula."""
    short = text if len(text) <= most else text[: most - 1] + "…"
    return short.replace("$", r"\$")
