"""What the commands of `scripts/bench` share: options, the tokenizer, where a result goes and what
it says of its making, errors as messages."""

from __future__ import annotations

import functools
import inspect
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import torch
import typer

from selfspec import __version__
from selfspec.bench.peer_host import package_versions
from selfspec.bench.provenance import CHECKOUT, gather, slug
from selfspec.bench.schema import Provenance
from selfspec.core.machine import cpu_name
from selfspec.errors import SelfspecError

Tokenize = Callable[[str], Sequence[int]]
Model = Annotated[str, typer.Option(help="'demo', 'task' (benchmarks/models) or a model folder.")]
Threads = Annotated[int, typer.Option(min=1, help="CPU threads.")]
Out = Annotated[Path | None, typer.Option(help="The JSON to write.")]
Show = Annotated[Path | None, typer.Option(help="Measure nothing: print the tables of this JSON.")]


def tokenizer_of(folder: Path) -> Tokenize:
    """Text to ids with the model's own tokenizer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return lambda text: list(tokenizer(text, add_special_tokens=False).input_ids)


def made_by(
    name: str, threads: int, packages: Sequence[str] = ("torch", "transformers")
) -> Provenance:
    """Where a result of `scripts/bench NAME` comes from; the command as it was typed, files without
    their folders."""
    words = [Path(word).name if Path(word).is_file() else word for word in sys.argv[1:]]
    versions = {"selfspec": __version__, **package_versions(packages)}
    return gather(shlex.join(["scripts/bench", name, *words]), threads, versions)


def result_path(name: str, machine: str = "", kind: str = "") -> Path:
    """Among the committed results, named after what was measured and on which machine."""
    folder = CHECKOUT / "benchmarks" / "results"
    return folder / f"{name}-{slug(machine or cpu_name())}{kind}.json"


def environment() -> dict[str, str]:
    """What a process of its own needs to find this folder's modules, which are in no wheel."""
    paths = filter(None, [str(CHECKOUT), os.environ.get("PYTHONPATH")])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def last_said(errors: str) -> str:
    """The last line of what a process wrote to stderr, which says why it ended."""
    return (errors.strip().splitlines() or ["nothing"])[-1]


def device_name(device: torch.device) -> str:
    """The card as its driver names it, or the processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """The command with each parameter that is a dataclass of options replaced by its fields."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    groups: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
        if not is_dataclass(kind := parameter.annotation):
            parameters.append(parameter.replace(kind=keyword))
            continue
        groups[name], hints = kind, get_type_hints(kind, include_extras=True)
        parameters += [
            inspect.Parameter(
                field.name, keyword, default=field.default, annotation=hints[field.name]
            )
            for field in fields(kind)
        ]

    @functools.wraps(command)
    def flat(**values: Any) -> None:
        for name, kind in groups.items():
            values[name] = kind(**{field.name: values.pop(field.name) for field in fields(kind)})
        command(**values)

    flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    flat.__annotations__ = {option.name: option.annotation for option in parameters}
    return flat


def run_command(command: Callable[..., None]) -> None:
    """Run a function as a command: errors for users are one message on stderr, no traceback."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(command)
    try:
        app()
    except SelfspecError as error:
        typer.echo(f"Error: {error}", err=True)
        raise SystemExit(1) from None
