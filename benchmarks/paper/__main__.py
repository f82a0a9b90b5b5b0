"""`scripts/bench paper TABLE`: a paper's table measured on the model at hand, the paper's columns
beside ours; the result as a table, as JSON and as a page.

Temperature, top-p and how much to draft are the table's, so they are no options here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.command import Model, Show, run_command
from benchmarks.paper.quality import MEASURES
from benchmarks.paper.report import markdown, paper_page
from benchmarks.paper.result import PaperResult
from benchmarks.paper.run import Measuring
from benchmarks.paper.sandbox import WARNING
from benchmarks.paper.table import find_table, tables
from selfspec.bench.schema import read, write
from selfspec.bench.suite_run import Wishes
from selfspec.cli import common
from selfspec.cli.bench import command_line, sit
from selfspec.cli.options import grouped
from selfspec.core.options import numbers
from selfspec.errors import OptionError


@dataclass(frozen=True)
class Settings:
    """What of a run is not the table's."""

    sample: Annotated[int, typer.Option(help="Questions a task; 0 is all.")] = 5
    chat: Annotated[
        bool | None, typer.Option("--chat/--raw", help="Ask through the chat template, or not.")
    ] = None
    contexts: Annotated[
        str, typer.Option(help="Lengths of the task 'long', prompt and answer.")
    ] = "2048,4096,8192"
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave out lines that cannot be read.")
    ] = False
    new_tokens: Annotated[
        int | None,
        typer.Option("--new-tokens", "-n", help="Tokens to write; the paper's limit by default."),
    ] = None
    rounds: Annotated[int, typer.Option(help="How often each question is asked.")] = 1
    threads: Annotated[int, typer.Option(help="CPU threads of every engine.")] = 2
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32"
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu"
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0
    time_limit: Annotated[
        float, typer.Option(help="Seconds after which a silent engine is ended.")
    ] = 300.0

    def wishes(self, model: str, tasks: Sequence[str], limit: int, fresh: bool) -> Wishes:
        """As the harness wants them."""
        return Wishes(
            model, tasks, (), (), self.sample, self.skip_bad, self.chat,
            numbers(self.contexts, "--contexts"), self.new_tokens or limit, self.rounds, (1,),
            self.threads, self.dtype, self.device, seed=self.seed, time_limit=self.time_limit,
            fresh=fresh,
        )  # fmt: skip


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
    settings: Settings,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The JSON to write.")] = None,
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
        wishes = settings.wishes(model, task or (), find_table(name).new_tokens, fresh)
        show = measure(name, wishes, drafter(methods), out)
    result = read(PaperResult, show)
    typer.echo(markdown(result))
    if report is not None:
        report.write_text(paper_page(result), encoding="utf-8")
        typer.echo(f"Written: {report}")
    typer.echo(json.dumps({"file": show.name, "runs": result.runs}))


def measure(name: str, wishes: Wishes, draft: str | None, out: Path | None) -> Path:
    """Measure a table; says where the result is."""
    table = find_table(name)
    common.quiet_bars()
    if table.kind == "exits" or any(
        MEASURES.get(measure) is MEASURES["pass@1"] for measure in table.measures
    ):
        common.stderr().print(WARNING, style="dim", soft_wrap=True)
    target = out or Path(f"{name}-{Path(wishes.model).name}.json")
    paths = [wishes.model, *wishes.tasks, *([str(out)] if out else [])]
    command = command_line(["paper", *sys.argv[1:]], paths, "scripts/bench")
    write(Measuring(table, wishes, draft, command, target, say).measure(sit), target)
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
    """A line for each table."""
    return [f"  {name:<22} {table.paper}: {table.title}" for name, table in tables().items()]


if __name__ == "__main__":
    run_command(paper)
