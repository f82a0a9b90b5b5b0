"""`selfspec sweep`: speed by exit layer and drafts, by skipped halves, the adaptive threshold's
course; table, JSON, picture."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from .. import __version__
from ..core.options import numbers
from ..errors import OptionError
from . import common, options
from .bench import command_line

if TYPE_CHECKING:
    from ..bench.sweep import Group, Prompt
    from ..llm import LLM

QUESTIONS = (  # asked when no file is given: to explain, to copy, to write code
    ("explain", "Explain in a few sentences why the sky is blue and why sunsets are red."),
    (
        "copy",
        "Repeat the following list twice, exactly as it is: apples 3 kg, pears 2 kg, flour 1 kg, "
        "butter 250 g, eggs 6.",
    ),
    (
        "code",
        "Write a Python function that returns the n-th Fibonacci number, with a docstring and two "
        "examples.",
    ),
)


@options.grouped
def sweep(
    name: options.Model = "demo",
    part: Annotated[
        list[str] | None,
        typer.Option("--part", help="grid, skips or gamma; repeatable. All by default."),
    ] = None,
    exits: Annotated[
        str, typer.Option("--exits", help="Exit layers, e.g. 4,8,12.", show_default="by depth")
    ] = "",
    drafts: Annotated[
        str, typer.Option("--drafts", help="Drafts a round, e.g. 1-4,6,8.")
    ] = "1,2,3,4,6,8",
    skips: Annotated[
        str,
        typer.Option("--skips", help="Numbers of halves to leave out.", show_default="by depth"),
    ] = "",
    by: Annotated[
        str, typer.Option("--by", help="What says which halves matter least: cosine or damage.")
    ] = "cosine",
    data: Annotated[
        Path | None,
        typer.Option(
            "--data", help="Questions as JSONL (question_id, category, turns), one a task."
        ),
    ] = None,
    new_tokens: Annotated[
        int, typer.Option("--new-tokens", "-n", min=2, help="Tokens of each turn.")
    ] = 64,
    rounds: Annotated[
        int, typer.Option("--rounds", min=1, help="How often everything is measured.")
    ] = 1,
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            help="The JSON; the same command goes on with an unfinished one.",
            rich_help_panel="Output",
        ),
    ] = Path("sweep.json"),
    plot: Annotated[
        bool,
        typer.Option("--plot/--no-plot", help="Draw a PNG beside it.", rich_help_panel="Output"),
    ] = True,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Write over what is there.", rich_help_panel="Output")
    ] = False,
    show: Annotated[
        Path | None,
        typer.Option(
            "--show", help="Measure nothing: tables of this JSON.", rich_help_panel="Output"
        ),
    ] = None,
    *,
    model: options.ModelOptions,
) -> None:
    """Measure how a model's speed depends on exit layer, drafts and skipped halves, always next to
    plain decoding.

    Example:  selfspec sweep demo --part grid --exits 8,16,24 --drafts 2,4 --new-tokens 32
    """
    from ..bench.layers_plot import pyplot_or_error
    from ..bench.sweep import PARTS, SweepOptions, load_sweep
    from ..bench.sweep_plot import plot_sweep
    from ..bench.sweep_report import markdown

    if show is None:
        if plot:
            pyplot_or_error()
        wanted = SweepOptions(
            tuple(part or PARTS),
            numbers(exits, "--exits") if exits else (),
            numbers(drafts, "--drafts") if drafts else (),
            numbers(skips, "--skips") if skips else (),
            by,
            new_tokens,
            rounds,
        )
        _measure(common.open_model(name, model), name, wanted, data, out, fresh)
    run = load_sweep(show or out)
    typer.echo(markdown(run))
    if plot:
        picture = (show or out).with_suffix(".png")
        plot_sweep(run, picture)
        Console(highlight=False).print(
            f"Written: {show or out}, {picture}", soft_wrap=True, markup=False
        )


def _measure(llm: LLM, name: str, wanted: Any, data: Path | None, out: Path, fresh: bool) -> None:
    from ..bench.plain import progress_bar
    from ..bench.provenance import gather, package_versions
    from ..bench.sweep import Sweep, Sweeping, gone_on_with

    chosen = wanted.filled(llm.model.layers)
    prompts = _prompts(llm, data, chosen.new_tokens)
    command = command_line(sys.argv[1:], [name, str(out), *([str(data)] if data else [])])
    versions = {"selfspec": __version__, **package_versions(["torch", "transformers"])}
    provenance = asdict(gather(command, llm.info.threads, versions))
    sizes = {prompt.name: len(prompt.ids) for prompt in prompts}
    run = Sweep(
        provenance,
        Path(name).name,
        llm.info.kernel,
        llm.info.dtype,
        llm.model.layers,
        asdict(chosen),
        sizes,
    )
    sweeping = Sweeping(llm, run if fresh else gone_on_with(run, out), chosen, prompts, out)
    left = sweeping.left
    if not left:
        return
    done = f"; {len(sweeping.run.done)} groups are there already" if sweeping.run.done else ""
    common.stderr().print(
        f"{len(left)} groups to measure, about "
        f"{_duration(_estimate(llm, prompts, left, chosen.new_tokens))}{done}"
    )
    with progress_bar(len(left)) as (tick, say):
        for group in left:
            sweeping.measure(group, say)
            tick("")


def _prompts(llm: LLM, data: Path | None, new_tokens: int) -> list[Prompt]:
    """The file's first question of each task, or three of our own, through the chat template where
    there is one."""
    from ..bench.questions import read_questions
    from ..bench.sweep import Prompt

    if llm.tokenizer is None:
        raise OptionError(
            "a sweep asks questions in words and this model was loaded without a tokenizer; add "
            "its files to the folder"
        )
    asked = [(each.task, each.text) for each in read_questions(data, 1)] if data else QUESTIONS
    room = llm.info.context - new_tokens
    if room < 8:
        raise OptionError(
            f"{new_tokens} new tokens leave no room for a prompt in a context of "
            f"{llm.info.context}; lower --new-tokens"
        )
    found = []
    for name, text in asked:
        chat = common.has_chat_template(llm)
        ids = (
            llm.encode_chat([{"role": "user", "content": text}])
            if chat
            else list(llm.tokenizer(text)["input_ids"])
        )
        found.append(Prompt(name, tuple(ids[-room:])))
    return found


def _estimate(llm: LLM, prompts: Sequence[Prompt], left: Sequence[Group], new_tokens: int) -> float:
    """Seconds that the groups will take, by one short plain generation and by what each exit would
    have guessed right in it."""
    from ..bench.layers import look
    from ..bench.sweep_report import estimate

    result = llm.generate(list(prompts[0].ids), max_new_tokens=16, draft=None, eos=[])
    reading, step = (
        result.stats.prefill_seconds,
        result.stats.decode_seconds / max(1, result.stats.decoded),
    )
    view = look(llm, [*prompts[0].ids, *result.tokens], last=16)
    chances = [0.0, *(view.agreement(layer) for layer in range(1, view.layers + 1))]
    settings = [
        each
        for group in left
        for each in (
            ("plain", 0, 0),
            *((group.part, *pair) for pair in group.settings),
            ("plain", 0, 0),
        )
    ]
    return estimate(settings, view.layers, step, new_tokens, chances) + reading * len(settings)


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
