"""`scripts/bench paper TABLE`: a paper's table measured on the model at hand, the paper's columns
beside ours; the result as a table, as JSON and as a page.

Temperature, top-p and how much to draft are the table's, so they are no options here.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.command import Model, Show, run_command
from benchmarks.models import located
from benchmarks.paper.quality import MEASURES
from benchmarks.paper.report import markdown, paper_page
from benchmarks.paper.result import PaperResult
from benchmarks.paper.run import Measuring
from benchmarks.paper.sandbox import WARNING
from benchmarks.paper.table import ELSEWHERE, find_table, tables
from selfspec.bench.schema import read, write
from selfspec.bench.suite_run import Wishes
from selfspec.cli import common
from selfspec.cli.bench import command_line, sit
from selfspec.cli.flags import Flags, Typed
from selfspec.cli.options import grouped
from selfspec.errors import OptionError

Asked = Annotated[
    Typed,
    Flags(
        "bench.suite_run:Wishes",
        "How it is measured",
        only=(
            "sample", "skip_bad", "chat", "contexts", "rounds", "threads", "dtype", "device",
            "seed", "time_limit",
        ),
    ),
]  # fmt: skip


@grouped
def paper(
    name: Annotated[
        str, typer.Argument(help="The table, e.g. layerskip-table2; see --list.", metavar="[TABLE]")
    ] = "",
    *,
    model: Model = "demo",
    task: Annotated[
        list[str] | None,
        typer.Option(help="NAME or NAME=PATH, of the table's tasks; all from the hub by default."),
    ] = None,
    methods: Annotated[
        str, typer.Option(help="One drafter instead of the table's own, without a controller.")
    ] = "",
    asked: Asked,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-new-tokens",
            "-n",
            help="Write at most this many new tokens; the paper's limit by default.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The JSON to write.")] = None,
    untimed: Annotated[
        bool, typer.Option("--untimed", help="Count only, on a machine with other work.")
    ] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure over what is there.")] = False,
    show: Show = None,
    report: Annotated[Path | None, typer.Option(help="Write a page too.")] = None,
    listing: Annotated[bool, typer.Option("--list", help="Show the tables.")] = False,
) -> None:
    """Measure a paper's table on a model of yours.

    Example: scripts/bench paper layerskip-table4 --task humaneval=HumanEval.jsonl.gz --sample 10
    """
    if listing:
        typer.echo("\n".join(tables_known()))
        return
    if show is None:
        limit = max_new_tokens or find_table(name).new_tokens
        wishes = asked.make(
            Wishes, model=located(model), task=task or (), methods=(), new_tokens=limit, fresh=fresh
        )
        show = measure(name, wishes, drafter(methods), out, timed=not untimed)
    result = read(PaperResult, show)
    typer.echo(markdown(result))
    if report is not None:
        report.write_text(paper_page(result), encoding="utf-8")
        typer.echo(f"Written: {report}")
    typer.echo(json.dumps({"file": show.name, "runs": result.runs}))


def measure(
    name: str, wishes: Wishes, draft: str | None, out: Path | None, timed: bool = True
) -> Path:
    """Measure a table; says where the result is."""
    table = find_table(name)
    common.quiet_bars()
    if table.kind == "exits" or any(
        MEASURES.get(measure) is MEASURES["pass@1"] for measure in table.measures
    ):
        common.stderr().print(WARNING, style="dim", soft_wrap=True)
    target = out or Path(f"{name}-{Path(wishes.model).name}.json")
    paths = [wishes.model, *wishes.task, *([str(out)] if out else [])]
    command = command_line(["paper", *sys.argv[1:]], paths, "scripts/bench")
    write(Measuring(table, wishes, draft, command, target, say, timed).measure(sit), target)
    return target


def drafter(methods: str) -> str | None:
    """What is to draft instead of the table's drafter; how much to draft stays the table's."""
    if len(methods.split()) > 1 or "@" in methods:
        raise OptionError(
            f"--methods {methods!r}: here it names one drafter, which the table's rows give their "
            "controllers; write e.g. --methods layer-skip:profile=FILE"
        )
    return methods or None


def say(text: str) -> None:
    """What is going on, for somebody who watches."""
    console = common.stderr()
    if console.is_terminal:
        console.print(text, style="dim", markup=False)


def tables_known() -> list[str]:
    """A line for each table, then for those that other programs make."""
    here = [f"  {name:<22} {table.paper}: {table.title}" for name, table in tables().items()]
    others = [f"  {name:<22} {title}: {by}" for name, (title, by) in ELSEWHERE.items()]
    return [*here, "Made by other commands:", *others]


if __name__ == "__main__":
    run_command(paper)
