"""`scripts/bench task`: LayerSkip's task experiment in small (its Tables 5 and 10), from data to
table.

A text-to-structure task is generated (`data.py`), a model fine-tuned on it with the recipe (LD+EE)
and without, with the same data, steps, batch and learning rate. Then, on held-out utterances: exact
match of both and of early exits alone, which nobody verifies; acceptance and time per token of
self-speculative decoding at each exit, with and without reuse of the draft's states, next to plain
decoding of the same weights. Every stage can be run alone and goes on where it was interrupted. Raw
figures go into the JSON; the table is `report.py`'s.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.command import Model, Show, Threads, made_by, result_path, run_command
from benchmarks.models import folder_of
from benchmarks.task.data import examples, generator_hash
from benchmarks.task.report import markdown, summary
from benchmarks.task.result import TaskOptions, TaskRun
from benchmarks.task.run import BATCH, contestants, judge, make_data, race, task_tokens, train_one
from selfspec.bench.schema import read, write
from selfspec.bench.suite_run import words_of
from selfspec.cli.bench import progress_bar
from selfspec.core.options import numbers
from selfspec.errors import OptionError, nearest
from selfspec.llm import LLM

STAGES = ("data", "train", "quality", "speed")
MODELS = ("recipe", "plain")


def chosen_stages(text: str) -> list[str]:
    """Stages by name, in their order."""
    wanted = text.split(",")
    for name in wanted:
        if name not in STAGES:
            raise OptionError(f"--stages: {name!r} is not known; {nearest(name, STAGES)}")
    return [name for name in STAGES if name in wanted]


def run_stages(
    stages: Sequence[str],
    base: Path,
    folder: Path,
    run: TaskRun,
    save: Callable[[], None],
    as_is: bool = False,
) -> None:
    """Stage by stage; what is done is saved at once. `as_is`: the base was trained for the task."""
    options = run.options
    trained = {MODELS[0]: base} if as_is else {name: folder / name for name in MODELS}
    if "data" in stages:
        make_data(folder, options, words_of(base).tokenizer.eos_token)
    if "train" in stages:
        for name in MODELS:
            run.training[name] = train_one(name, base, folder, options)
            save()
    made = examples("held_out", options.held_out, options.seed)
    if "quality" in stages:
        alone = len(options.exits) * -(-min(options.lossy, len(made)) // BATCH)
        for name, where in trained.items():
            llm = LLM.from_pretrained(where, threads=torch.get_num_threads())
            with progress_bar(-(-len(made) // BATCH) + alone) as (tick, say):
                say(f"exact match of {name}")
                run.quality[name] = judge(llm, made, options, lambda tick=tick: tick(""))  # type: ignore[misc]
            save()
    if "speed" in stages:
        llm = LLM.from_pretrained(trained[MODELS[0]], threads=torch.get_num_threads())
        tokens = task_tokens(llm, folder / "train.jsonl")
        run.layers, run.vocabulary = llm.info.layers, len(tokens)
        tokenizer: Any = llm.tokenizer
        prompts = [list(tokenizer(each.prompt)["input_ids"]) for each in made[: options.utterances]]
        with progress_bar(len(prompts) + 1) as (tick, say):
            say("decoding in turns")
            run.race = race(contestants(llm, tokens, options), prompts, lambda: tick(""))
        save()


def task(
    model: Model = "demo",
    folder: Annotated[
        Path, typer.Option(help="Where data and trained models go; what is there is used.")
    ] = Path("task-models"),
    stages: Annotated[
        str, typer.Option(help="Which stages to run, in one go or one after the other.")
    ] = ",".join(STAGES),
    steps: Annotated[
        int, typer.Option(min=1, help="Optimizer steps of each of the two models.")
    ] = TaskOptions.steps,
    held_out: Annotated[
        int, typer.Option(min=1, help="Held-out utterances.")
    ] = TaskOptions.held_out,
    exits: Annotated[str, typer.Option(help="Exit layers.")] = "8,15,22",
    utterances: Annotated[
        int, typer.Option(min=2, help="Utterances in the race.")
    ] = TaskOptions.utterances,
    as_is: Annotated[
        bool,
        typer.Option("--as-is", help="The model was trained for the task: measure it, train none."),
    ] = False,
    threads: Threads = 2,
    out: Annotated[
        Path | None, typer.Option(help="The JSON to write, and to add stages to.")
    ] = None,
    show: Show = None,
) -> None:
    """LayerSkip's task experiment in small: fine-tune with and without the recipe, then exact
    match, acceptance and speed.

    Example: scripts/bench task --steps 20 --held-out 50 --utterances 5
    """
    if show is not None:
        typer.echo(markdown(read(TaskRun, show)))
        return
    wanted, layers = chosen_stages(stages), numbers(exits, "--exits")
    if as_is and "train" in wanted:
        raise OptionError("--as-is trains nothing; leave train out: --stages quality,speed")
    options = TaskOptions(steps=steps, held_out=held_out, exits=layers, utterances=utterances)
    torch.set_num_threads(threads)
    base, target = folder_of(model), out or result_path("task")
    new = TaskRun(made_by("task", threads), Path(model).name, options, generator_hash(options.seed))
    run = with_earlier_stages(new, target)
    run_stages(wanted, base, folder, run, lambda: write(run, target), as_is)
    run.complete = bool((run.training or as_is) and run.quality and run.race)
    write(run, target)
    typer.echo(markdown(run))
    typer.echo(json.dumps({**summary(run), "file": target.name}))


def with_earlier_stages(run: TaskRun, target: Path) -> TaskRun:
    """With what earlier stages of the same experiment left."""
    if not target.exists():
        return run
    found = read(TaskRun, target)
    for name in ("generator", "model"):
        before, now = getattr(found, name), getattr(run, name)
        if before != now:
            raise OptionError(
                f"{target.name} has {name} {before!r}, this run {now!r}: stages of two experiments "
                "would be mixed. Name another file with --out, or delete it"
            )
    for name in ("layers", "vocabulary", "training", "quality", "race"):
        setattr(run, name, getattr(found, name))
    return run


if __name__ == "__main__":
    run_command(task)
