"""The page of `selfspec inspect`: the text coloured by where each token settles, the grid of
guesses, similarities by layer.

Source: LayerSkip, Figure 2. Knows what was seen, not how.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from .html import Cell, Line, heading, heat, lines, page, paragraph
from .layers import LayerView, Position


def layers_page(view: LayerView) -> str:
    """The whole file."""
    subtitle = (
        f"{view.layers} layers; a text of {view.tokens} tokens ({view.prompt_tokens} of the "
        f"prompt), "
        f"of which the last {len(view.positions)} are shown"
    )
    return page(f"What each layer of {view.model} would say", subtitle, _body(view))


def summary(view: LayerView) -> str:
    """The finding in words."""
    spared = 1 - view.mean_settles / view.layers
    return (
        f"On average the whole model's token is first named by exit {view.mean_first:.1f} and "
        f"settles at exit "
        f"{view.mean_settles:.1f} of {view.layers}: an oracle that knew when to stop would spare "
        f"{spared:.0%} of the layers. "
        f"Half of the layers name it at {view.agreement(max(1, view.layers // 2)):.0%} of the "
        f"positions."
    )


def _body(view: LayerView) -> Sequence[str]:
    return [
        paragraph(summary(view), "verdict"),
        heading("The text, by where each next token settles"),
        paragraph(
            "The stronger the colour, the more layers the model needed to choose this token. "
            "Underlined: the model wrote it."
        ),
        _text(view),
        heading("What each exit names"),
        paragraph(
            "A row is an exit, a column a position: the token read stands above, the guess of "
            "what follows inside. Green: what "
            "the whole model names; the stronger, the surer the exit. Top row: the whole model.",
        ),
        _grid(view),
        heading("How many positions have settled"),
        lines(
            [
                Line(
                    "settled",
                    [(layer, view.settled_by(layer)) for layer in range(1, view.layers + 1)],
                    0,
                ),
                Line(
                    "named by this exit",
                    [(layer, view.agreement(layer)) for layer in range(1, view.layers + 1)],
                    1,
                ),
            ],
            "exit after so many layers",
            "share of positions",
            span=(0.0, 1.0),
        ),
        heading("How little each half changes"),
        paragraph(
            "Cosine similarity of the residual stream before and after, mean over the text. "
            "Skipping what is at 1 loses nothing."
        ),
        heat(
            "layer",
            [str(layer) for layer in range(view.layers)],
            [("attention", _similar(view.attention)), ("MLP", _similar(view.mlp))],
            "few",
        ),
    ]


def _text(view: LayerView) -> str:
    """The tokens that follow each position, as one text."""
    parts = (
        [f'<span title="first of those shown">{escape(view.positions[0].token)}</span>']
        if view.positions
        else []
    )
    for position in view.positions:
        if position.following is not None:
            strength = (position.settles - 1) / max(1, view.layers - 1)
            line = "text-decoration:underline;" if position.index + 1 >= view.prompt_tokens else ""
            named = f"settles at exit {position.settles}, first named at {position.first}"
            told = (
                named
                if position.following == position.guesses[-1]
                else f"the model would say {position.guesses[-1]}; {named}"
            )
            parts.append(
                f'<span style="{line}background:rgba(var(--tint),calc({strength:.3f} * '
                f'var(--strong)))" title="{escape(told)}">'
                f"{escape(position.following)}</span>"
            )
    return f'<div class="text">{"".join(parts)}</div>'


def _grid(view: LayerView) -> str:
    columns = [_short(position.token) for position in view.positions]
    rows = []
    for layer in range(view.layers, 0, -1):
        rows.append((str(layer), [_cell(position, layer) for position in view.positions]))
    rows.append(
        (
            "settles",
            [
                Cell(str(p.settles), (p.settles - 1) / max(1, view.layers - 1))
                for p in view.positions
            ],
        )
    )
    return heat("exit", columns, rows, "mono")


def _cell(position: Position, layer: int) -> Cell:
    guess, chance = position.guesses[layer - 1], position.chances[layer - 1]
    agrees = position.choices[layer - 1] == position.choices[-1]
    title = f"after {position.token!r}, exit {layer} says {guess!r} ({chance:.0%})"
    return Cell(
        _short(guess),
        0.25 + 0.75 * chance if agrees else 0.35 * chance,
        "good" if agrees else "bad",
        title,
    )


def _similar(cosines: Sequence[float]) -> list[Cell]:
    """0.9 has no colour and 1 all of it: below that a half changes too much to be skipped."""
    return [Cell(f"{cosine:.3f}", (cosine - 0.9) * 10, "good") for cosine in cosines]


def _short(text: str, most: int = 9) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
