"""`scripts/bench plain`, or `python -m selfspec.bench.plain`: what is typed, the progress bar, the
tables, a last line of JSON.

Does not measure anything itself.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from ..core.options import numbers
from ..errors import OptionError, SelfspecError
from . import gpu_report
from .gpu import GpuOptions
from .peers import choose, find_peers
from .plain_run import PlainBenchmark, PlainOptions, Tokenize, new_run, quick, turns
from .provenance import CHECKOUT, cpu_name, slug
from .report import OURS, markdown, report, summary
from .schema import load, read_json

PEERS = "transformers,selfspec,ctranslate2,xllamacpp"


def model_folder(name: str) -> Path:
    """The folder of a model: the demo model's, or the one that was named."""
    if name == "demo":
        from ..model.load.demo import demo_folder

        return demo_folder()
    folder = Path(name).expanduser()
    if not (folder / "config.json").is_file():
        raise OptionError(
            f"{name!r} is neither 'demo' nor a model folder with a config.json. The peers need a "
            f"folder on this machine."
        )
    return folder.resolve()


def tokenizer_of(folder: Path) -> Tokenize:
    """Text to ids with the model's own tokenizer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return lambda text: list(tokenizer(text, add_special_tokens=False).input_ids)


def check_context(folder: Path, options: PlainOptions) -> None:
    """Refuse lengths beyond the model's context before minutes are spent."""
    context = json.loads((folder / "config.json").read_text(encoding="utf-8")).get(
        "max_position_embeddings"
    )
    longest = max(*options.verify_contexts, 0) + max(*options.verify_tokens, 0)
    needed = max(longest, max(options.prompt_tokens) + options.new_tokens)
    if context is not None and needed > context:
        raise OptionError(
            f"The run needs {needed} positions and this model has {context}. Lower --contexts, "
            f"--prompts or --new-tokens."
        )


@contextmanager
def progress_bar(total: int) -> Iterator[tuple[Callable[[str], None], Callable[[str], None]]]:
    """Two functions, one for a turn taken and one for what is going on; the bar goes to stderr and
    vanishes at the end."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    # two redraws a second: the bar's own thread must not take part in the race
    with Progress(*columns, console=console, transient=True, refresh_per_second=2) as bar:
        task = bar.add_task("starting", total=total)
        yield lambda _: bar.advance(task), lambda text: bar.update(task, description=text)


def measure(model: str, peers: Sequence[str], options: PlainOptions, out: Path) -> None:
    """Run the benchmark and leave the result in `out`."""
    specs = choose(peers, find_peers())
    options.check()
    folder = model_folder(model)
    check_context(folder, options)
    tokenize = tokenizer_of(folder)
    run = new_run(
        folder.name if model != "demo" else model,
        shlex.join(["scripts/bench", "plain", *sys.argv[1:]]),
        options,
    )
    engine = any(spec.name == OURS for spec in specs)
    with progress_bar(turns(options, len(specs), engine)) as (tick, say):
        benchmark = PlainBenchmark(run, options, folder, out, tick, say)
        try:
            benchmark.peers(specs, tokenize)
            if engine:
                benchmark.engine(tokenize)
        except KeyboardInterrupt:
            typer.echo(
                f"Interrupted; what was measured is in {benchmark.partial.name}: see it with "
                f"--show.",
                err=True,
            )
            raise typer.Exit(130) from None
    benchmark.finish()


def run_on_card(options: GpuOptions, out: Path | None) -> None:
    """The benchmark of a shape, on a card (or a CPU, to try it)."""
    target = gpu_report.measure(options, out, lambda text: typer.echo(text, err=True))
    result = read_json(target)
    typer.echo(gpu_report.markdown(result))
    typer.echo(json.dumps({**gpu_report.summary(result), "file": target.name}))


def tables_of(path: Path) -> str:
    """The tables of a result, of whichever kind."""
    result = read_json(path)
    return gpu_report.markdown(result) if result.get("kind") == "gpu" else report(path)


def plain(
    model: Annotated[str, typer.Option(help="'demo' or a model folder.")] = "demo",
    peers: Annotated[
        str, typer.Option(help="Which peers, separated by commas; 'selfspec' is ours.")
    ] = PEERS,
    quick_run: Annotated[
        bool, typer.Option("--quick", help="Fewer and shorter: to see that it works, not to quote.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="The JSON to write.")] = None,
    threads: Annotated[int, typer.Option(help="Threads for every peer.")] = 2,
    rounds: Annotated[
        int, typer.Option(help="Measured rounds; every peer has its turns in each.")
    ] = 7,
    new_tokens: Annotated[int, typer.Option(help="Tokens to generate.")] = 64,
    prompts: Annotated[str, typer.Option(help="Prompt lengths in tokens.")] = "64,512",
    contexts: Annotated[
        str | None, typer.Option(help="Contexts: 64,512,2048; with --device or --shape 128,2048.")
    ] = None,
    verify: Annotated[str, typer.Option(help="The n of verify(n)/decode(1).")] = "1-16",
    time_limit: Annotated[
        float, typer.Option(help="Seconds after which a silent peer is ended.")
    ] = 300.0,
    device: Annotated[
        str, typer.Option(help="cuda: a model of a known shape with random weights, on a card.")
    ] = "cpu",
    shape: Annotated[
        str | None, typer.Option(help="The shape: llama-2-7b, llama-3-8b or tiny (also on a CPU).")
    ] = None,
    batches: Annotated[str, typer.Option(help="With --device or --shape: batch sizes.")] = "1,4,16",
    minutes: Annotated[
        float, typer.Option(help="With --device or --shape: after so long nothing new is begun.")
    ] = 9.0,
    show: Annotated[
        Path | None, typer.Option(help="Measure nothing: print the tables of this JSON.")
    ] = None,
) -> None:
    """Plain decoding of selfspec next to its peers, in turns, with a cost card; tables are made
    from the JSON that it writes.

    Example: scripts/bench plain --peers transformers,selfspec --quick
    Example: scripts/bench plain --device cuda
    """
    if show is not None:
        typer.echo(tables_of(show))
        return
    if device != "cpu" or shape is not None:
        run_on_card(
            GpuOptions(
                shape=shape or GpuOptions.shape,
                device=device,
                dtype="bfloat16",
                batches=numbers(batches, "--batches"),
                contexts=numbers(contexts or "128,2048", "--contexts"),
                rounds=rounds,
                new_tokens=new_tokens,
                peers="transformers" in peers,
                minutes=minutes,
            ),
            out,
        )
        return
    options = PlainOptions(
        threads=threads,
        rounds=rounds,
        new_tokens=new_tokens,
        prompt_tokens=numbers(prompts, "--prompts"),
        verify_contexts=numbers(contexts or "64,512,2048", "--contexts"),
        verify_tokens=numbers(verify, "--verify"),
        time_limit=time_limit,
    )
    name = f"plain-{slug(cpu_name())}{'-quick' if quick_run else ''}.json"
    target = out or CHECKOUT / "benchmarks" / "results" / name
    measure(
        model,
        [peer.strip() for peer in peers.split(",")],
        quick(options) if quick_run else options,
        target,
    )
    result = load(target)  # the tables are made from the file, as everyone else's will be
    typer.echo(markdown(result))
    typer.echo(json.dumps({**summary(result), "file": target.name}))


def run_command(command: Callable[..., None]) -> None:
    """Run a function as a command: errors for users are one message on stderr, without a
    traceback."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(command)
    try:
        app()
    except SelfspecError as error:
        typer.echo(f"Error: {error}", err=True)
        raise SystemExit(1) from None


if __name__ == "__main__":
    run_command(plain)
