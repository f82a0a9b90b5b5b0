"""The picture of `selfspec inspect` as PNG or SVG, for papers and issues: the grid of guesses, and
similarities beside it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from ..errors import Unavailable
from .layers import LayerView

LONGEST = 8  # characters of a guess that fit into a cell


def pyplot_or_error() -> Any:
    """pyplot without a screen, or an error that says what to install."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise Unavailable(
            "pictures need matplotlib: pip install 'selfspec[bench]' (or write HTML, which needs "
            "nothing)"
        ) from error
    return pyplot


def plot_layers(view: LayerView, path: Path) -> None:
    """Draw it; the file's suffix says what is written."""
    pyplot = pyplot_or_error()
    columns = len(view.positions)
    size = (max(7.0, 2.6 + 0.58 * columns), 2.0 + 0.27 * view.layers)
    figure, (grid, side) = pyplot.subplots(
        1, 2, figsize=size, width_ratios=(max(5.0, 0.58 * columns), 2.0), layout="constrained"
    )
    _grid(grid, view)
    layers = [layer + 1 for layer in range(view.layers)]
    for label, marker, cosines in (("attention", "o", view.attention), ("MLP", "s", view.mlp)):
        side.plot(
            [max(1 - cosine, 1e-5) for cosine in cosines],
            layers,
            marker=marker,
            markersize=3,
            label=label,
        )
    side.set_xscale("log")
    side.set_ylim(0.5, view.layers + 0.5)
    side.set_xlabel("1 - cosine similarity")
    side.grid(alpha=0.3)
    side.legend(fontsize=8)
    figure.suptitle(
        f"{view.model}: what each exit names; on average settled at {view.mean_settles:.1f} of "
        f"{view.layers}",
        fontsize=11,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="Glyph"
        )  # scripts that the font lacks show as boxes; the page has them
        figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _grid(axes: Any, view: LayerView) -> None:
    shades = [
        [
            (
                0.25 + 0.75 * p.chances[layer]
                if p.choices[layer] == p.choices[-1]
                else -0.35 * p.chances[layer]
            )
            for p in view.positions
        ]
        for layer in range(view.layers)
    ]
    axes.imshow(
        shades,
        aspect="auto",
        origin="lower",
        cmap="RdYlGn",
        vmin=-1.2,
        vmax=1.2,
        extent=_extent(view),
    )
    for column, position in enumerate(view.positions):
        for layer, guess in enumerate(position.guesses, start=1):
            axes.text(column, layer, _plain(guess), ha="center", va="center", fontsize=8)
    axes.set_xticks(
        range(len(view.positions)),
        [_plain(p.token) for p in view.positions],
        rotation=60,
        ha="right",
        fontsize=9,
    )
    axes.set_yticks(
        range(1, view.layers + 1), [str(layer) for layer in range(1, view.layers + 1)], fontsize=8
    )
    axes.set_xlabel("token read")
    axes.set_ylabel("exit after so many layers")


def _extent(view: LayerView) -> tuple[float, float, float, float]:
    return -0.5, len(view.positions) - 0.5, 0.5, view.layers + 0.5


def _plain(text: str) -> str:
    """Cut to a cell's width; a dollar would start a formula."""
    short = text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
    return short.replace("$", r"\$")
