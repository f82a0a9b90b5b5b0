"""`selfspec report`: a result of `selfspec bench` or `selfspec sweep` as a page of one file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import OptionError, nearest

Result = Annotated[
    Path,
    typer.Argument(help="A JSON that selfspec bench or selfspec sweep wrote.", metavar="RESULT"),
]


def report(
    result: Result,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="The page to write.", show_default="beside the result, as .html"
        ),
    ] = None,
) -> None:
    """Turn a result into a self-contained page: the verdict, plots, tables; light or dark, for desk
    and phone.

    Example:  selfspec report suite-demo.json -o report.html
    """
    target = out or result.with_suffix(".html")
    target.write_text(page_of(result), encoding="utf-8")
    typer.echo(f"Written: {target}")


def page_of(result: Path) -> str:
    """The page of a result of a kind that has one."""
    from ..bench.html_paper import paper_page
    from ..bench.html_report import report_page
    from ..bench.html_sweep import sweep_page
    from ..bench.paper_report import load_paper
    from ..bench.suite_schema import load_suite
    from ..bench.sweep import load_sweep

    kind = kind_of(result)
    if kind == "suite":
        return report_page(load_suite(result))
    if kind == "sweep":
        return sweep_page(load_sweep(result))
    if kind == "paper":
        return paper_page(load_paper(result))
    known = ("suite", "sweep", "paper")
    raise OptionError(
        f"{result.name} is a result of kind {kind!r}, which has no page; "
        f"{nearest(str(kind), known)}"
    )


def kind_of(result: Path) -> object:
    """What a result file says it is."""
    from ..bench.schema import parsed

    data = parsed(result, "selfspec bench MODEL", "a result")
    return data.get("kind") if isinstance(data, dict) else None
