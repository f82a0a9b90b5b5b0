"""The part of `selfspec train` that trains small parts for a frozen model: its flags, its progress
bar, its last words.

Only asks and shows: what is trained and how is decided in the room `train`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ..errors import OptionError
from . import common

if TYPE_CHECKING:
    from ..train.part_run import PartReport, StopCheck
    from ..train.parts import Progress as Step

PARTS = ("draft-head", "exit-adapter", "draft-lora", "successors")
# what counting successors has use for
COUNTED = {
    "pairs",
    "states",
    "max_minutes",
    "length",
    "held_out",
    "plot",
}

_part = functools.partial(
    typer.Option, show_default=True, rich_help_panel=f"Small parts ({', '.join(PARTS)})"
)


@dataclass(frozen=True)
class PartFlags:
    """What becomes the recipe of a part and `PartOptions`, beside the flags that all recipes share:
    their own defaults hold."""

    collector: Annotated[
        list[int] | None,
        _part(
            "--tap",
            help="draft-head: read the states after this layer; repeatable.",
            show_default="3 spread",
        ),
    ] = None
    exit: Annotated[
        int | None,
        _part(
            "--exit",
            min=1,
            show_default="a quarter",
            help="exit-adapter: layers that run before it.",
        ),
    ] = None
    blocks: Annotated[
        int | None,
        _part("--blocks", min=1, show_default="1", help="exit-adapter: how many blocks it has."),
    ] = None
    vocabulary: Annotated[
        int | None,
        _part(
            "--vocabulary",
            min=1,
            show_default="16384",
            help="How many tokens it can say, the likeliest ones.",
        ),
    ] = None
    start: Annotated[
        str | None,
        _part(
            "--start",
            show_default="last-layer",
            help="First weights: last-layer (the model's own) or random.",
        ),
    ] = None
    start_from: Annotated[
        Path | None, _part("--start-from", help="Begin with this trained part's weights.")
    ] = None
    ahead: Annotated[
        int | None, _part("--ahead", min=1, show_default="3", help="draft-head: drafts in a row.")
    ] = None
    batch_tokens: Annotated[
        int | None, _part("--batch-tokens", min=1, show_default="2048", help="Tokens of a step.")
    ] = None
    others: Annotated[
        int | None,
        _part(
            "--others",
            min=0,
            show_default="2048",
            help="Tokens drawn for the loss beside those that matter; 0: all.",
        ),
    ] = None
    noise: Annotated[
        float | None, _part("--noise", show_default="0.05", help="Random noise on the states.")
    ] = None
    measured: Annotated[
        int | None,
        _part("--measured", min=1, show_default="64", help="Held-out answers to measure on."),
    ] = None
    skip_attention: Annotated[
        list[int] | None,
        _part(
            "--skip-attention",
            help="draft-lora: skip this layer's attention while drafting; repeatable.",
        ),
    ] = None
    skip_mlp: Annotated[
        list[int] | None,
        _part("--skip-mlp", help="draft-lora: skip this layer's MLP while drafting; repeatable."),
    ] = None
    skip_share: Annotated[
        float | None,
        _part(
            "--skip-share",
            show_default="0.5",
            help="draft-lora: without lists, skip this share of the layers.",
        ),
    ] = None
    rank: Annotated[
        int | None,
        _part("--rank", min=1, show_default="16", help="draft-lora: rank of its matrices."),
    ] = None
    pairs: Annotated[
        int | None,
        _part(
            "--pairs",
            min=1,
            show_default="100000",
            help="Successors: how many pairs of tokens to keep.",
        ),
    ] = None
    states: Annotated[
        Path | None,
        _part(
            "--states",
            show_default="OUT/states",
            help="Folder for what the model computes on the text.",
        ),
    ] = None
    max_minutes: Annotated[
        float | None,
        _part(
            "--max-minutes", help="Stop at a checkpoint after so long; the same command goes on."
        ),
    ] = None

    def refuse(self, recipe: str) -> None:
        """Raise if anything was given, for a recipe that knows none of it."""
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                raise OptionError(
                    f"--{field.name.replace('_', '-')} belongs to small parts and would be "
                    f"ignored by --recipe {recipe}; "
                    "leave it out"
                )


# Flags that some kinds of parts alone know.
ONLY = {
    "tap": ("draft-head",),
    "ahead": ("draft-head",),
    "exit": ("exit-adapter",),
    "blocks": ("exit-adapter",),
    "start": ("draft-head", "exit-adapter"),
    "noise": ("draft-head", "exit-adapter"),
    "skip_attention": ("draft-lora",),
    "skip_mlp": ("draft-lora",),
    "skip_share": ("draft-lora",),
    "rank": ("draft-lora",),
    "pairs": ("successors",),
}


def train_part(
    kind: str,
    model: str,
    data: Sequence[str],
    out: Path,
    shared: dict[str, Any],
    flags: PartFlags,
    as_json: bool,
) -> None:
    """Train a part of that kind. `shared`: values of flags that all recipes have; None is the
    part's own default."""
    lists = {
        "layers": flags.collector,
        "skip_attention": flags.skip_attention,
        "skip_mlp": flags.skip_mlp,
    }
    wishes = {
        **shared,
        **vars(flags),
        **{name: None if found is None else tuple(found) for name, found in lists.items()},
    }
    with _Shown() as shown:
        make = _count if kind == "successors" else functools.partial(_train, kind)
        report = make(model, data, out, wishes, shown.observer())
    if as_json:
        typer.echo(json.dumps(report.as_dict()))
    else:
        _say(report, model, out)


def _train(
    kind: str,
    model: str,
    data: Sequence[str],
    out: Path,
    wishes: dict[str, Any],
    observer: StopCheck,
) -> PartReport:
    from ..train.draft_head import HeadRecipe
    from ..train.draft_lora import LoraRecipe
    from ..train.exit_adapter import AdapterRecipe
    from ..train.part_run import train_small_part
    from ..train.parts import PartOptions

    recipe_of: Any = {
        "draft-head": HeadRecipe,
        "exit-adapter": AdapterRecipe,
        "draft-lora": LoraRecipe,
    }[kind]
    _refuse(wishes, {name for name, only in ONLY.items() if kind not in only}, kind)
    recipe, options = (
        recipe_of(**_given(recipe_of, wishes)),
        PartOptions(**_given(PartOptions, wishes)),
    )
    more = {
        name: wishes[name]
        for name in ("length", "held_out", "states", "start_from", "plot")
        if wishes[name] is not None
    }
    return train_small_part(
        model, data, out, recipe=recipe, options=options, observer=observer, **more
    )


def _count(
    model: str, data: Sequence[str], out: Path, wishes: dict[str, Any], observer: StopCheck
) -> PartReport:
    from ..train.part_run import train_successors
    from ..train.successors import CountOptions

    _refuse(wishes, set(wishes) - COUNTED - {"layers"}, "successors")
    more = {name: wishes[name] for name in COUNTED - {"pairs", "plot"} if wishes[name] is not None}
    return train_successors(
        model,
        data,
        out,
        options=CountOptions(**_given(CountOptions, wishes)),
        observer=observer,
        **more,
    )


def _refuse(wishes: dict[str, Any], useless: set[str], kind: str) -> None:
    for name in sorted(useless):
        if wishes[name] is not None:
            raise OptionError(
                f"--{name.replace('_', '-')} would be ignored by --recipe {kind}; leave it out"
            )


def _given(kind: Any, wishes: dict[str, Any]) -> dict[str, Any]:
    """What was asked for of a dataclass's fields."""
    names = [field.name for field in dataclasses.fields(kind)]
    return {name: wishes[name] for name in names if wishes.get(name) is not None}


def _say(report: PartReport, model: str, out: Path) -> None:
    console = Console(highlight=False)
    if not report.done:
        console.print(
            f"The time is up after {report.step} steps. The same command goes on from here."
        )
    if report.acceptance:
        console.print(table(report.acceptance))
        steps = "" if report.kind == "successors" else f"{report.step} steps, "
        console.print(
            f"{steps}{report.tokens:,} tokens, {report.seconds:.0f} s. The part is in {out}.",
            soft_wrap=True,
        )
        drafting = f"--draft {report.drafter} --draft-option part={out}"
        command = f"selfspec generate {model} 'Your prompt' {drafting} --stats"
        console.print(f"Try it:  {command}", soft_wrap=True)


def table(acceptance: Sequence[float]) -> Table:
    """By depth, how often a draft is right."""
    grid = Table(box=None, padding=(0, 2, 0, 0))
    grid.add_column("draft", justify="right")
    grid.add_column("right, if those before were", justify="right")
    for depth, share in enumerate(acceptance, start=1):
        grid.add_row(str(depth), f"{share:.1%}")
    return grid


class _Shown:
    """A bar for somebody who watches; lines for a file."""

    def __init__(self) -> None:
        self._console = common.stderr()
        self._bar = common.bar("{task.description}", "words")
        self._task: Any = None
        self._began: tuple[float, int] | None = None
        self._right = ""

    def __enter__(self) -> _Shown:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def observer(self) -> StopCheck:
        from ..train.part_run import StopCheck

        return StopCheck(self._reading, self._training)

    def _reading(self, tokens: int, rate: int) -> None:
        self._console.print(
            f"states of {tokens:,} tokens computed, {rate} a second", style="dim", soft_wrap=True
        )

    def _training(self, step: Step) -> None:
        if self._began is None:
            self._began = time.perf_counter(), step.step - 1
            self._bar.start()
            self._task = self._bar.add_task("step", total=step.steps, completed=step.step, words="")
        if step.acceptance:
            self._right = "right " + " ".join(f"{share:.0%}" for share in step.acceptance)
        words = f"loss {step.loss:.3f} · {step.tokens_per_second:.0f} tokens/s · {self._right}"
        self._bar.update(self._task, completed=step.step, words=words)
        if step.acceptance and not sys.stderr.isatty():
            start, first = self._began
            left = (
                (time.perf_counter() - start) / max(1, step.step - first) * (step.steps - step.step)
            )
            self._console.print(
                f"step {step.step} of {step.steps}, {left:.0f} s left, {words}", soft_wrap=True
            )
