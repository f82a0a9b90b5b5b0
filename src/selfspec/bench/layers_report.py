"""The page and the picture of `selfspec inspect`: the text coloured by where each token settles,
the grid of guesses, similarities by layer.

Source: LayerSkip, Figure 2. Knows what was seen, not how.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from statistics import fmean

from .html import Cell, Curves, Heading, Heat, Line, Paragraph, Piece, page
from .layers import LayerView, Position
from .pictures import Picture


def layers_page(view: LayerView) -> str:
    """The whole page."""
    subtitle = (
        f"{view.layers} layers; a text of {view.tokens} tokens ({view.prompt_tokens} of the "
        f"prompt), of which the last {len(view.positions)} are shown"
    )
    told = {
        "What each exit names": "A row is an exit, a column a position: the token read stands "
        "above, the guess of what follows inside. Green: what the whole model names; the stronger, "
        "the surer the exit. Top row: the whole model.",
        "How little each half changes": "Cosine similarity of the residual stream before and "
        "after, mean over the text. Skipping what is at 1 loses nothing.",
    }
    body: list[Piece] = [
        Paragraph(summary(view), "verdict"),
        Heading("The text, by where each next token settles"),
        Paragraph(
            "The stronger the colour, the more layers the model needed to choose this token. "
            "Underlined: the model wrote it."
        ),
        Text(view),
    ]
    for title, picture in pictures(view):
        body += [Heading(title), *([Paragraph(told[title])] if title in told else []), picture]
    return page(f"What each layer of {view.model} would say", subtitle, body)


def summary(view: LayerView) -> str:
    """The finding in words."""
    first = fmean(position.first for position in view.positions)
    settles = fmean(position.settles for position in view.positions)
    spared = 1 - settles / view.layers
    half = view.agreement(max(1, view.layers // 2))
    return (
        f"On average the whole model's token is first named by exit {first:.1f} and "
        f"settles at exit {settles:.1f} of {view.layers}: an oracle that knew when to "
        f"stop would spare {spared:.0%} of the layers. Half of the layers name it at {half:.0%} of "
        "the positions."
    )


def pictures(view: LayerView) -> list[tuple[str, Picture]]:
    """The grid of guesses, how many have settled, and the similarities."""
    exits = range(1, view.layers + 1)
    settled = [(float(layer), view.settled_by(layer)) for layer in exits]
    named = [(float(layer), view.agreement(layer)) for layer in exits]
    lines = [Line("settled", settled, 0), Line("named by this exit", named, 1)]
    halves = [("attention", _similar(view.attention)), ("MLP", _similar(view.mlp))]
    columns = [str(layer) for layer in range(view.layers)]
    shares = Curves(lines, "exit after so many layers", "share of positions", span=(0.0, 1.0))
    return [
        ("What each exit names", _grid(view)),
        ("How many positions have settled", shares),
        ("How little each half changes", Heat("layer", columns, halves, "few")),
    ]


@dataclass(frozen=True)
class Text:
    """The tokens that follow each position, as one text."""

    view: LayerView

    def html(self) -> str:
        shown = self.view.positions
        first = f'<span title="first of those shown">{escape(shown[0].token)}</span>'
        return f'<div class="text">{first}{"".join(map(self._span, shown))}</div>'

    def _span(self, position: Position) -> str:
        if position.following is None:
            return ""
        strength = (position.settles - 1) / max(1, self.view.layers - 1)
        written = position.index + 1 >= self.view.prompt_tokens
        told = f"settles at exit {position.settles}, first named at {position.first}"
        if position.following != position.guesses[-1]:
            told = f"the model would say {position.guesses[-1]}; {told}"
        colour = f"rgba(var(--tint),calc({strength:.3f} * var(--strong)))"
        style = f"{'text-decoration:underline;' if written else ''}background:{colour}"
        following = escape(position.following)
        return f'<span style="{style}" title="{escape(told)}">{following}</span>'


def _grid(view: LayerView) -> Heat:
    rows = [
        (str(layer), [_cell(position, layer) for position in view.positions])
        for layer in range(view.layers, 0, -1)
    ]
    most = max(1, view.layers - 1)
    rows.append(("settles", [Cell(str(p.settles), (p.settles - 1) / most) for p in view.positions]))
    return Heat("exit", [_short(position.token) for position in view.positions], rows, "mono")


def _cell(position: Position, layer: int) -> Cell:
    guess, chance = position.guesses[layer - 1], position.chances[layer - 1]
    title = f"after {position.token!r}, exit {layer} says {guess!r} ({chance:.0%})"
    if position.choices[layer - 1] == position.choices[-1]:
        return Cell(_short(guess), 0.25 + 0.75 * chance, "good", title)
    return Cell(_short(guess), 0.35 * chance, "bad", title)


def _similar(cosines: Sequence[float]) -> list[Cell]:
    """0.9 has no colour and 1 all of it: below that a half changes too much to be skipped."""
    return [Cell(f"{cosine:.3f}", (cosine - 0.9) * 10, "good") for cosine in cosines]


def _short(text: str, most: int = 9) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
