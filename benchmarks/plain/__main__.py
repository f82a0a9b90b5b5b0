"""`scripts/bench plain`, or `python -m benchmarks.plain`: what is typed, the progress bar, the
tables, a last line of JSON. Does not measure anything itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.command import Model, Out, Show, grouped, result_path, run_command, tokenizer_of
from benchmarks.plain import gpu_report, report
from benchmarks.plain.gpu import GpuOptions, GpuRun
from benchmarks.plain.results import PlainRun
from benchmarks.plain.run import PlainBenchmark, PlainOptions, new_run, quick, turns
from selfspec.bench.peers import choose, find_peers
from selfspec.bench.schema import OURS, parsed, read
from selfspec.bench.suite_run import folder_of
from selfspec.cli.bench import progress_bar
from selfspec.core.options import numbers
from selfspec.errors import OptionError

PEERS = "transformers,selfspec,ctranslate2,xllamacpp"


@dataclass(frozen=True)
class Settings:
    """What is typed."""

    peers: Annotated[
        str, typer.Option(help="Which peers, separated by commas; 'selfspec' is ours.")
    ] = PEERS
    threads: Annotated[int, typer.Option(help="Threads for every peer.")] = 2
    rounds: Annotated[
        int, typer.Option(help="Measured rounds; every peer has its turns in each.")
    ] = 7
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate.")] = 64
    prompts: Annotated[str, typer.Option(help="Prompt lengths in tokens.")] = "64,512"
    contexts: Annotated[
        str | None, typer.Option(help="Contexts: 64,512,2048; with --device or --shape 128,2048.")
    ] = None
    verify: Annotated[str, typer.Option(help="The n of verify(n)/decode(1).")] = "1-16"
    time_limit: Annotated[
        float, typer.Option(help="Seconds after which a silent peer is ended.")
    ] = 300.0
    device: Annotated[
        str, typer.Option(help="cuda: a model of a known shape with random weights, on a card.")
    ] = "cpu"
    shape: Annotated[
        str | None, typer.Option(help="The shape: llama-2-7b, llama-3-8b or tiny (also on a CPU).")
    ] = None
    batches: Annotated[str, typer.Option(help="With --device or --shape: batch sizes.")] = "1,4,16"
    minutes: Annotated[
        float, typer.Option(help="With --device or --shape: after so long nothing new is begun.")
    ] = 9.0

    @property
    def plain(self) -> PlainOptions:
        return PlainOptions(
            threads=self.threads,
            rounds=self.rounds,
            new_tokens=self.max_new_tokens,
            prompt_tokens=numbers(self.prompts, "--prompts"),
            verify_contexts=numbers(self.contexts or "64,512,2048", "--contexts"),
            verify_tokens=numbers(self.verify, "--verify"),
            time_limit=self.time_limit,
        )

    @property
    def card(self) -> GpuOptions:
        return GpuOptions(
            shape=self.shape or GpuOptions.shape,
            device=self.device,
            batches=numbers(self.batches, "--batches"),
            contexts=numbers(self.contexts or "128,2048", "--contexts"),
            rounds=self.rounds,
            new_tokens=self.max_new_tokens,
            peers="transformers" in self.peers,
            minutes=self.minutes,
        )


def check_context(folder: Path, options: PlainOptions) -> None:
    """Refuse lengths beyond the model's context before minutes are spent."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    context = config.get("max_position_embeddings")
    longest = max(*options.verify_contexts, 0) + max(*options.verify_tokens, 0)
    needed = max(longest, max(options.prompt_tokens) + options.new_tokens)
    if context is not None and needed > context:
        raise OptionError(
            f"The run needs {needed} positions and this model has {context}. Lower --contexts, "
            "--prompts or --max-new-tokens."
        )


def measure(model: str, peers: Sequence[str], options: PlainOptions, out: Path) -> None:
    """Run the benchmark and leave the result in `out`."""
    specs = choose(peers, find_peers())
    options.check()
    folder = folder_of(model)
    check_context(folder, options)
    tokenize = tokenizer_of(folder)
    run = new_run(folder.name if model != "demo" else model, options)
    engine = any(spec.name == OURS for spec in specs)
    with progress_bar(turns(options, len(specs), engine)) as (tick, say):
        benchmark = PlainBenchmark(run, options, folder, out, tick, say)
        try:
            benchmark.peers(specs, tokenize)
            if engine:
                benchmark.engine(tokenize)
        except KeyboardInterrupt:
            said = f"what was measured is in {benchmark.partial.name}: see it with --show."
            typer.echo(f"Interrupted; {said}", err=True)
            raise typer.Exit(130) from None
    benchmark.finish()


def run_on_card(options: GpuOptions, out: Path | None) -> None:
    """The benchmark of a shape, on a card (or a CPU, to try it)."""
    target = gpu_report.measure(options, out, lambda text: typer.echo(text, err=True))
    run = read(GpuRun, target)
    typer.echo(gpu_report.markdown(run))
    typer.echo(json.dumps({**gpu_report.summary(run), "file": target.name}))


def tables_of(path: Path) -> str:
    """The tables of a result, of whichever kind."""
    data = parsed(path, PlainRun.measured_by)
    if isinstance(data, dict) and data.get("kind") == GpuRun.kind:
        return gpu_report.markdown(read(GpuRun, path))
    return report.markdown(read(PlainRun, path))


@grouped
def plain(
    model: Model = "demo",
    *,
    settings: Settings,
    quick_run: Annotated[
        bool, typer.Option("--quick", help="Fewer and shorter: to see that it works, not to quote.")
    ] = False,
    out: Out = None,
    show: Show = None,
) -> None:
    """Plain decoding of selfspec next to its peers, in turns, with a cost card; tables are made
    from the JSON that it writes.

    Example: scripts/bench plain --peers transformers,selfspec --quick
    Example: scripts/bench plain --device cuda
    """
    if show is not None:
        typer.echo(tables_of(show))
        return
    if settings.device != "cpu" or settings.shape is not None:
        run_on_card(settings.card, out)
        return
    options = quick(settings.plain) if quick_run else settings.plain
    target = out or result_path("plain", kind="-quick" if quick_run else "")
    measure(model, [peer.strip() for peer in settings.peers.split(",")], options, target)
    run = read(PlainRun, target)  # the tables are made from the file, as everyone else's will be
    typer.echo(report.markdown(run))
    typer.echo(json.dumps({**report.summary(run), "file": target.name}))


if __name__ == "__main__":
    run_command(plain)
