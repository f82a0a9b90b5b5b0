"""`selfspec bench-serve`: throughput and latency of a running server, ours or another's."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import __version__
from ..errors import OptionError, Unavailable
from . import common, options
from .bench import command_line

KEY = "SELFSPEC_API_KEY"


def bench_serve(
    url: Annotated[
        str, typer.Argument(help="Where the server is, without /v1.", metavar="URL")
    ] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None, typer.Option("--model", help="Its name there. Without it the first one.")
    ] = None,
    server: Annotated[
        str, typer.Option("--server", help="What server it is, in words: for the table.")
    ] = "selfspec",
    callers: Annotated[
        str, typer.Option("--callers", help="How many ask at once: one run for each number.")
    ] = "1,4,16,64",
    requests: Annotated[
        int, typer.Option("--requests", min=1, help="Questions of each caller.")
    ] = 4,
    words: Annotated[int, typer.Option("--prompt-words", min=1, help="Words of a question.")] = 60,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=1, help="Most tokens of an answer.")
    ] = 64,
    field: Annotated[
        list[str] | None,
        typer.Option("--field", help="A field for every request, NAME=JSON. Repeatable."),
    ] = None,
    out: Annotated[Path | None, options.output("--out", "-o", help="The JSON to write.")] = None,
    show: options.Show = None,
) -> None:
    """Measure a server of OpenAI's interface under load, as its callers see it.

    A key for it is read from $SELFSPEC_API_KEY.

    Example:  selfspec bench-serve http://127.0.0.1:8000 --callers 1,4 --out serving.json
    """
    serving = _serving()
    from ..bench.provenance import gather
    from ..bench.schema import read, write
    from ..core.options import numbers

    if show is not None:
        typer.echo(serving.markdown(read(serving.ServeRun, show)))
        return
    key = os.environ.get(KEY)
    url = url.rstrip("/").removesuffix("/v1")
    target = serving.Target(
        url, model or serving.model_at(url, key), max_tokens, key, _fields(field or ())
    )

    def tell(crowd: Any) -> None:
        served = f"{len(crowd.served)} of {len(crowd.asked)} served"
        rate = f"{crowd.tokens_per_second:.1f} tokens/s"
        common.stderr().print(f"{crowd.callers} callers: {served}, {rate}")

    crowds = serving.measure(target, numbers(callers, "--callers"), requests, words, tell)
    command = command_line(sys.argv[1:], [url, *([str(out)] if out else [])])
    provenance = gather(command, 0, {"selfspec": __version__})
    run = serving.run_of(provenance, server, target, words, crowds)
    if out is not None:
        write(run, out)
    typer.echo(serving.markdown(run))


def _serving() -> Any:
    """The room's module, once its package is there."""
    try:
        from ..bench import serving
    except ImportError as error:
        raise Unavailable(
            f"callers need {error.name}; install it: pip install 'selfspec[bench]'"
        ) from error
    return serving


def _fields(texts: Any) -> dict[str, Any]:
    """NAME=JSON as fields of a body."""
    from ..core.options import value_of

    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise OptionError(f"--field {text!r} is not NAME=JSON, so it names no field")
        found[name] = value_of(value)
    return found
