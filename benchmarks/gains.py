"""`scripts/bench gains`: what drafts gain on models with recurrent layers, next to what acceptance
and costs say.

Random models of real widths, whose layers behind the exit change little, so that its drafts are
kept often. Plain decoding, early exit and drafts from the text take turns, and with them the parts
of a round are timed without the engine: a step, the drafting passes, a verification in which as
many tokens are kept. What to expect is the tokens of a round over what drafting and verifying take
in steps.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Annotated, Any

import torch
import typer

from benchmarks.command import Out, Show, Threads, made_by, result_path, run_command
from benchmarks.recurrent import WIDTHS
from selfspec import LLM
from selfspec.bench.html import Table
from selfspec.bench.prompts import TEXT
from selfspec.bench.schema import Result, Seconds, read, write
from selfspec.bench.tables import markdown as as_text
from selfspec.bench.tables import threads as on_threads
from selfspec.cli.bench import progress_bar
from selfspec.model.compute.cache import KVCache, RowSpan
from selfspec.model.compute.plan import LayerPlan
from selfspec.model.families import FAMILIES
from selfspec.model.from_transformers import from_transformers
from selfspec.model.layered import LayeredModel
from selfspec.testing import tiny_model, tiny_tokenizer

LAYERS: Mapping[str, tuple[str, ...]] = {
    "qwen3_5_text": ("linear_attention", "linear_attention", "full_attention", "linear_attention"),
    "lfm2": ("conv", "full_attention", "conv", "conv"),
    "granitemoehybrid": ("mamba", "attention", "mamba", "mamba"),
}
"""Of half the layers; the others are the same."""
EXIT, BEHIND = 2, 0.02  # layers that draft, and by how much less the others change than they did
PROMPT, WARM = 120, 2  # tokens, and turns that do not count
Work = Callable[[], None]


@dataclass
class WayRow:
    """One way to draft: seconds of its rounds, and of their parts without the engine, by turn."""

    way: str
    drafts: int
    """The most of a round."""
    seconds: Seconds = field(default_factory=list)
    """Of decoding, a token."""
    drafting: Seconds = field(default_factory=list)
    verifying: Seconds = field(default_factory=list)
    decoded: int = 0
    drafted: int = 0
    rounds: int = 0

    @property
    def usual(self) -> int:
        """Drafts of a round, as many as there were on average."""
        return round(self.drafted / self.rounds)

    @property
    def tokens(self) -> float:
        """Of a round."""
        return self.decoded / self.rounds

    def gain(self, plain: WayRow) -> float:
        return middle(plain.seconds) / middle(self.seconds)

    def expected(self, plain: WayRow) -> float:
        costs = middle(self.drafting) + middle(self.verifying)
        return self.tokens * middle(plain.verifying) / costs


@dataclass
class GainsRow:
    """One model. The first way is plain decoding."""

    family: str
    parameters: int
    ways: list[WayRow] = field(default_factory=list)
    same: bool = True
    """Whether all texts were those of plain decoding."""


@dataclass
class GainsRun(Result):
    """Everything that was measured."""

    kind = "gains"
    measured_by = "scripts/bench gains"

    new_tokens: int
    models: list[GainsRow] = field(default_factory=list)


def middle(seconds: Seconds) -> float:
    return statistics.median(value for value in seconds if value is not None)


def settled_model(family: str) -> LayeredModel:
    """A random model whose layers behind the exit change little."""
    kinds = LAYERS[family] * 2
    changes = {"num_hidden_layers": len(kinds), "layer_types": list(kinds)}
    model: Any = tiny_model(family, **{"initializer_range": 0.02, **WIDTHS[family], **changes})
    names = FAMILIES[family]
    assert names.recurrent is not None
    last = (names.out, names.down, f"{names.recurrent.module}.{names.recurrent.out}")
    for layer in attrgetter(names.layers)(model)[EXIT:]:
        for name in last:
            module, _, _ = name.partition(".")
            if getattr(layer, module, None) is not None:
                attrgetter(name)(layer).weight.data *= BEHIND
    return from_transformers(model, owned=True, check=False)


class Parts:
    """The parts of a round, each as the engine runs it, on a cache of its own."""

    def __init__(self, model: LayeredModel) -> None:
        self._model, self._at = model, PROMPT
        self._cache: KVCache = model.new_cache(1, 1024)
        model.prefill([[5 + n % 200 for n in range(PROMPT)]], self._cache)

    def timed(self, row: WayRow) -> None:
        """One round's parts. As many tokens are kept as on average."""
        model, cache, at, drafts = self._model, self._cache, self._at, row.usual
        exits = row.way == "early-exit"
        begin = time.perf_counter()
        states = [self._draft(at + place) for place in range(drafts)] if exits else []
        middle_of = time.perf_counter()
        layout = cache.layout_at([RowSpan(0, at, drafts + 1)])
        if exits:
            last = model.embed(torch.tensor([7]))
            part = layout.select([drafts])
            states.append(model.run(last, LayerPlan(0, EXIT), cache, part))
            x = model.run(torch.cat(states), LayerPlan(EXIT, model.layers), cache, layout)
            model.head(x)
        else:
            model.scored([7] * (drafts + 1), cache, layout, ranks=1)
        end = time.perf_counter()
        row.drafting.append(middle_of - begin)
        row.verifying.append(end - middle_of)
        self._at += round(row.tokens)
        cache.rollback(0, self._at)
        cache.settle(0, self._at)
        if self._at > 900:
            self._at = PROMPT
            cache.rollback(0, 0)
            model.prefill([[5 + n % 200 for n in range(PROMPT)]], cache)

    def _draft(self, place: int) -> torch.Tensor:
        model, cache = self._model, self._cache
        x = model.embed(torch.tensor([7]))
        layout = cache.layout_at([RowSpan(0, place, 1)])
        x = model.run(x, LayerPlan(0, EXIT), cache, layout)
        model.head(x).argmax(-1).tolist()
        return x


def measure(family: str, new: int, turns: int, tick: Callable[[], None]) -> GainsRow:
    """One model, all ways in turns."""
    model = settled_model(family)
    llm, parts = LLM(model, tiny_tokenizer(), family), Parts(model)
    row = GainsRow(family, model.parameters)
    row.ways = [
        WayRow("plain", 0),
        WayRow("early-exit", 4),
        WayRow("ngram", 7),
        WayRow("recycle", 7),
    ]
    prompt, expected = llm.encode(TEXT)[:PROMPT], list[int]()
    for turn in range(turns + WARM):
        for way in row.ways:
            found = llm.generate(prompt, max_new_tokens=new, eos=[], **drafting(way))
            expected = expected or found.tokens
            row.same = row.same and found.tokens == expected
            if turn >= WARM:
                stats = found.stats
                way.seconds.append(stats.decode_seconds / stats.decoded)
                way.decoded += stats.decoded
                way.drafted += stats.drafted
                way.rounds += stats.rounds
                with torch.inference_mode():
                    for _ in range(6):
                        parts.timed(way)
            tick()
    return row


def drafting(way: WayRow) -> dict[str, Any]:
    """The options of `generate`."""
    if way.drafts == 0:
        return {"draft": None}
    options = {"layer": EXIT} if way.way == "early-exit" else {}
    fixed = {"control": "fixed", "control_options": {"tokens": way.drafts}}
    return {"draft": way.way, "draft_options": options, **fixed}


def markdown(run: GainsRun) -> str:
    """The table."""
    head = ["model", "drafts", "made", "tokens a round", "gain", "expected", "quotient", "text"]
    lines = []
    for row in run.models:
        plain = row.ways[0]
        for way in row.ways[1:]:
            gain, expected = way.gain(plain), way.expected(plain)
            lines.append(
                [
                    f"{row.family} ({row.parameters / 1e6:.0f} M)",
                    f"{way.way}, {way.drafts}",
                    f"{way.drafted / way.rounds:.2f}",
                    f"{way.tokens:.2f}",
                    f"{gain:.2f}",
                    f"{expected:.2f}",
                    f"{gain / expected:.2f}",
                    "equal" if row.same else "differs",
                ]
            )
    note = f"Float32, {on_threads(run.provenance)}. Medians of turns."
    return as_text([Table(head, lines), note])


def gains(
    families: Annotated[str, typer.Option(help="Which.")] = ",".join(LAYERS),
    turns: Annotated[int, typer.Option(min=1, help="Answers of each way.")] = 6,
    new_tokens: Annotated[int, typer.Option(min=8, help="Tokens of an answer.")] = 96,
    threads: Threads = 2,
    out: Out = None,
    show: Show = None,
) -> None:
    """What drafts gain on recurrent models, next to what acceptance and costs say.

    Example: scripts/bench gains --families lfm2 --turns 2
    """
    if show is not None:
        typer.echo(markdown(read(GainsRun, show)))
        return
    torch.set_num_threads(threads)
    run, target = GainsRun(made_by("gains", threads), new_tokens), out or result_path("gains")
    chosen = families.split(",")
    with progress_bar(len(chosen) * (turns + WARM) * 4) as (tick, say):
        for family in chosen:
            say(family)
            run.models.append(measure(family, new_tokens, turns, lambda: tick("")))
            write(run, target)
    run.complete = True
    write(run, target)
    typer.echo(markdown(run))


if __name__ == "__main__":
    run_command(gains)
