"""`selfspec sweep`: speed by exit layer and drafts, by skipped halves, the adaptive threshold's
course. Table, JSON, picture."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from .. import __version__
from ..errors import OptionError
from . import common, options
from .bench import command_line, progress_bar
from .flags import Flags, Typed

if TYPE_CHECKING:
    from ..bench.prompts import Prompt
    from ..bench.sweep import Group
    from ..bench.sweep_result import SweepOptions
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
    *,
    asked: Annotated[Typed, Flags("bench.sweep_result:SweepOptions", "What is measured")],
    questions: Annotated[
        Path | None,
        typer.Option(
            help="Ask the first question of each task of a JSONL (question_id, category, turns), "
            "not our own three.",
            rich_help_panel="What is measured",
        ),
    ] = None,
    out: Annotated[
        Path, options.output("--out", "-o", help="The JSON to write, or to go on with.")
    ] = Path("sweep.json"),
    plot: options.Plot = True,
    fresh: Annotated[
        bool, options.output("--fresh", help="Measure anew, over a result that is there.")
    ] = False,
    show: options.Show = None,
    model: options.Loading,
) -> None:
    """Measure how a model's speed depends on exit layer, drafts and skipped halves, always next to
    plain decoding.

    Example:  selfspec sweep demo --parts grid --exits 8,16,24 --drafts 2,4 --max-new-tokens 32
    """
    from ..bench.pictures import draw, pyplot_or_error
    from ..bench.schema import read
    from ..bench.sweep_report import markdown, pictures
    from ..bench.sweep_result import Sweep, SweepOptions
    from ..bench.tables import threads

    if show is None:
        if plot:
            pyplot_or_error()
        wanted = asked.make(SweepOptions)
        _measure(common.open_model(name, model), name, wanted, questions, out, fresh)
    run = read(Sweep, show or out)
    typer.echo(markdown(run))
    if plot:
        picture = (show or out).with_suffix(".png")
        draw(f"{run.model}, {run.dtype}, {threads(run.provenance)}", pictures(run), picture)
        said = f"Written: {show or out}, {picture}"
        Console(highlight=False).print(said, soft_wrap=True, markup=False)


def _measure(
    llm: LLM, name: str, wanted: SweepOptions, data: Path | None, out: Path, fresh: bool
) -> None:
    from ..bench.peer_host import package_versions
    from ..bench.provenance import gather
    from ..bench.schema import continued
    from ..bench.sweep import Sweeping
    from ..bench.sweep_result import Sweep

    chosen = wanted.filled(llm.model.layers)
    prompts = _prompts(llm, data, chosen.new_tokens)
    command = command_line(sys.argv[1:], [name, str(out), *([str(data)] if data else [])])
    versions = {"selfspec": __version__, **package_versions(["torch", "transformers"])}
    provenance = gather(command, llm.info.threads, versions)
    sizes = {prompt.id: len(prompt.ids) for prompt in prompts}
    info, depth = llm.info, llm.model.layers
    run = Sweep(provenance, Path(name).name, info.kernel, info.dtype, depth, chosen, sizes)
    run = run if fresh else continued(run, out, lambda each: each.plan)
    sweeping = Sweeping(llm, run, prompts, out)
    left = sweeping.left
    if not left:
        return
    done = f"; {len(run.done)} groups are there already" if run.done else ""
    time = _duration(_estimate(llm, prompts, left, chosen.new_tokens))
    common.stderr().print(f"{len(left)} groups to measure, about {time}{done}")
    with progress_bar(len(left)) as (tick, say):
        for group in left:
            sweeping.measure(group, say)
            tick("")


def _prompts(llm: LLM, data: Path | None, new_tokens: int) -> list[Prompt]:
    """The file's first question of each task, or three of our own, through the chat template where
    there is one."""
    from ..bench.prompts import Prompt
    from ..bench.tasks import read_questions

    asked = [(each.task, each.text) for each in read_questions(data, 1)] if data else QUESTIONS
    room = llm.info.context - new_tokens
    if room < 8:
        raise OptionError(
            f"{new_tokens} new tokens leave no room for a prompt in a context of "
            f"{llm.info.context}; lower --max-new-tokens"
        )
    prompts = []
    for name, text in asked:
        chat = common.has_chat_template(llm)
        ids = llm.encode_chat([common.user(text)]) if chat else llm.encode(text)
        prompts.append(Prompt(name, name, tuple(ids[-room:])))
    return prompts


def _estimate(llm: LLM, prompts: Sequence[Prompt], left: Sequence[Group], new_tokens: int) -> float:
    """Seconds that the groups will take, by one short plain generation and by what each exit would
    have guessed right in it."""
    from ..bench.layers import look
    from ..bench.sweep import estimate

    result = llm.generate(list(prompts[0].ids), max_new_tokens=16, draft=None, eos=[])
    stats = result.stats
    view = look(llm, [*prompts[0].ids, *result.tokens], last=16)
    chances = [0.0, *(view.agreement(layer) for layer in range(1, view.layers + 1))]
    turns: list[tuple[str, int, int]] = [("plain", 0, 0)] * (2 * len(left))
    turns += [(group.part, *setting) for group in left for setting in group.settings]
    step = stats.decode_seconds / max(1, stats.decoded)
    seconds = estimate(turns, view.layers, step, new_tokens, chances)
    return seconds + stats.prefill_seconds * len(turns)


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
