"""The front of the command line: registers the commands and turns users' errors into messages.

A new command is one module with one function, and one line in `COMMANDS`.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib import import_module
from inspect import getdoc
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .. import __version__
from ..errors import SelfspecError
from .common import stderr

# in the order of the help; a command's module is imported when it is run or shown
COMMANDS = {
    "generate": "generate",
    "chat": "chat",
    "serve": "serve",
    "info": "info",
    "quantise": "quantise",
    "export": "export",
    "drafters": "drafters",
    "demo": "demo",
    "data": "data",
    "train": "train",
    "exits": "exits",
    "fit-exits": "fit_exits",
    "inspect": "inspect",
    "advise": "tune",
    "tune": "tune",
    "sweep": "sweep",
    "bench": "bench",
    "bench-serve": "bench_serve",
    "report": "report",
}
SETTINGS = {"help_option_names": ["-h", "--help"]}


class Commands(Mapping[str, Any]):
    """All commands by name, each imported and built when it is asked for."""

    def __getitem__(self, name: str) -> Any:
        return built(name, COMMANDS[name])

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


@cache
def built(name: str, module: str) -> Any:
    """A command: the function of that name in a module beside this one."""
    function = getattr(import_module(f".{module}", __package__), name.replace("-", "_"))
    alone = typer.Typer(
        pretty_exceptions_enable=False, add_completion=False, context_settings=SETTINGS
    )
    alone.command(name, help=paragraphs(function))(function)
    return typer.main.get_command(alone)


class Front(TyperGroup):
    """Shows our own errors as a message; anything else is a bug and keeps its traceback."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands: Any = Commands()

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
    context_settings=SETTINGS,
    epilog="For example:  selfspec generate 'Why is the sky blue?'",
)


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
