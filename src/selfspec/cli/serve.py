"""`selfspec serve`: OpenAI's interface over one model. The room `serve` does the work."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import OptionError, Unavailable
from . import common, options

_limit = functools.partial(typer.Option, rich_help_panel="Limits")
_server = functools.partial(typer.Option, rich_help_panel="Server")
KEYS = "SELFSPEC_API_KEYS"


@options.grouped
def serve(
    name: options.Model = "demo",
    *,
    host: Annotated[
        str, _server("--host", help="Address to listen on. 0.0.0.0: all of this machine's.")
    ] = "127.0.0.1",
    port: Annotated[int, _server("--port", min=0, max=65535, help="0: any free one.")] = 8000,
    served_name: Annotated[
        str | None, _server("--served-name", help="What requests call the model.")
    ] = None,
    api_key_file: Annotated[
        Path | None,
        _server("--api-key-file", help=f"Keys, one a line. Or in ${KEYS}, between commas."),
    ] = None,
    cors: Annotated[
        list[str] | None, _server("--cors", help="A web page's origin that may call. Repeatable.")
    ] = None,
    draft: Annotated[
        str, _server("--draft", help="The drafter of requests that name none.")
    ] = "auto",
    rows: Annotated[int, _limit("--rows", min=1, help="Requests worked on at once.")] = 16,
    room: Annotated[
        int | None,
        _limit("--context", min=2, help="Most tokens of a request, prompt and answer together."),
    ] = None,
    queue: Annotated[int, _limit("--queue", min=1, help="Requests that may wait.")] = 64,
    queue_seconds: Annotated[float, _limit(help="Longest wait for a row.")] = 60.0,
    request_seconds: Annotated[float, _limit(help="Longest time of a request.")] = 600.0,
    drain_seconds: Annotated[float, _limit(help="Longest time to finish once told to end.")] = 60.0,
    body_bytes: Annotated[int, _limit(min=1, help="Largest body of a request.")] = 4_000_000,
    choices: Annotated[int, _limit(min=1, help="Most answers to a request: prompts x n.")] = 16,
    model: options.Loading,
) -> None:
    """Serve a model to any client of OpenAI's: chat, completions, streams, on one machine.

    Requests share rounds, and each drafts for itself; each answer is the one it would get alone.
    It listens on this machine only unless --host says more. SIGTERM finishes what runs, then ends.

    Example:  selfspec serve demo --port 8000
    """
    run = _runner()
    from ..serve.service import Service
    from ..serve.settings import DRAFTS, Limits, Settings

    if draft not in DRAFTS:
        raise OptionError(
            f"--draft={draft} needs more than the model; use one of {', '.join(DRAFTS)}"
        )
    limits = Limits(
        rows=rows, context=room, queue=queue, queue_seconds=queue_seconds,
        seconds=request_seconds, drain_seconds=drain_seconds, body=body_bytes, choices=choices,
    )  # fmt: skip
    given = served_name or (None if Path(name).is_dir() else name)
    settings = Settings(limits, keys_from(api_key_file), cors or (), draft, given)
    typer.echo(f"serving {name} on http://{host}:{port}/v1 (loading; /ready says when)", err=True)
    run(Service(settings), lambda: common.open_model(name, model), host, port)


def _runner() -> Callable[..., None]:
    """What serves, once its packages are there."""
    try:
        from ..serve.running import serve as run
    except ImportError as error:
        raise Unavailable(
            f"the server needs {error.name}; install it: pip install 'selfspec[serve]'"
        ) from error
    return run


def keys_from(file: Path | None) -> list[str]:
    """The keys of a file and of the environment."""
    lines: list[Any] = os.environ.get(KEYS, "").split(",")
    if file is not None:
        try:
            lines += file.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError as error:
            raise OptionError(
                f"{file} is no text, so it holds no keys; write one a line"
            ) from error
    found = [line.strip() for line in lines if line.strip()]
    if file is not None and not found:
        raise OptionError(f"{file} holds no key, so everybody would be served; write one a line")
    return found
