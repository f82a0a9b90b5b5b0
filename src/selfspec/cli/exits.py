"""`selfspec exits`: what each exit of a model is worth on a text. The room `train` measures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from ..errors import OptionError
from . import common, options
from .flags import Flags, Typed

if TYPE_CHECKING:
    from ..train.evaluate import ExitScore

Texts = Annotated[
    Typed,
    Flags("train.data:DataOptions", "Data"),
    Flags("train.run:TrainOptions", "Data", only=("score_blocks",)),
]


@options.grouped
def exits(
    name: options.Model,
    data: options.DataFiles,
    texts: Texts,
    model: options.Loading,
    png: options.Png = None,
    as_json: options.AsJson = False,
) -> None:
    """Measure each exit of a model on a text: perplexity, and agreement with the whole model.

    Example:  selfspec exits demo --data mine.jsonl --held-out 0.5
    """
    from ..train.data import DataOptions, load_data
    from ..train.evaluate import evaluate_exits
    from ..train.plots import plot_exits
    from ..train.run import TrainOptions

    settings, blocks = texts.make(DataOptions), texts.make(TrainOptions).score_blocks
    if not blocks:
        raise OptionError("--score-blocks 0 leaves nothing to measure on; use 1 or more")
    llm = common.open_model(name, model)
    if llm.tokenizer is None:
        raise OptionError(
            f"{name} has no tokenizer, so it cannot read text; add its files to the folder"
        )
    held_out = load_data(data, llm.tokenizer, settings).held_out
    scores = evaluate_exits(llm.model, held_out, most=blocks)
    facts = [score.as_dict() for score in scores]
    if png is not None:
        plot_exits({name: facts}, png, f"Exits of {name}")
    if as_json:
        typer.echo(json.dumps({"model": name, "exits": facts}))
    else:
        Console(highlight=False).print(table({"": scores}))


def table(scores: Mapping[str, Sequence[ExitScore]]) -> Table:
    """A row for each exit. For each time (before, after, ...) agreement and perplexity."""
    grid = Table(box=None, padding=(0, 2, 0, 0))
    grid.add_column("exit", justify="right")
    for when in scores:
        grid.add_column(f"agreement {when}".strip(), justify="right")
        grid.add_column(f"perplexity {when}".strip(), justify="right")
    for row in zip(*scores.values(), strict=True):
        cells = [(f"{score.agreement:.1%}", f"{score.perplexity:,.2f}") for score in row]
        grid.add_row(str(row[0].layers), *(cell for pair in cells for cell in pair))
    return grid
