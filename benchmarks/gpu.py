"""`scripts/gpu`: all that a card is needed for, one piece after the other.

A piece is a command of its own. It is done when its result is in the folder, so a run that was
stopped goes on with the piece that it was in, and `scripts/head` goes on inside its own. Without a
card it says so; `--device cpu --shape tiny` tries the pieces. Measures nothing itself.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.command import Model, environment, run_command
from selfspec.bench.provenance import CHECKOUT
from selfspec.errors import OptionError, nearest


@dataclass(frozen=True)
class Piece:
    """A command and the file that it leaves when it is done."""

    name: str
    result: Path
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)


Run = Callable[[Piece], int]


def pieces(
    folder: Path,
    model: str = "demo",
    device: str = "cuda",
    shape: str = "llama-2-7b",
    heads: int = 6,
) -> list[Piece]:
    """Everything, in the order of what is worth most if the card goes away."""
    python = [sys.executable, "-P", "-m"]
    tests, ties, plain = folder / "tests.xml", folder / "identity.json", folder / "plain.json"
    shaped = ["--device", device, "--shape", shape]
    found = [
        Piece(
            "identity",
            ties,
            [*python, "benchmarks.exact", "--model", model, "--dtype", "bfloat16", "--device",
             device, "--rows", "16", "--length", "200", "--out", str(ties)],
        ),
        Piece("plain", plain, [*python, "benchmarks.plain", *shaped, "--out", str(plain)]),
        Piece("tests", tests, [*python, "pytest", "-m", "gpu", f"--junitxml={tests}", "tests"]),
    ]  # fmt: skip
    for number in range(1, heads + 1):
        part = folder / "heads" / f"head-{number}" / "training.json"
        settings = {"MODEL": model, "FOLDER": str(folder / "heads")}
        command = [str(CHECKOUT / "scripts/head"), str(number)]
        found.append(Piece(f"head-{number}", part, command, settings))
    return found


def run_piece(piece: Piece) -> int:
    """Run its command here; its exit status."""
    settings = {**environment(), **piece.environment}
    return subprocess.run(piece.command, cwd=CHECKOUT, env=settings, check=False).returncode


def work(todo: Sequence[Piece], run: Run, say: Callable[[str], None], until: float) -> list[str]:
    """Run what is not done and begin nothing after `until`, a time of time.monotonic(); the names
    of the pieces that ended without a result or with an error."""
    failed = []
    for piece in todo:
        if piece.result.exists():
            say(f"{piece.name}: done before, {piece.result.name}")
            continue
        if time.monotonic() >= until:
            say(f"{piece.name}: no time left; the same command goes on here")
            break
        say(f"{piece.name}: begins")
        status = run(piece)
        if status and piece.result.exists():  # kept to be read, and not taken for done
            piece.result.replace(piece.result.with_name(f"failed-{piece.result.name}"))
        if not piece.result.exists():
            failed.append(piece.name)
            say(f"{piece.name}: no result, status {status}")
    return failed


def check(device: str) -> None:
    """Say that there is no card before anything is begun."""
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise OptionError(
            f"--device {device}: torch sees no CUDA device here, so there is no card to measure. "
            "Run scripts/gpu where there is one, or try its pieces with --device cpu --shape tiny."
        )


def gpu(
    only: Annotated[
        str, typer.Option("--pieces", help="Names separated by commas; all by default.")
    ] = "",
    model: Model = "demo",
    device: Annotated[str, typer.Option(help="cuda, cuda:1, or cpu to try it.")] = "cuda",
    shape: Annotated[
        str, typer.Option(help="What is decoded plainly and with drafts: llama-2-7b, tiny.")
    ] = "llama-2-7b",
    heads: Annotated[int, typer.Option(min=0, help="Pieces of a draft head's training.")] = 6,
    minutes: Annotated[float, typer.Option(help="After so long nothing new is begun.")] = 120.0,
    folder: Annotated[Path, typer.Option(help="Where the results go.")] = Path("gpu"),
) -> None:
    """All that a card is needed for, in pieces: are texts the same in bfloat16, plain and
    speculative decoding of a 7B shape, the tests that need a card, a draft head's training. The
    same command goes on where it was stopped.

    Example: scripts/gpu --minutes 30
    Example: scripts/gpu --device cpu --shape tiny --pieces plain
    """
    check(device)
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    todo = pieces(folder, model, device, shape, heads)
    wanted = [name.strip() for name in only.split(",")] if only else [piece.name for piece in todo]
    for name in wanted:
        if name not in (known := [piece.name for piece in todo]):
            raise OptionError(f"--pieces: {name!r} is unknown; {nearest(name, known)}")
    todo = [piece for piece in todo if piece.name in wanted]
    until = time.monotonic() + 60 * minutes
    failed = work(todo, run_piece, lambda text: typer.echo(text, err=True), until)
    if failed:
        typer.echo(f"Failed: {', '.join(failed)}. The same command tries them again.", err=True)
        raise typer.Exit(1)


if __name__ == "__main__":
    run_command(gpu)
