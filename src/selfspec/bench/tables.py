"""Tables as Markdown, and how figures and the place of a measurement are written in every report.
Knows no result."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .html import Table
from .schema import Provenance
from .timing import Ratio


def table(content: Table) -> str:
    """Markdown, padded so that it reads in a terminal too; the first column is text."""
    lines = [content.header, *content.rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(content.header))]

    def padded(cells: Sequence[str]) -> str:
        pairs = [*zip(cells, widths, strict=True)]
        numbers = [cell.rjust(width) for cell, width in pairs[1:]]
        return "| " + " | ".join([pairs[0][0].ljust(pairs[0][1]), *numbers]) + " |"

    rule = "|".join(
        ["", "-" * (widths[0] + 2), *("-" * (each + 1) + ":" for each in widths[1:]), ""]
    )
    return "\n".join([padded(content.header), rule, *map(padded, content.rows)])


def markdown(parts: Sequence[str | Table | None]) -> str:
    """Paragraphs and tables; what is empty is left out."""
    texts = (table(part) if isinstance(part, Table) and part.rows else part for part in parts)
    return "\n\n".join(part for part in texts if isinstance(part, str) and part)


def number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def percent(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:.{digits}%}"


def interval(quotient: Ratio | None, form: Callable[[float], str] = "{:.2f}".format) -> str:
    """A ratio with its interval; none where a difference of two timings drowned in noise."""
    if quotient is None:
        return "-"
    if quotient.low <= 0:
        return "lost in noise"
    return f"{form(quotient.value)} ({form(quotient.low)}-{form(quotient.high)})"


def failed(reason: str, most: int | None = None) -> str:
    """Why there is no figure, as a cell."""
    return f"failed: {reason[:most]}".replace("|", "/").replace("\n", " ")


def commit(where: Provenance) -> str:
    changed = " with uncommitted changes" if where.uncommitted_changes else ""
    return f"{(where.commit or 'unknown')[:12]}{changed}"


def versions(where: Provenance) -> str:
    return ", ".join(f"{name} {version}" for name, version in sorted(where.versions.items()))


def threads(where: Provenance) -> str:
    return f"{where.threads} thread{'s' if where.threads > 1 else ''} on {where.cpu}"
