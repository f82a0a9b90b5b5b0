"""`selfspec train` and `selfspec exits`: train a model so that its early exits predict, and measure
what exits are worth.

Only asks and shows: what is trained and how is decided in the room `train`.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ..core.options import numbers
from ..errors import OptionError, nearest
from . import common, options
from .train_part import PARTS, PartFlags, train_part

if TYPE_CHECKING:
    from ..train.evaluate import ExitScore
    from ..train.recipe import Recipe
    from ..train.run import Report

RECIPES = ("layerskip", *PARTS)
# of RunFlags, for parts too
PART_FLAGS = (
    "epochs",
    "learning_rate",
    "weight_decay",
    "seed",
    "precision",
    "save_every",
    "plot",
)

_recipe = functools.partial(typer.Option, show_default=True, rich_help_panel="Recipe")
_run = functools.partial(typer.Option, show_default=True, rich_help_panel="Run")
_data = functools.partial(typer.Option, show_default=True, rich_help_panel="Data")
_lora = functools.partial(typer.Option, show_default=True, rich_help_panel="LoRA")

DataFiles = Annotated[
    list[str],
    _data(
        "--data",
        help="JSONL ('text', 'prompt' and 'response', or 'messages'), a text file, a folder saved "
        "by `datasets`, or "
        "hf:NAME[#CONFIG][@SPLIT]; repeatable.",
    ),
]


@dataclass(frozen=True)
class RecipeFlags:
    """What becomes a `Recipe`: its own defaults hold for what is not given."""

    recipe: Annotated[str, _recipe("--recipe", help=f"What to train: {', '.join(RECIPES)}.")] = (
        "layerskip"
    )
    preset: Annotated[
        str | None,
        _recipe(
            "--preset", help="Numbers of one of the paper's experiments, e.g. code-7b or task-1.5b."
        ),
    ] = None
    variant: Annotated[
        str,
        _recipe(
            "--variant", help="LD+EE: layer dropout and exit loss; LD or EE alone; plain: neither."
        ),
    ] = "LD+EE"
    dropout: Annotated[
        float | None, _recipe("--dropout", help="Chance of dropping the last layer for a sample.")
    ] = None
    dropout_depth: Annotated[
        str | None, _recipe("--dropout-depth", help="exponential, or constant over the layers.")
    ] = None
    dropout_time: Annotated[
        str | None, _recipe("--dropout-time", help="constant, or exponential over the run.")
    ] = None
    exit_scale: Annotated[
        float | None, _recipe("--exit-scale", help="Weight of the early exits' losses, 0 to 1.")
    ] = None
    curriculum: Annotated[
        str | None, _recipe("--curriculum", help="rotational, gradual or all.")
    ] = None
    rotation: Annotated[
        int | None,
        _recipe("--rotation", help="Each early exit is trained once in this many steps."),
    ] = None
    weighting: Annotated[
        str | None, _recipe("--weighting", help="quadratic (later exits weigh more), or even.")
    ] = None
    exits: Annotated[
        str | None,
        _recipe(
            "--exits",
            help="Train the early exits after so many layers only, e.g. 8,15,22. By default all.",
        ),
    ] = None
    share: Annotated[
        float | None,
        _recipe("--share", help="Share of positions at which early exits are trained."),
    ] = None

    exit_others: Annotated[
        int | None,
        _recipe(
            "--exit-others",
            min=0,
            help="Early exits choose among the step's tokens and so many others; 0: all tokens.",
        ),
    ] = None

    def chosen(self) -> tuple[Recipe, float | None]:
        """The recipe, and the learning rate if a preset names one."""
        from ..train.presets import preset
        from ..train.recipe import Recipe

        if self.recipe not in RECIPES:
            raise OptionError(
                f"recipe {self.recipe!r} is not known; {nearest(self.recipe, RECIPES)}"
            )
        experiment = preset(self.preset) if self.preset else None
        names = (
            "dropout",
            "dropout_depth",
            "dropout_time",
            "exit_scale",
            "curriculum",
            "rotation",
            "weighting",
            "share",
            "exit_others",
        )
        given: dict[str, Any] = {
            name: vars(self)[name] for name in names if vars(self)[name] is not None
        }
        if self.exits:
            given["exits"] = numbers(self.exits, "--exits")
        found = replace(experiment.recipe if experiment else Recipe(), **given).variant(
            self.variant
        )
        if experiment is None:
            return found, None
        return found, experiment.rate if found.dropout else experiment.rate_plain


@dataclass(frozen=True)
class RunFlags:
    """What becomes `TrainOptions`: the same names and defaults."""

    steps: Annotated[
        int | None,
        _run("--steps", min=1, help="Optimizer steps; by default as many as --epochs need."),
    ] = None
    epochs: Annotated[
        float | None,
        _run("--epochs", show_default="1, small parts 6", help="Passes over the data."),
    ] = None
    batch: Annotated[int, _run("--batch", min=1, help="Blocks on a device at a time.")] = 4
    accumulate: Annotated[
        int, _run("--accumulate", min=1, help="Batches that make up one step.")
    ] = 1
    learning_rate: Annotated[
        float | None,
        _run(
            "--learning-rate",
            "--lr",
            show_default="1e-4, or the preset's; small parts 1e-3",
            help="The highest.",
        ),
    ] = None
    weight_decay: Annotated[
        float | None, _run("--weight-decay", show_default="0, small parts 0.05", help="AdamW's.")
    ] = None
    seed: Annotated[int, _run("--seed", help="Order of the data, dropped layers, new weights.")] = 0
    precision: Annotated[
        str, _run("--precision", help="float32, or bfloat16 or float16 for mixed precision.")
    ] = "float32"
    save_every: Annotated[
        int, _run("--save-every", min=1, help="Steps between checkpoints; two are kept.")
    ] = 200
    log_every: Annotated[
        int, _run("--log-every", min=1, help="Steps between reports of the loss.")
    ] = 10
    gradient_checkpointing: Annotated[
        bool,
        _run(
            "--gradient-checkpointing",
            help="Less memory, more time: layers are computed again for the gradients.",
        ),
    ] = False
    from_scratch: Annotated[
        bool,
        _run(
            "--from-scratch",
            help="Take MODEL's configuration and tokenizer only; start from new weights.",
        ),
    ] = False
    score_blocks: Annotated[
        int,
        _run("--score-blocks", min=0, help="Held-out blocks to score exits on, before and after."),
    ] = 16
    plot: Annotated[
        bool, _run("--plot/--no-plot", help="Draw training.png (needs matplotlib).")
    ] = True
    report_to: Annotated[
        str, _run("--report-to", help="Also log to tensorboard, wandb, ... (transformers' names).")
    ] = "none"


@dataclass(frozen=True)
class DataFlags:
    """What becomes `DataOptions`."""

    length: Annotated[
        int | None,
        _data(
            "--length",
            min=8,
            show_default="512, small parts 768",
            help="Tokens in a block, or of a conversation.",
        ),
    ] = None
    packing: Annotated[
        bool, _data("--packing/--no-packing", help="Several examples in a block, or one in each.")
    ] = True
    held_out: Annotated[
        float | None,
        _data(
            "--held-out",
            show_default="0.02, small parts 0.03",
            help="Share of the examples kept apart to measure on.",
        ),
    ] = None
    text_column: Annotated[
        str, _data("--text-column", help="Name of the JSONL column with plain text.")
    ] = "text"
    chat_template: Annotated[
        bool,
        _data(
            "--chat-template/--no-chat-template",
            help="Write prompts and answers with the model's chat template.",
        ),
    ] = True
    train_on_prompts: Annotated[
        bool, _data("--train-on-prompts", help="Train prompts too, not only answers.")
    ] = False


@dataclass(frozen=True)
class LoraFlags:
    """What becomes `Lora`."""

    lora: Annotated[
        bool,
        _lora(
            "--lora", help="Train small matrices beside the linears and merge them (needs peft)."
        ),
    ] = False
    lora_rank: Annotated[int, _lora("--lora-rank", min=1, help="Their rank.")] = 16
    lora_alpha: Annotated[int, _lora("--lora-alpha", help="Their scale is alpha / rank.")] = 32
    lora_dropout: Annotated[float, _lora("--lora-dropout", help="Dropout before them.")] = 0.0
    lora_module: Annotated[
        list[str] | None,
        _lora(
            "--lora-module",
            help="A linear's name, e.g. q_proj; repeatable. By default all in the layers.",
        ),
    ] = None


def given(flags: Any) -> dict[str, Any]:
    """Those that have a value; for the others the library's default holds."""
    return {name: value for name, value in vars(flags).items() if value is not None}


def refuse_others(recipe: RecipeFlags, run: RunFlags, texts: DataFlags, lora: LoraFlags) -> None:
    """Raise if a flag was given that a small part knows nothing of."""
    used = {"recipe", "share", *PART_FLAGS, "length", "held_out"}
    for flags in (recipe, run, texts, lora):
        for field in fields(flags):
            if field.name not in used and getattr(flags, field.name) != field.default:
                raise OptionError(
                    f"--{field.name.replace('_', '-')} would be ignored by --recipe "
                    f"{recipe.recipe}, which trains a small part; "
                    "leave it out"
                )


@options.grouped
def train(
    model: options.Model,
    data: DataFiles,
    out: Annotated[
        Path,
        _run("--out", help="Folder for the trained model; also where an interrupted run goes on."),
    ],
    recipe: RecipeFlags,
    run: RunFlags,
    texts: DataFlags,
    lora: LoraFlags,
    part: PartFlags,
    threads: options.Threads = None,
    as_json: options.AsJson = False,
) -> None:
    """Train a model so that its early layers can draft for it (LayerSkip), or a small part that
    drafts for it as it is.

    The first gives an ordinary model folder; --recipe draft-head a small folder for --draft
    draft-head, trained on text that the model wrote (selfspec data). The same command after an
    interruption goes on where it was.

    Example:  selfspec train demo --data mine.jsonl --out my-model --steps 500
    """
    common.quiet_bars()
    import torch

    if recipe.recipe in PARTS:
        if threads is not None:
            torch.set_num_threads(threads)
        refuse_others(recipe, run, texts, lora)
        asked = {
            each.name: vars(run)[each.name]
            for each in fields(run)
            if vars(run)[each.name] != each.default
        }
        shared = {name: asked.get(name) for name in PART_FLAGS} | {
            name: vars(texts)[name] for name in ("length", "held_out")
        }
        shared["plot"] = run.plot
        train_part(
            recipe.recipe, model, data, out, {**shared, "share": recipe.share}, part, as_json
        )
        return
    chosen, rate = recipe.chosen()
    part.refuse(recipe.recipe)

    from ..train.data import DataOptions
    from ..train.lora import Lora
    from ..train.run import TrainOptions
    from ..train.run import train as run_training

    if threads is not None:
        torch.set_num_threads(threads)
    settings = TrainOptions(**{**given(run), "learning_rate": run.learning_rate or rate or 1e-4})
    small = (
        Lora(lora.lora_rank, lora.lora_alpha, lora.lora_dropout, tuple(lora.lora_module or ()))
        if lora.lora
        else None
    )
    with _watching() as observer:
        report = run_training(
            model,
            data,
            out,
            recipe=chosen,
            options=settings,
            data=DataOptions(**given(texts), seed=run.seed),
            lora=small,
            callbacks=[observer],
        )
    if os.environ.get("RANK", "0") != "0":  # of several processes one speaks
        return
    if as_json:
        typer.echo(json.dumps(report.as_dict()))
        return
    say(report, out)


def say(report: Report, out: Path) -> None:
    """What came out, and how to try it."""
    console = Console(highlight=False)
    if report.exits:
        console.print(table(report.exits))
    console.print(
        f"{report.steps} steps, {report.tokens:,} tokens, {report.seconds:.0f} s. The model is in "
        f"{out}.",
        soft_wrap=True,
    )
    console.print(
        f"Try it:  selfspec generate {out} 'Your prompt' --draft early-exit --stats", soft_wrap=True
    )


@options.grouped
def exits(
    name: options.Model,
    data: DataFiles,
    texts: DataFlags,
    model: options.ModelOptions,
    blocks: Annotated[
        int, _data("--blocks", min=1, help="Measure on this many held-out blocks at most.")
    ] = 16,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", help="Draw a picture into this file.", rich_help_panel="Output"),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Measure what each exit of a model is worth on a text: perplexity, and agreement with the
    whole model's next token.

    Example:  selfspec exits demo --data mine.jsonl --held-out 0.5
    """
    llm = common.open_model(name, model)
    from ..train.data import DataOptions, load_data
    from ..train.evaluate import evaluate_exits
    from ..train.plots import plot_exits

    if llm.tokenizer is None:
        raise OptionError(
            f"{name} has no tokenizer, so text cannot be turned into tokens; add its files to the "
            f"folder"
        )
    found = load_data(data, llm.tokenizer, DataOptions(**given(texts)))
    scores = {"": evaluate_exits(llm.model, found.held_out, most=blocks)}
    facts = [score.as_dict() for score in scores[""]]
    if plot is not None:
        plot_exits({name: facts}, plot, f"Exits of {name}")
    if as_json:
        typer.echo(json.dumps({"model": name, "exits": facts}))
    else:
        Console(highlight=False).print(table(scores))


def table(scores: Mapping[str, Sequence[ExitScore]]) -> Table:
    """A row for each exit; for each time agreement and perplexity."""
    grid = Table(box=None, padding=(0, 2, 0, 0))
    grid.add_column("exit", justify="right")
    for when in scores:
        grid.add_column(f"agreement {when}".strip(), justify="right")
        grid.add_column(f"perplexity {when}".strip(), justify="right")
    for row in zip(*scores.values(), strict=True):
        cells = [(f"{score.agreement:.1%}", f"{score.perplexity:,.2f}") for score in row]
        grid.add_row(str(row[0].layers), *(cell for pair in cells for cell in pair))
    return grid


def _watching() -> Any:
    """A context whose value is a callback of the Trainer that shows how far it is. Imported late:
    it needs transformers."""
    from transformers import TrainerCallback

    class StopCheck(TrainerCallback):
        """A bar for somebody who watches; a line at each log in a file."""

        def __init__(self) -> None:
            self._console = common.stderr()
            self._bar = common.bar("step", "losses")
            self._task: Any = None
            self._start = (0.0, 0)
            self._exits: dict[int, float] = {}

        def __enter__(self) -> StopCheck:
            return self

        def __exit__(self, *_: object) -> None:
            self._bar.stop()

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self._start = (time.perf_counter(), state.global_step)
            if not state.is_world_process_zero:
                return
            if state.global_step:
                self._console.print(f"going on from step {state.global_step}", style="dim")
            self._bar.start()
            self._task = self._bar.add_task(
                "", total=state.max_steps, completed=state.global_step, losses=""
            )

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if self._task is not None:
                self._bar.update(self._task, completed=state.global_step)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if not logs or "loss" not in logs or not state.is_world_process_zero:
                return
            self._exits |= {
                int(name[5:]): value for name, value in logs.items() if name.startswith("exit_")
            }
            self._bar.update(self._task, losses=losses(logs["loss"], self._exits))
            if not sys.stderr.isatty():
                seconds = (time.perf_counter() - self._start[0]) / max(
                    1, state.global_step - self._start[1]
                )
                left = seconds * (state.max_steps - state.global_step)
                found = losses(logs["loss"], self._exits)
                line = f"step {state.global_step} of {state.max_steps}, {left:.0f} s left, {found}"
                self._console.print(line, soft_wrap=True)

    return StopCheck()


def losses(loss: float, exits: dict[int, float], most: int = 5) -> str:
    """The loss, and the latest of at most five exits, evenly chosen, the last among them."""
    layers = sorted(exits)
    chosen = (
        sorted({layers[round(index * (len(layers) - 1) / (most - 1))] for index in range(most)})
        if layers
        else []
    )
    return f"loss {loss:.3f}" + "".join(f" · exit {layer} {exits[layer]:.2f}" for layer in chosen)
