"""Pages of one file: the frame with its style for light, dark and narrow screens, tables, bars with
intervals, heat maps, lines.

Nothing is loaded from elsewhere and no script runs, so a page can be mailed, committed and opened
in ten years. Text stays text (bars and heat maps are boxes with numbers in them); only curves are
drawn, as SVG, once for wide and once for narrow screens. Whatever is given is escaped here. Knows
no benchmark.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

STYLE = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
COLOURS = 10
WIDE, NARROW = 760, 350  # drawing widths, in the pixels at which they are shown
LONG_WORDS = 40  # characters, from which on a cell of words is broken into lines
Number = float | None


def page(title: str, subtitle: str, body: Sequence[str]) -> str:
    """The whole file."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body><main>\n"
        f'<h1>{escape(title)}</h1>\n<p class="soft">{escape(subtitle)}</p>\n'
        + "\n".join(body)
        + "\n</main></body></html>\n"
    )


def breakable(text: str) -> str:
    """Escaped, with places at which a long name of a method may be broken."""
    return re.sub(r"([/@:,])(?=\S)", r"\1<wbr>", escape(text))


def heading(text: str) -> str:
    return f"<h2>{escape(text)}</h2>"


def paragraph(text: str, kind: str = "") -> str:
    return f'<p class="{escape(kind)}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def facts(pairs: Mapping[str, object]) -> str:
    """Names and values."""
    return (
        "<dl>"
        + "".join(
            f"<dt>{escape(key)}</dt><dd>{escape(str(value))}</dd>" for key, value in pairs.items()
        )
        + "</dl>"
    )


def table(
    header: Sequence[str], lines: Sequence[Sequence[str]], words: Sequence[int] = (0,)
) -> str:
    """Columns of numbers, but those in `words`, of which the first stays in view while the others
    scroll."""

    def cell(tag: str, column: int, text: str) -> str:
        kind = (
            ("" if len(text) < LONG_WORDS or not column else " class=wrap")
            if column in words
            else " class=num"
        )
        return f"<{tag}{kind}>{escape(text) if column else breakable(text)}</{tag}>"

    head = "".join(cell("th", column, text) for column, text in enumerate(header))
    rows = "".join(
        "<tr>" + "".join(cell("td", column, text) for column, text in enumerate(line)) + "</tr>\n"
        for line in lines
    )
    return f'<div class="wide"><table class="page"><thead><tr>{head}</tr></thead><tbody>\n{rows}</tbody></table></div>'


def legend(names: Sequence[str]) -> str:
    """Which colour is what."""
    items = "".join(
        f'<span><span class="swatch" '
        f'style="background:var(--c{index % COLOURS})"></span>{escape(name)}</span>'
        for index, name in enumerate(names)
    )
    return f'<div class="legend">{items}</div>'


@dataclass(frozen=True)
class Bar:
    """One horizontal bar; `low` and `high` are its interval, `note` stands behind it."""

    name: str
    value: float
    low: float | None = None
    high: float | None = None
    note: str = ""


def bars(items: Sequence[Bar], mark: float | None = 1.0) -> str:
    """Bars from 0 on one scale, with a dashed line at `mark`; below it they are red, above green,
    else blue."""
    most = 1.05 * max([item.high or item.value for item in items] + [mark or 0.0, 1e-9])

    def share(value: float) -> str:
        return f"{max(0.0, 100 * value / most):.2f}%"

    found = []
    for item in items:
        tone = (
            "tint"
            if mark is None or item.value == mark
            else ("good" if item.value > mark else "bad")
        )
        inner = f'<div class="fill" style="width:{share(item.value)};background:rgba(var(--{tone}),0.65)"></div>'
        if item.low is not None and item.high is not None:
            inner += f'<div class="whisker" style="left:{share(item.low)};width:{share(item.high - item.low)}"></div>'
        if mark is not None:
            inner += f'<div class="mark" style="left:{share(mark)}"></div>'
        note = escape(item.note or f"{item.value:.2f}")
        name = f'<div class="name">{breakable(item.name)}</div>'
        found.append(
            f'<div class="bar">{name}<div class="track">{inner}</div><div>{note}</div></div>'
        )
    return "<figure>" + "\n".join(found) + "</figure>"


@dataclass(frozen=True)
class Cell:
    """A cell of a heat map: what stands in it, how strong its colour is (0 to 1) and which, and
    what hovering tells."""

    text: str
    strength: float = 0.0
    tone: str = "tint"  # tint, good or bad
    title: str = ""


def heat(
    corner: str, columns: Sequence[str], lines: Sequence[tuple[str, Sequence[Cell]]], kind: str = ""
) -> str:
    """A table whose cells are coloured; its first column stays in view."""
    head = f"<th>{escape(corner)}</th>" + "".join(
        f"<th>{escape(column)}</th>" for column in columns
    )
    rows = []
    for name, cells in lines:
        inner = "".join(
            f'<td style="background:rgba(var(--{cell.tone}),calc({max(0.0, min(1.0, cell.strength)):.3f} * var(--strong)))"'
            f"{f' title={chr(34)}{escape(cell.title)}{chr(34)}' if cell.title else ''}>{escape(cell.text)}</td>"
            for cell in cells
        )
        rows.append(f"<tr><th>{breakable(name)}</th>{inner}</tr>")
    body = "\n".join(rows)
    return f'<div class="wide"><table class="grid {kind}"><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'


@dataclass(frozen=True)
class Line:
    """A curve: (x, y), in order; `index` is its colour."""

    name: str
    points: Sequence[tuple[float, float]]
    index: int = 0
    dots: bool = True


def lines(
    found: Sequence[Line],
    x_name: str,
    y_name: str,
    mark: Number = None,
    span: tuple[float, float] | None = None,
) -> str:
    """Curves in one picture, with a legend of their own if there are several; `mark` is a dashed
    horizontal line."""
    drawn = [line for line in found if line.points]
    if not drawn:
        return paragraph("Nothing was measured for this picture.", "soft")
    names = legend_of(drawn) if len(drawn) > 1 else ""

    def sized(width: int, kind: str) -> str:
        return f'<div class="{kind}">{_picture(drawn, x_name, y_name, mark, span, width)}</div>'

    return f"<figure>{names}{sized(WIDE, 'desk')}{sized(NARROW, 'phone')}</figure>"


def legend_of(found: Sequence[Line]) -> str:
    """The colours of curves."""
    return (
        '<div class="legend">'
        + "".join(
            f'<span><span class="swatch" '
            f'style="background:var(--c{line.index % COLOURS})"></span>{escape(line.name)}</span>'
            for line in found
        )
        + "</div>"
    )


def _picture(
    found: Sequence[Line],
    x_name: str,
    y_name: str,
    mark: Number,
    span: tuple[float, float] | None,
    width: int,
) -> str:
    height, left, right, top, bottom = round(190 + width * 0.12), 44, 12, 22, 40
    xs = [x for line in found for x, _ in line.points]
    ys = [y for line in found for _, y in line.points] + ([mark] if mark is not None else [])
    low, high = span or _rounded(min(ys), max(ys))
    first, last = min(xs), max(xs)
    place_x = _scale(first, last if last > first else first + 1, left, width - right)
    place_y = _scale(low, high, height - bottom, top)
    parts = [
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(y_name)} by '
        f'{escape(x_name)}">'
    ]
    for y in ticks(low, high, 5):
        at = place_y(y)
        parts.append(
            f'<line class="grid-line" x1="{left}" x2="{width - right}" y1="{at:.1f}" '
            f'y2="{at:.1f}"/>'
        )
        parts.append(f'<text x="{left - 6}" y="{at + 4:.1f}" text-anchor="end">{y:g}</text>')
    for x in ticks(
        first, last, max(3, width // 90), 1.0 if all(x == round(x) for x in xs) else 0.0
    ):
        parts.append(
            f'<text x="{place_x(x):.1f}" y="{height - bottom + 16}" '
            f'text-anchor="middle">{x:g}</text>'
        )
    if mark is not None:
        at = place_y(mark)
        parts.append(
            f'<line x1="{left}" x2="{width - right}" y1="{at:.1f}" y2="{at:.1f}" '
            f'stroke="var(--ink)" stroke-dasharray="5 4"/>'
        )
    parts += [_curve(line, place_x, place_y) for line in found]
    parts.append(f'<text x="{left}" y="12">{escape(y_name)}</text>')
    parts.append(
        f'<text x="{(left + width - right) / 2}" y="{height - 6}" '
        f'text-anchor="middle">{escape(x_name)}</text></svg>'
    )
    return "".join(parts)


def _curve(line: Line, place_x: Callable[[float], float], place_y: Callable[[float], float]) -> str:
    colour = f"var(--c{line.index % COLOURS})"
    at = [(place_x(x), place_y(y)) for x, y in line.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}">'
        f"<title>{escape(line.name)}: {given[0]:g}, {given[1]:.3g}</title></circle>"
        for (x, y), given in zip(at, line.points, strict=True)
        if line.dots
    )
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>{dots}'


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
    start = math.ceil(low / step - 1e-9)
    return [round(index * step, 10) for index in range(start, math.floor(high / step + 1e-9) + 1)]


def _rounded(low: float, high: float) -> tuple[float, float]:
    """The span of an axis: from 0 if that is not far, else with a little room on both sides."""
    if 0 <= low <= 0.6 * high:
        return 0.0, (high or 1.0) * 1.05
    room = (high - low) * 0.08 or abs(high) * 0.1 or 1.0
    return low - room, high + room
