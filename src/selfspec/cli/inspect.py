"""`selfspec inspect`: which token each layer would name at each position of a text; in the
terminal, as a page, as a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..core.files import require_output, write_whole
from ..errors import OptionError
from . import common, options

if TYPE_CHECKING:
    from ..bench.layers import LayerView, Position

MOST_CELLS = 44  # of the strip; deeper models show every second layer, every third ...
PICTURES = (".png", ".svg", ".pdf")


@options.grouped
def inspect(
    name: options.Model,
    prompt: Annotated[str, typer.Argument(help="The text to look at.")],
    last: Annotated[
        int, typer.Option("--last", min=1, help="Show this many last positions of a longer text.")
    ] = 40,
    max_new_tokens: Annotated[
        int,
        typer.Option(
            "--max-new-tokens", "-n", min=0, help="Let the model write this many tokens first."
        ),
    ] = 24,
    html: Annotated[
        Path | None, options.output("--html", help="Write a self-contained page into this file.")
    ] = None,
    png: options.Png = None,
    as_json: options.AsJson = False,
    *,
    model: options.Loading,
) -> None:
    """Show which token each layer would name, where that settles, and how little each half changes
    the text's states.

    Example:  selfspec inspect demo "for i in range(10):" --html layers.html
    """
    if png is not None and png.suffix not in PICTURES:
        raise OptionError(
            f"--png {png.name} names no kind of picture that can be drawn; end it in "
            f"{', '.join(PICTURES)}"
        )
    from ..bench.layers import look
    from ..bench.layers_report import layers_page, pictures, summary
    from ..bench.pictures import draw, pyplot_or_error

    for output in (html, png):
        if output is not None:
            require_output(output)
    if png is not None:
        pyplot_or_error()  # before a model is loaded
    view = look(common.open_model(name, model), prompt, last, max_new_tokens)
    if html is not None:
        write_whole(html, layers_page(view))
    if png is not None:
        draw(f"What each layer of {view.model} would say", pictures(view), png)
    if as_json:
        typer.echo(json.dumps(view.as_dict()))
        return
    console = Console(highlight=False)
    console.print(positions(view))
    console.print(halves(view))
    console.print(summary(view), soft_wrap=True)
    for path in (html, png):
        if path is not None:
            console.print(f"Written: {path}", soft_wrap=True, markup=False)


def positions(view: LayerView) -> Table:
    """A row for each position: what was read, a strip of the layers, where it settles, how the
    guess changed."""
    grid = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, expand=True)
    grid.add_column("read", no_wrap=True, max_width=12)
    grid.add_column(
        f"exits 1 to {view.layers}", no_wrap=True, min_width=min(view.layers, MOST_CELLS)
    )
    grid.add_column("settles", justify="right", no_wrap=True, min_width=7)
    grid.add_column("named", no_wrap=True, max_width=12)
    grid.add_column("before that", no_wrap=True, overflow="ellipsis", style="dim", ratio=1)
    for position in view.positions:
        read = Text(position.token, style="bold" if position.written else "")
        grid.add_row(
            read,
            strip(position),
            str(position.settles),
            Text(position.guesses[-1]),
            Text(changes(position)),
        )
    return grid


def strip(position: Position) -> Text:
    """One mark an exit: full where it names the whole model's token, the more so the surer it is; a
    dot where it does not."""
    line = Text()
    layers = len(position.guesses)
    step = -(-layers // MOST_CELLS)
    for layer in range((layers - 1) % step, layers, step):  # so that the last one is among them
        if position.choices[layer] != position.choices[-1]:
            line.append("·", "red")
        else:
            line.append("░▒▓█"[min(3, int(4 * position.chances[layer]))], "green")
    return line


def changes(position: Position, most: int = 5) -> str:
    """The guesses before the last one, latest first: `range 7-22 ← in 3-6`."""
    named = [
        f"{guess} {first}" if first == last else f"{guess} {first}-{last}"
        for guess, first, last in position.runs[:-1]
    ]
    return " ← ".join(reversed(named[-most:]))


def halves(view: LayerView) -> Table:
    """Mean cosine similarity of each layer's halves, in rows of ten layers."""
    grid = Table(
        title="cosine similarity around each half (1: changes nothing)",
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    grid.add_column("layer", justify="right", style="bold")
    grid.add_column("half")
    for column in range(10):
        grid.add_column(str(column), justify="right")
    for start in range(0, view.layers, 10):
        for label, values in (("attention", view.attention), ("MLP", view.mlp)):
            cells = [f"{value:.3f}" for value in values[start : start + 10]]
            grid.add_row(str(start) if label == "attention" else "", label, *cells)
    return grid
