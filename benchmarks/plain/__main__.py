"""`scripts/bench plain`, or `python -m benchmarks.plain`: what is typed, the progress bar, the
tables, a last line of JSON. Does not measure anything itself."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.command import Model, Out, Show, grouped, result_path, run_command, tokenizer_of
from benchmarks.models import folder_of
from benchmarks.plain import gpu_report, report
from benchmarks.plain.entries import AUTO, STORED, entries, source_of
from benchmarks.plain.gpu import GpuOptions, GpuRun
from benchmarks.plain.results import PlainRun
from benchmarks.plain.run import Paused, PlainBenchmark, PlainOptions, new_run, quick, turns
from selfspec.bench.peers import find_peers
from selfspec.bench.schema import OURS, continued, parsed, read
from selfspec.bench.sources import read_text
from selfspec.cli.bench import progress_bar
from selfspec.core.options import numbers
from selfspec.errors import OptionError
from selfspec.model.load.demo import demo_gguf
from selfspec.model.load.source import DEMO

PEERS = "transformers,selfspec,ctranslate2,xllamacpp"


@dataclass(frozen=True)
class Settings:
    """What is typed."""

    peers: Annotated[
        str,
        typer.Option(
            help="Which peers, separated by commas; 'selfspec' is ours, the first is what others "
            "are compared with. selfspec:int8 is one with another kind of weights: bfloat16, int8, "
            "int4, or stored, as the model's GGUF file has them."
        ),
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
    text: Annotated[
        Path | None, typer.Option(help="A text whose perplexity all that can read are asked for.")
    ] = None
    read: Annotated[int, typer.Option(min=1, help="How many tokens of it.")] = 2048
    minutes: Annotated[
        float | None,
        typer.Option(
            help="After so long nothing new is begun; the same command goes on. With --device or "
            "--shape 9, which ends it."
        ),
    ] = None

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
            minutes=self.minutes,
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
            minutes=GpuOptions.minutes if self.minutes is None else self.minutes,
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


def file_of(model: str) -> Path | None:
    """The GGUF file that the model is."""
    if model == DEMO:
        return demo_gguf()
    return Path(model) if model.lower().endswith(".gguf") else None


def measure(model: str, settings: Settings, options: PlainOptions, out: Path, fresh: bool) -> None:
    """Run the benchmark, or go on with it, and leave the result in `out`."""
    taking_part = entries([peer.strip() for peer in settings.peers.split(",")], find_peers())
    options.check()
    stored = any(entry.weights == STORED for entry in taking_part)
    folder, file = folder_of(model), file_of(model) if stored else None
    for entry in taking_part:
        source_of(entry, folder, file)
    check_context(folder, options)
    tokenize = tokenizer_of(folder)
    text = tokenize(read_text(settings.text))[: settings.read + 1] if settings.text else []
    own = [entry for entry in taking_part if entry.spec.name == OURS]
    run = new_run(folder.name if model != DEMO else model, options, [e.name for e in taking_part])
    run.text = f"{settings.text.name}, {settings.read} tokens" if settings.text else ""
    curve = any(entry.weights == AUTO for entry in own)
    with progress_bar(turns(options, len(taking_part), len(own), curve)) as (tick, say):
        benchmark = PlainBenchmark(run, options, folder, out, tick, say, file)
        if not fresh:
            benchmark.run = continued(run, benchmark.partial, PlainRun.plan)
        try:
            benchmark.peers(taking_part, tokenize, text)
            for entry in own:
                benchmark.engine(entry, tokenize)
        except (KeyboardInterrupt, Paused) as stopped:
            said = f"what was measured is in {benchmark.partial.name}: see it with --show."
            typer.echo(f"Interrupted; {said} The same command goes on.", err=True)
            raise typer.Exit(0 if isinstance(stopped, Paused) else 130) from None
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
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Do not go on with an interrupted run.")
    ] = False,
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
    measure(model, settings, options, target, fresh)
    run = read(PlainRun, target)  # the tables are made from the file, as everyone else's will be
    typer.echo(report.markdown(run))
    typer.echo(json.dumps({**report.summary(run), "file": target.name}))


if __name__ == "__main__":
    run_command(plain)
