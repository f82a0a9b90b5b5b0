"""The front of the command line: registers the commands and turns users' errors into messages.

A new command is one module with one function, and one line here.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from inspect import getdoc
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .. import __version__
from ..errors import SelfspecError
from .bench import bench
from .bench_serve import bench_serve
from .chat import chat
from .common import stderr
from .data import data
from .demo import demo
from .drafters import drafters
from .exits import exits
from .export import export
from .generate import generate
from .info import info
from .inspect import inspect
from .quantise import quantise
from .report import report
from .serve import serve
from .sweep import sweep
from .train import train
from .tune import advise, tune


class Front(TyperGroup):
    """Shows our own errors as a message; anything else is a bug and keeps its traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (SelfspecError, OSError) as error:
            # a closed pipe is nobody's mistake: typer ends in silence
            foreign = isinstance(error, OSError) and error.errno in (None, errno.EPIPE)
            if foreign or ctx.params.get("traceback"):
                raise
            stderr().print("[bold red]error:[/bold red]", end=" ")
            stderr().print(_said(error), markup=False, soft_wrap=True)
            raise typer.Exit(1) from error


def _said(error: Exception) -> str:
    """The message of an error, with characters that any terminal can show."""
    text = str(error)
    if isinstance(error, OSError):
        if error.filename is None:  # what is printed goes to a full disk
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python complains at its end as well
            text = f"the output cannot be written ({error.strerror}); make room, or name a file"
        else:
            text = f"{error.filename}: {error.strerror}; name another place, or make room there"
    return text.encode("utf-8", "backslashreplace").decode()


def paragraphs(command: Callable[..., None]) -> str:
    """A command's docstring, one line a paragraph: the terminal breaks the lines."""
    text = getdoc(command) or ""
    return "\n\n".join(part.replace("\n", " ") for part in text.split("\n\n"))


app = typer.Typer(
    name="selfspec",
    cls=Front,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="For example:  selfspec generate 'Why is the sky blue?'",
)
for command in (
    generate,
    chat,
    serve,
    info,
    quantise,
    export,
    drafters,
    demo,
    data,
    train,
    exits,
    inspect,
    advise,
    tune,
    sweep,
    bench,
    bench_serve,
    report,
):
    app.command(help=paragraphs(command))(command)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"selfspec {__version__}")
        raise typer.Exit()


@app.callback()
def front(
    traceback: Annotated[
        bool,
        typer.Option(
            "--traceback",
            envvar="SELFSPEC_TRACEBACK",
            help="Show where in the code an error comes from.",
        ),
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Run Hugging Face models faster, with exactly the text they would have written anyway."""


def main() -> None:
    """The console script."""
    code: Any = 0
    try:
        try:
            app()
        except SystemExit as end:
            code = end.code
        sys.stdout.flush()  # else Python itself complains of a full disk, after its own end
    except OSError as error:
        if error.filename is not None:
            raise
        code, said = 1, _said(error)
        if error.errno != errno.EPIPE:  # whoever read has seen enough
            stderr().print(f"error: {said}", markup=False, soft_wrap=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
