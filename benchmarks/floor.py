"""`scripts/bench floor`: models that run whole, by their own forward, next to transformers'
`generate`.

Random models whose caches differ: one that is cropped, one that is copied, one that goes on by
single tokens, none. Their prompts are English text. `generate`, plain decoding here and `auto` take
turns. Greedy tokens must be those of `generate`. Drawn text repeats little, so it is what `auto`
may lose most on. Its tokens are compared with plain decoding's, since numbers are drawn otherwise
in `generate`. Ratios are of mean times.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

import torch
import typer

from benchmarks.command import Out, Show, Threads, made_by, result_path, run_command
from benchmarks.shrunken import tiny
from selfspec import LLM, SamplingParams
from selfspec.bench.html import Table
from selfspec.bench.prompts import TEXT
from selfspec.bench.schema import Result, Seconds, read, write
from selfspec.bench.suite import first_difference
from selfspec.bench.tables import markdown as as_text
from selfspec.bench.tables import threads as on_threads
from selfspec.bench.timing import Contestant, interleave, timed
from selfspec.cli.bench import progress_bar
from selfspec.errors import OptionError
from selfspec.model.floor import floor_model
from selfspec.testing import tiny_tokenizer

MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "gpt_neox_japanese": (
        "gpt_neox_japanese",
        {
            "hidden_size": 512,
            "num_attention_heads": 8,
            "max_position_embeddings": 1024,
            "initializer_range": 0.05,
        },
    ),
    "mamba2": (
        "mamba2",
        {
            "hidden_size": 512,
            "num_hidden_layers": 6,
            "num_heads": 16,
            "head_dim": 64,
            "state_size": 64,
            "chunk_size": 64,
            "initializer_range": 0.05,
        },
    ),
    "jamba": (
        "jamba",
        {
            "hidden_size": 512,
            "intermediate_size": 2048,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "num_experts": 1,
            "num_experts_per_tok": 1,
            "mamba_d_state": 16,
            "mamba_dt_rank": 32,
            "max_position_embeddings": 1024,
            "initializer_range": 0.05,
        },
    ),
    "gpt_neox_japanese, tiny": ("gpt_neox_japanese", {}),
    "mamba2, tiny": ("mamba2", {}),
    "openai-gpt, tiny": ("openai-gpt", {}),
}
# where in the text they begin, their bytes, and whether what follows is drawn
PROMPTS = ((0, 60, False), (400, 180, False), (900, 60, True), (1300, 180, True))
WAYS = ("generate", "plain", "auto")


@dataclass
class PromptRow:
    """One prompt: seconds of every way, one a round, and where texts differ first."""

    tokens: int
    drawn: bool
    """At temperature 1. Otherwise greedy."""
    seconds: dict[str, Seconds] = field(default_factory=dict)
    differences: dict[str, int] = field(default_factory=dict)
    """The first token that is another one, of each way that has one."""
    drafted: int = 0
    accepted: int = 0


@dataclass
class FloorRow:
    """One model."""

    model: str
    parameters: int
    cache: str
    """How drafts are taken back, in words."""
    prompts: list[PromptRow] = field(default_factory=list)

    def ratio(self, way: str, worst: bool = False) -> float:
        """Mean seconds of a way over those of `generate`: of all prompts, or the worst one."""
        means = [
            {name: statistics.mean(filter(None, each.seconds[name])) for name in WAYS}
            for each in self.prompts
        ]
        if worst:
            return max(each[way] / each["generate"] for each in means)
        return sum(each[way] for each in means) / sum(each["generate"] for each in means)


@dataclass
class FloorRun(Result):
    """Everything that was measured."""

    kind = "floor"
    measured_by = "scripts/bench floor"

    new_tokens: int
    models: list[FloorRow] = field(default_factory=list)


class Writers:
    """The three ways to go on from a prompt, and what each wrote last."""

    def __init__(self, model: Any, llm: LLM, ids: Sequence[int], new: int, row: PromptRow) -> None:
        self._model, self._llm, self._ids, self._new, self._row = model, llm, list(ids), new, row
        self.texts: dict[str, list[int]] = {}

    @property
    def contestants(self) -> dict[str, Contestant]:
        ours = {way: timed(partial(self._ours, way)) for way in WAYS[1:]}
        return {WAYS[0]: timed(self._theirs), **ours}

    def _theirs(self) -> None:
        ids = torch.tensor([self._ids])
        drawn = self._row.drawn
        how = {"do_sample": True, "temperature": 1.0, "top_k": 0} if drawn else {"do_sample": False}
        out = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=self._new,
            eos_token_id=None,
            pad_token_id=0,
            **how,
        )
        self.texts["generate"] = out[0, len(self._ids) :].tolist()

    def _ours(self, way: str) -> None:
        sampling = SamplingParams(temperature=1.0, seed=1) if self._row.drawn else None
        draft = None if way == "plain" else way
        made = self._llm.generate(
            self._ids, max_new_tokens=self._new, eos=[], draft=draft, sampling=sampling
        )
        self.texts[way] = made.tokens
        if draft:
            self._row.drafted, self._row.accepted = made.stats.drafted, made.stats.accepted

    def compare(self) -> None:
        """Note where the texts differ."""
        drawn = self._row.drawn
        expected = self.texts["plain" if drawn else "generate"]
        for way in WAYS[2:] if drawn else WAYS[1:]:
            where = first_difference(self.texts[way], expected)
            if where is not None:
                self._row.differences[way] = where


def measure(name: str, new: int, rounds: int, tick: Any) -> FloorRow:
    """One model, all its prompts."""
    kind, changes = MODELS[name]
    model: Any = tiny(kind, **changes)
    tokenizer = tiny_tokenizer()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it runs whole, which is what is measured
        llm = LLM(floor_model(model, "that is measured"), tokenizer, kind)  # listed by now or not
    row = FloorRow(name, llm.info.parameters, llm.info.alone[0].partition(", and ")[2].strip(")"))
    for begin, length, drawn in PROMPTS:
        ids = tokenizer(TEXT[begin : begin + length]).input_ids
        prompt = PromptRow(len(ids), drawn)
        writers = Writers(model, llm, ids, new, prompt)
        timings = interleave(writers.contestants, rounds, on_turn=tick)
        prompt.seconds = timings.seconds
        writers.compare()
        row.prompts.append(prompt)
    return row


def markdown(run: FloorRun) -> str:
    """The table."""
    head = ["model", "plain", "slowest prompt", "auto", "slowest prompt", "ms a token", "tokens"]
    lines = []
    for row in run.models:
        ratios = [row.ratio(way, worst) for way in WAYS[1:] for worst in (False, True)]
        seconds = [value for each in row.prompts for value in each.seconds["plain"] if value]
        same = not any(each.differences for each in row.prompts)
        each = 1000 * statistics.mean(seconds) / run.new_tokens
        lines.append(
            [
                f"{row.model} ({row.parameters / 1e6:.1f} M)",
                *(f"{ratio:.3f}" for ratio in ratios),
                f"{each:.2f}",
                "equal" if same else "differ",
            ]
        )
    caches = [f"{row.model}: {row.cache}." for row in run.models]
    note = (
        "Mean times over those of `generate`, greedy and drawn text, prompts included; "
        f"{on_threads(run.provenance)}."
    )
    return as_text([Table(head, lines), note, *caches])


def floor(
    models: Annotated[str, typer.Option(help="Which, by comma and their first word.")] = "",
    rounds: Annotated[int, typer.Option(min=1, help="Measured rounds.")] = 5,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 120,
    threads: Threads = 2,
    out: Out = None,
    show: Show = None,
) -> None:
    """Models run whole by their own forward, next to transformers' generate.

    Example: scripts/bench floor --models mamba2 --rounds 2
    """
    if show is not None:
        typer.echo(markdown(read(FloorRun, show)))
        return
    wanted = [each.strip() for each in models.split(",")] if models else []
    chosen = [name for name in MODELS if not wanted or name.split(",")[0] in wanted]
    if not chosen:
        raise OptionError(f"--models {models!r} names none of {', '.join(MODELS)}; choose of these")
    torch.set_num_threads(threads)
    run = FloorRun(made_by("floor", threads), new_tokens)
    target = out or result_path("floor")
    turns = len(chosen) * len(PROMPTS) * len(WAYS) * (rounds + 1)
    with progress_bar(turns) as (tick, say):
        for name in chosen:
            say(name)
            run.models.append(measure(name, new_tokens, rounds, tick))
            write(run, target)
    run.complete = True
    write(run, target)
    typer.echo(markdown(run))


if __name__ == "__main__":
    run_command(floor)
