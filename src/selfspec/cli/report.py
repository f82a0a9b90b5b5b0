"""`selfspec report`: a result of `selfspec bench` or `selfspec sweep` as a page of one file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..core.files import write_whole
from ..errors import OptionError, nearest


def report(
    result: Annotated[
        Path,
        typer.Argument(
            help="A JSON that selfspec bench or selfspec sweep wrote.", metavar="RESULT"
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="The page to write. By default beside the result, as .html."
        ),
    ] = None,
) -> None:
    """Turn a result into a self-contained page: the verdict, plots, tables; light or dark, for desk
    and phone.

    Example:  selfspec report suite-demo.json -o report.html
    """
    target = out or result.with_suffix(".html")
    write_whole(target, page_of(result))
    typer.echo(f"Written: {target}")


def page_of(result: Path) -> str:
    """The page of a result of a kind that has one."""
    from ..bench.schema import SuiteRun, parsed, read
    from ..bench.suite_report import report_page
    from ..bench.sweep_report import sweep_page
    from ..bench.sweep_result import Sweep

    data = parsed(result, SuiteRun.measured_by)
    kind = data.get("kind") if isinstance(data, dict) else None
    if kind == SuiteRun.kind:
        return report_page(read(SuiteRun, result))
    if kind == Sweep.kind:
        return sweep_page(read(Sweep, result))
    near = nearest(str(kind), (SuiteRun.kind, Sweep.kind))
    raise OptionError(f"{result.name} is a result of kind {kind!r}, which has no page; {near}")
