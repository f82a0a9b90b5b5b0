"""`scripts/bench models NAME`: where the merged weights of one of our models are, for selfspec's
own commands: `selfspec generate "$(scripts/bench models task)" "wake me up at 7"`. With `--keep` an
adapter that was just trained becomes one of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.command import run_command
from benchmarks.models import HERE, folder_of, known
from benchmarks.models.keep import keep


def models(
    name: Annotated[str, typer.Argument(help="Its short name; without one they are listed.")] = "",
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            "--keep", help="Keep the adapter of this checkpoint of `selfspec train --lora`."
        ),
    ] = None,
    base: Annotated[str, typer.Option(help="With --keep: what the adapter was trained on.")] = (
        "demo"
    ),
    chat: Annotated[bool, typer.Option(help="With --keep: keep the base's chat template.")] = False,
) -> None:
    """The folder of a model that benchmarks take by name, made at first use.

    Example: scripts/bench models task
    """
    if name and checkpoint is not None:
        keep(checkpoint, HERE / name, base, chat)
    typer.echo(str(folder_of(name)) if name else "\n".join(known()))


if __name__ == "__main__":
    run_command(models)
