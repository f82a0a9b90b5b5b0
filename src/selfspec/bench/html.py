"""The pieces of a report, and the page of one file that is made of them.

Nothing is loaded from elsewhere and no script runs, so a page can be mailed, committed and opened
in ten years, in light and dark, on wide and narrow screens. Text stays text: bars and heat maps are
boxes with numbers in them. Only curves are drawn, as SVG, once for wide and once for narrow
screens. Whatever is given is escaped here. `pictures.py` draws the same pieces, `tables.py` writes
tables as text. Knows no benchmark.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Protocol

STYLE = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
COLOURS = 10
WIDE, NARROW = 760, 350  # drawing widths, in the pixels at which they are shown
LONG_WORDS = 40  # characters, from which on a cell of words is broken into lines


class Piece(Protocol):
    """Anything that a page is made of."""

    def html(self) -> str: ...


def page(title: str, subtitle: str, body: Sequence[Piece]) -> str:
    """The whole file."""
    inner = "\n".join(piece.html() for piece in body)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body><main>\n"
        f'<h1>{escape(title)}</h1>\n<p class="soft">{escape(subtitle)}</p>\n'
        f"{inner}\n</main></body></html>\n"
    )


def breakable(text: str) -> str:
    """Escaped, with places at which a long name of a method may be broken."""
    return re.sub(r"([/@:,])(?=\S)", r"\1<wbr>", escape(text))


@dataclass(frozen=True)
class Heading:
    text: str

    def html(self) -> str:
        return f"<h2>{escape(self.text)}</h2>"


@dataclass(frozen=True)
class Paragraph:
    """`kind`: soft for remarks, verdict for what a reader wants to know first."""

    text: str
    kind: str = ""

    def html(self) -> str:
        kind = f' class="{escape(self.kind)}"' if self.kind else ""
        return f"<p{kind}>{escape(self.text)}</p>"


@dataclass(frozen=True)
class Facts:
    """Names and values."""

    pairs: Mapping[str, object]

    def html(self) -> str:
        pairs = ((escape(name), escape(str(value))) for name, value in self.pairs.items())
        return (
            "<dl>" + "".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in pairs) + "</dl>"
        )


@dataclass(frozen=True)
class Table:
    """Columns of numbers, but for those in `words`. The first one stays in view when scrolled."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: Sequence[int] = (0,)

    def html(self) -> str:
        head = self._line("th", self.header)
        body = "".join(f"<tr>{self._line('td', row)}</tr>\n" for row in self.rows)
        return (
            f'<div class="wide"><table class="page"><thead><tr>{head}</tr></thead><tbody>\n'
            f"{body}</tbody></table></div>"
        )

    def _line(self, tag: str, cells: Sequence[str]) -> str:
        parts = []
        for column, text in enumerate(cells):
            long = column and len(text) >= LONG_WORDS
            kind = " class=num" if column not in self.words else " class=wrap" if long else ""
            parts.append(f"<{tag}{kind}>{escape(text) if column else breakable(text)}</{tag}>")
        return "".join(parts)


@dataclass(frozen=True)
class Bar:
    """One horizontal bar; `low` and `high` are its interval, `note` stands behind it."""

    name: str
    value: float
    low: float | None = None
    high: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Bars:
    """Bars from 0 on one scale, with a dashed line at `mark`, which decides their colours."""

    bars: Sequence[Bar]
    mark: float | None = 1.0

    def tone(self, bar: Bar) -> str:
        """Green above the mark, red below it, else blue."""
        if self.mark is None or bar.value == self.mark:
            return "tint"
        return "good" if bar.value > self.mark else "bad"

    def html(self) -> str:
        most = 1.05 * max([bar.high or bar.value for bar in self.bars] + [self.mark or 0.0, 1e-9])
        return "<figure>" + "\n".join(self._bar(bar, most) for bar in self.bars) + "</figure>"

    def _bar(self, bar: Bar, most: float) -> str:
        def share(value: float) -> str:
            return f"{max(0.0, 100 * value / most):.2f}%"

        style = f"width:{share(bar.value)};background:rgba(var(--{self.tone(bar)}),0.65)"
        inner = f'<div class="fill" style="{style}"></div>'
        if bar.low is not None and bar.high is not None:
            style = f"left:{share(bar.low)};width:{share(bar.high - bar.low)}"
            inner += f'<div class="whisker" style="{style}"></div>'
        if self.mark is not None:
            inner += f'<div class="mark" style="left:{share(self.mark)}"></div>'
        note = escape(bar.note or f"{bar.value:.2f}")
        name = f'<div class="name">{breakable(bar.name)}</div>'
        return f'<div class="bar">{name}<div class="track">{inner}</div><div>{note}</div></div>'


@dataclass(frozen=True)
class Cell:
    """A cell of a heat map: its text, its colour and how strong that is (0 to 1), a remark."""

    text: str
    strength: float = 0.0
    tone: str = "tint"  # tint, good or bad
    title: str = ""  # shown when one points at it

    @classmethod
    def of_speed(cls, speed: float, title: str) -> Cell:
        """A speed over something: green above 1, red below, the stronger the further away."""
        away = speed - 1 if speed >= 1 else 1 / max(speed, 1e-9) - 1
        tone = "good" if speed >= 1 else "bad"
        return cls(f"{speed:.2f}", 0.1 + 0.9 * min(1.0, 1.5 * away), tone, title)

    @property
    def bounded(self) -> float:
        return max(0.0, min(1.0, self.strength))

    def html(self) -> str:
        colour = f"rgba(var(--{self.tone}),calc({self.bounded:.3f} * var(--strong)))"
        title = f' title="{escape(self.title)}"' if self.title else ""
        return f'<td style="background:{colour}"{title}>{escape(self.text)}</td>'


@dataclass(frozen=True)
class Heat:
    """A table whose cells are coloured; its first column stays in view."""

    corner: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Cell]]]
    kind: str = ""  # few: wide columns; mono: letters of one width

    def html(self) -> str:
        head = "".join(f"<th>{escape(each)}</th>" for each in (self.corner, *self.columns))
        body = "\n".join(
            f"<tr><th>{breakable(name)}</th>{''.join(cell.html() for cell in cells)}</tr>"
            for name, cells in self.rows
        )
        return (
            f'<div class="wide"><table class="grid {self.kind}"><thead><tr>{head}</tr></thead>'
            f"<tbody>\n{body}\n</tbody></table></div>"
        )


@dataclass(frozen=True)
class Line:
    """A curve: (x, y), in order; `index` is its colour, `band` what is shaded around it."""

    name: str
    points: Sequence[tuple[float, float]]
    index: int = 0
    dots: bool = True
    band: Sequence[tuple[float, float]] = ()  # (low, high) of each point

    @property
    def colour(self) -> str:
        return f"var(--c{self.index % COLOURS})"


@dataclass(frozen=True)
class Curves:
    """Curves in one picture, with a legend if there are several; `mark` is a dashed line."""

    lines: Sequence[Line]
    x_name: str
    y_name: str
    mark: float | None = None
    span: tuple[float, float] | None = None

    @property
    def drawn(self) -> list[Line]:
        return [line for line in self.lines if line.points]

    def html(self) -> str:
        if not self.drawn:
            return Paragraph("Nothing was measured for this picture.", "soft").html()
        names = "".join(
            f'<span><span class="swatch" style="background:{line.colour}"></span>'
            f"{escape(line.name)}</span>"
            for line in self.drawn
        )
        legend = f'<div class="legend">{names}</div>' if len(self.drawn) > 1 else ""
        wide, narrow = _Picture(self, WIDE).svg(), _Picture(self, NARROW).svg()
        return (
            f'<figure>{legend}<div class="desk">{wide}</div>'
            f'<div class="phone">{narrow}</div></figure>'
        )


class _Picture:
    """Curves at one width."""

    def __init__(self, curves: Curves, width: int) -> None:
        self.curves, self.width, self.height = curves, width, round(190 + width * 0.12)
        self.left, self.right, self.bottom = 44, width - 12, self.height - 40
        self.xs = [x for line in curves.drawn for x, _ in line.points]
        ys = [y for line in curves.drawn for _, y in line.points]
        ys += [] if curves.mark is None else [curves.mark]
        self.low, self.high = curves.span or _rounded(min(ys), max(ys))
        first, last = min(self.xs), max(self.xs)
        self.x = _scale(first, last if last > first else first + 1, self.left, self.right)
        self.y = _scale(self.low, self.high, self.bottom, 22)

    def svg(self) -> str:
        x_name, y_name = escape(self.curves.x_name), escape(self.curves.y_name)
        middle = (self.left + self.right) / 2
        return (
            f'<svg viewBox="0 0 {self.width} {self.height}" role="img" '
            f'aria-label="{y_name} by {x_name}">{self._axes()}'
            + "".join(self._curve(line) for line in self.curves.drawn)
            + f'<text x="{self.left}" y="12">{y_name}</text>'
            f'<text x="{middle}" y="{self.height - 6}" text-anchor="middle">{x_name}</text></svg>'
        )

    def _axes(self) -> str:
        parts = []
        for y in ticks(self.low, self.high, 5):
            parts.append(self._level(y, 'class="grid-line"'))
            at = self.y(y) + 4
            parts.append(f'<text x="{self.left - 6}" y="{at:.1f}" text-anchor="end">{y:g}</text>')
        least = 1.0 if all(x == round(x) for x in self.xs) else 0.0
        for x in ticks(min(self.xs), max(self.xs), max(3, self.width // 90), least):
            place = f'x="{self.x(x):.1f}" y="{self.bottom + 16}"'
            parts.append(f'<text {place} text-anchor="middle">{x:g}</text>')
        if self.curves.mark is not None:
            parts.append(
                self._level(self.curves.mark, 'stroke="var(--ink)" stroke-dasharray="5 4"')
            )
        return "".join(parts)

    def _level(self, y: float, style: str) -> str:
        at = f"{self.y(y):.1f}"
        return f'<line x1="{self.left}" x2="{self.right}" y1="{at}" y2="{at}" {style}/>'

    def _curve(self, line: Line) -> str:
        path = self._path(line.points)
        dots = "".join(
            f'<circle cx="{self.x(x):.1f}" cy="{self.y(y):.1f}" r="3" fill="{line.colour}">'
            f"<title>{escape(line.name)}: {x:g}, {y:.3g}</title></circle>"
            for x, y in (line.points if line.dots else ())
        )
        band = ""
        if line.band:
            pairs = list(zip(line.points, line.band, strict=True))
            around = [(x, low) for (x, _), (low, _) in pairs]
            around += [(x, high) for (x, _), (_, high) in reversed(pairs)]
            band = f'<polygon points="{self._path(around)}" fill="{line.colour}" opacity="0.2"/>'
        stroke = f'fill="none" stroke="{line.colour}" stroke-width="2"'
        return f'{band}<polyline points="{path}" {stroke}/>{dots}'

    def _path(self, points: Sequence[tuple[float, float]]) -> str:
        return " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)


def _scale(low: float, high: float, start: float, stop: float) -> Callable[[float], float]:
    return lambda value: start + (value - low) / (high - low) * (stop - start)


def ticks(low: float, high: float, most: int, least: float = 0.0) -> list[float]:
    """At most about `most` round numbers from low to high, at least `least` apart."""
    width = high - low
    if width <= 0:
        return [low]
    rough = max(width / most, least)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * times for times in (1, 2, 5, 10) if power * times >= rough)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(index * step, 10) for index in range(first, last + 1)]


def _rounded(low: float, high: float) -> tuple[float, float]:
    """The span of an axis: from 0 if that is not far, else with a little room on both sides."""
    if 0 <= low <= 0.6 * high:
        return 0.0, (high or 1.0) * 1.05
    room = (high - low) * 0.08 or abs(high) * 0.1 or 1.0
    return low - room, high + room
