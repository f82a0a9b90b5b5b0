"""`selfspec bench --paper TABLE`: a paper's table measured on the model at hand, the paper's
columns beside ours."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ..errors import OptionError
from . import common

if TYPE_CHECKING:
    from ..bench.suite_run import Prepared, Wishes


def run_paper(
    name: str,
    wishes: Wishes,
    given: frozenset[str],
    command: str,
    out: Path | None,
    sit: Callable[[Prepared], None],
) -> Path:
    """Measure the table and print it; says where the result is. `given`: the options that were
    typed, which the table's own settings give way to."""
    from ..bench.paper import find_table
    from ..bench.paper_report import load_paper, markdown
    from ..bench.paper_run import Measuring
    from ..bench.quality import MEASURES
    from ..bench.sandbox import WARNING
    from ..bench.schema import write_json

    table = find_table(name)
    fixed = sorted(given & {"temperature", "top_p", "peers", "batch"})
    if fixed:
        raise OptionError(
            f"--{fixed[0].replace('_', '-')} is the table's business; leave it out, or measure "
            f"without --paper"
        )
    draft = _draft(wishes) if "methods" in given else None
    if "new_tokens" not in given:
        wishes = replace(wishes, new_tokens=table.new_tokens)
    if (
        any(MEASURES.get(measure) is MEASURES["pass@1"] for measure in table.measures)
        or table.kind == "exits"
    ):
        common.stderr().print(WARNING, style="dim")
    target = out or Path(f"{name}-{Path(wishes.model).name}.json")
    result = Measuring(table, wishes, draft, command, target, lambda text: _say(text)).measure(sit)
    write_json(asdict(result), target)
    typer.echo(markdown(load_paper(target)))
    typer.echo(json.dumps({"file": target.name, "runs": result.runs}))
    return target


def _draft(wishes: Wishes) -> str:
    """What is to draft instead of the table's drafter: one, without a controller, which the table
    says."""
    if len(wishes.methods) != 1 or "@" in wishes.methods[0]:
        raise OptionError(
            f"--methods {' '.join(wishes.methods)!r}: with --paper it names one drafter, which "
            f"the table's rows give their "
            "controllers; write e.g. --methods layer-skip:profile=FILE"
        )
    return wishes.methods[0]


def _say(text: str) -> None:
    console = common.stderr()
    if console.is_terminal:
        console.print(text, style="dim", markup=False)


def tables_known() -> list[str]:
    """A line for each table."""
    from ..bench.paper import tables

    return [f"  {name:<22} {table.paper}: {table.title}" for name, table in tables().items()]
