"""`scripts/bench recipe`: LayerSkip's ablation in small, with the paper's presets as printed.

Layer dropout (LD), early-exit loss (EE), both and neither: from scratch on free text, then
fine-tuned for a task with two seeds, and continued on a published model's own text. All arms take
about four hours of one core; what is done is in the JSON, and a run goes on with the rest.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import AutoTokenizer

from benchmarks.command import Out, Show, Threads, made_by, result_path, run_command
from benchmarks.recipe.arms import OWN, TASK, Arm, RecipeOptions, all_arms, chosen_arms, names
from benchmarks.recipe.report import markdown, picture, summary
from benchmarks.recipe.result import ArmRun, RecipeRun
from benchmarks.recipe.run import measure, sources, task_blocks, text_blocks, train_arm
from benchmarks.recipe.texts import HELD_OUT, digest, make_texts
from benchmarks.task.data import generator_hash
from selfspec.bench.schema import read, write
from selfspec.cli.bench import progress_bar
from selfspec.errors import OptionError


def with_earlier_arms(run: RecipeRun, target: Path) -> RecipeRun:
    """With the arms that earlier runs of the same experiment left."""
    if not target.exists():
        return run
    found = read(RecipeRun, target)
    for name in ("options", "texts", "generator"):
        before, now = getattr(found, name), getattr(run, name)
        if before != now:
            raise OptionError(
                f"{target.name} has other {name} ({before}) than this run ({now}): two experiments "
                "would be mixed. Name another file with --out, or delete it"
            )
    run.arms, run.own_text = found.arms, run.own_text or found.own_text
    return run


def recipe(
    text: Annotated[
        list[Path] | None,
        typer.Option(help="Free text, again for more files: WikiText-2, Tiny Shakespeare."),
    ] = None,
    own: Annotated[
        Path | None, typer.Option(help="The demo's own text, from `selfspec data`, for own/*.")
    ] = None,
    arms: Annotated[
        str, typer.Option(help="Which arms to train, by name or group: scratch, task, own.")
    ] = "scratch,task",
    folder: Annotated[
        Path, typer.Option(help="Where texts and models go; what is there is used.")
    ] = Path("recipe-models"),
    steps: Annotated[
        int, typer.Option(min=1, help="Steps of each arm from scratch.")
    ] = RecipeOptions.steps,
    task_steps: Annotated[
        int, typer.Option(min=1, help="Steps of each task arm.")
    ] = RecipeOptions.task_steps,
    minutes: Annotated[
        float, typer.Option(min=0, help="Begin no further arm after so many minutes; 0: no limit.")
    ] = 0,
    again: Annotated[
        bool, typer.Option(help="Measure what trained arms can do once more (on a quiet machine).")
    ] = False,
    threads: Threads = 2,
    out: Out = None,
    show: Show = None,
) -> None:
    """LayerSkip's ablation in small: layer dropout, exit loss, both, neither.

    Example: scripts/bench recipe --text wiki.txt --text shakespeare.txt --arms scratch/plain
    """
    target = out or show or result_path("recipe")
    if show is not None:
        typer.echo(markdown(read(RecipeRun, show)))
        return
    options, started = RecipeOptions(steps=steps, task_steps=task_steps), time.monotonic()
    wanted = chosen_arms(arms, options)
    if not text:
        raise OptionError("--text: no text to train on; give files, such as --text wiki.txt")
    if any(arm.group == OWN for arm in wanted) and own is None:
        raise OptionError("--own: own/* go on with text of the demo's own; see selfspec data")
    torch.set_num_threads(threads)
    new = RecipeRun(made_by("recipe", threads), options, digest(text), generator_hash(0))
    run = with_earlier_arms(new, target)
    run.own_text = digest([own]) if own else run.own_text
    make_texts(text, folder, options)
    for arm in wanted:
        if minutes and time.monotonic() - started > 60 * minutes:
            break
        _one(arm, run, folder, own, threads, again)
        run.complete = set(names(all_arms(options))) <= set(run.arms)
        write(run, target)
    picture(run, target.with_suffix(".png"))
    typer.echo(markdown(run))
    typer.echo(json.dumps({**summary(run), "file": target.name}))


def _one(
    arm: Arm, run: RecipeRun, folder: Path, own: Path | None, threads: int, again: bool
) -> None:
    """Train and measure an arm. One that is measured is trained again only where its model is gone
    and another arm begins with it."""
    options = run.options
    start, text = sources(arm, folder, own)
    tokenizer = AutoTokenizer.from_pretrained(start)
    if arm.group == TASK:
        blocks = task_blocks(tokenizer, options)
    else:
        blocks = text_blocks(tokenizer, folder / HELD_OUT, options.length)
    with progress_bar(1) as (_, say):
        facts, looks = train_arm(
            arm, folder, options, start, text, blocks, lambda words: say(f"{arm.name}: {words}")
        )
        if arm.name in run.arms and not again:
            return
        say(f"{arm.name}: what it can do")
        quality, race = measure(arm, folder, options)
    made = made_by("recipe", threads)
    run.arms[arm.name] = ArmRun(made, facts, looks, quality, race)


if __name__ == "__main__":
    run_command(recipe)
