"""`selfspec quantise`: a model in fewer bits as a folder of its own. The room `model` writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import common, options


def quantise(
    name: options.Model,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            help="int8 (a quarter of float32's bytes, hardly a difference), int4 (a sixth, a small "
            "one) or bfloat16 (half, none for most models).",
        ),
    ] = "int8",
    out: Annotated[
        Path | None,
        options.output("--out", help="The folder to write. Without it MODEL-KIND, here."),
    ] = None,
) -> None:
    """Write a model in fewer bits, as a folder that loads in a second and in little memory.

    The folder goes wherever a model is named. It writes what MODEL writes with --weights KIND, bit
    for bit, on any processor. Rounded weights make it another model than the one in float32, if
    only slightly. The original is read and stays as it is.

    Example:  selfspec quantise demo --to int8 && selfspec generate ./demo-int8 "Hello"
    """
    from ..model.quantising import quantise as write

    common.quiet_bars()
    with common.bar("product") as bar:
        task = bar.add_task("", total=None, words="")
        folder = write(name, to, out, lambda done, of: bar.update(task, completed=done, total=of))
    size = sum(file.stat().st_size for file in folder.iterdir())
    typer.echo(f"{folder}: {common.megabytes(size)}, weights {to}")
