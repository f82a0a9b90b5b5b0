"""`selfspec demo`: one real answer, written by transformers' `generate`, by selfspec plainly and
drafting for itself, in turns.

A further way to generate is one more `Entry`. Does not know how anybody generates; `bench` knows
how to time fairly.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from ..errors import SelfCheckFailed
from . import common, options

if TYPE_CHECKING:
    from ..llm import LLM

PROMPT = "Explain in a few sentences why the sky is blue."
NEAR_TIE = 1e-4  # two top logits closer than this may change places by rounding alone


@dataclass(frozen=True)
class Entry:
    """One way to generate: its name in the table, and a call that returns the new tokens."""

    name: str
    run: Callable[[], list[int]]


@dataclass(frozen=True)
class Row:
    """What came out of an entry. `speed` is how many times as fast as the first entry, as the
    median over paired runs."""

    name: str
    tokens: list[int]
    seconds_per_token: float
    speed: float


@dataclass(frozen=True)
class Difference:
    """The first token that is not the reference's, and how close the model's two best tokens are
    there."""

    index: int
    gap: float

    @property
    def near_tie(self) -> bool:
        return self.gap <= NEAR_TIE


def demo(
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="What to ask the model.")] = PROMPT,
    max_new_tokens: options.MaxNewTokens = 64,
    rounds: Annotated[
        int, typer.Option("--rounds", min=1, help="How often each engine writes the answer.")
    ] = 3,
    threads: options.Threads = None,
) -> None:
    """Write one answer by transformers, by selfspec plainly and self-speculatively, in turns;
    compare text and speed.

    Both run in float32 on the CPU with the same threads, greedy. The first time the model is
    fetched (about 100 MB).

    Example:  selfspec demo --prompt "Write a haiku about the sea." --rounds 5
    """
    reference, llm = open_pair(threads)
    ids = llm.encode_chat([common.user(prompt)])
    rows = measure(entries(reference, llm, ids, max_new_tokens), rounds)
    differences = [difference(reference, ids, rows[0].tokens, row.tokens) for row in rows]
    show(llm, prompt, rows, differences, rounds)
    broken = [
        (row, each)
        for row, each in zip(rows, differences, strict=True)
        if each and not each.near_tie
    ]
    if broken:
        row, each = broken[0]
        raise SelfCheckFailed(
            f"{row.name} wrote another token than {rows[0].name} at position {each.index}, where "
            f"the model's two best logits are {each.gap:.2g} apart: more than rounding explains, a "
            f"near-tie is {NEAR_TIE:g}. Do not trust the output; please report it."
        )


def open_pair(threads: int | None) -> tuple[Any, LLM]:
    """The demo model twice: as transformers runs it, and as we do."""
    from ..model.load.demo import demo_folder

    common.quiet_bars()
    folder = demo_folder(progress=True)
    llm = common.open_model(
        "demo", options.ModelOptions(dtype="float32", device="cpu", threads=threads)
    )
    import torch
    from transformers import AutoModelForCausalLM

    reference: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return reference.eval(), llm


def entries(reference: Any, llm: LLM, ids: list[int], max_new_tokens: int) -> list[Entry]:
    """Who takes part; the first is what the others are compared with."""
    return [
        Entry("transformers generate", lambda: reference_tokens(reference, ids, max_new_tokens)),
        Entry(
            "selfspec, plain",
            lambda: llm.generate(ids, max_new_tokens=max_new_tokens, draft=None).tokens,
        ),
        Entry(
            "selfspec, self-speculative",
            lambda: llm.generate(ids, max_new_tokens=max_new_tokens).tokens,
        ),
    ]


def reference_tokens(model: Any, ids: Sequence[int], max_new_tokens: int) -> list[int]:
    """Greedy tokens of transformers' own generate."""
    import torch

    prompt = torch.tensor([list(ids)])
    with torch.inference_mode():
        out = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=max_new_tokens,
            do_sample=False,
        )
    new: list[int] = out[0, len(ids) :].tolist()
    return new


def measure(entered: Sequence[Entry], rounds: int) -> list[Row]:
    """All of them in turns, a first turn of each not counted."""
    from ..bench.timing import interleave, timed

    written: dict[str, list[int]] = {}

    def turn(entry: Entry) -> Callable[[], None]:
        return lambda: written.update({entry.name: entry.run()})

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed} of {task.total} answers"),
    )
    with Progress(*columns, console=common.stderr(), transient=True) as progress:
        task = progress.add_task("writing", total=len(entered) * (rounds + 1))
        timings = interleave(
            {entry.name: timed(turn(entry)) for entry in entered},
            rounds,
            on_turn=lambda _: progress.advance(task),
        )
    return [summary(entry.name, entered[0].name, written, timings.seconds) for entry in entered]


def summary(
    name: str, first: str, written: dict[str, list[int]], seconds: dict[str, list[float | None]]
) -> Row:
    """Medians, a token; answers of different length are compared by the token."""
    from ..bench.timing import paired

    pairs = paired(seconds[first], seconds[name])
    own, base = max(1, len(written[name])), max(1, len(written[first]))
    return Row(
        name=name,
        tokens=written[name],
        seconds_per_token=statistics.median(mine for _, mine in pairs) / own,
        speed=statistics.median((theirs / base) / (mine / own) for theirs, mine in pairs),
    )


def difference(
    reference: Any, ids: list[int], expected: list[int], tokens: list[int]
) -> Difference | None:
    """None when the tokens are equal; else where they part, judged by the reference model's own
    logits."""
    import torch

    if expected == tokens:
        return None
    shortest = min(len(expected), len(tokens))
    index = next((i for i in range(shortest) if expected[i] != tokens[i]), shortest)
    with torch.inference_mode():
        logits = reference(torch.tensor([ids + expected[:index]])).logits[0, -1]
    best, second = torch.topk(logits.float(), 2).values.tolist()
    return Difference(index, best - second)


def show(
    llm: LLM,
    prompt: str,
    rows: Sequence[Row],
    differences: Sequence[Difference | None],
    rounds: int,
) -> None:
    """The answer (or each of them, should they differ) and the table."""
    tokenizer: Any = llm.tokenizer
    console = Console(highlight=False)
    console.print(
        f"[bold]{llm.info.name}[/bold], {llm.info.dtype}, {llm.info.threads} threads, kernel "
        f"{llm.info.kernel}\n"
    )
    console.print(f"> {prompt}", style="cyan", markup=False)
    for text in dict.fromkeys(
        tokenizer.decode(row.tokens, skip_special_tokens=True) for row in rows
    ):
        console.print(f"{text}\n", markup=False)
    console.print(table(rows, differences))
    console.print(
        f"Medians of {rounds} interleaved rounds of {len(rows[0].tokens)} tokens, the prompt's "
        "share included.",
        style="dim",
    )


def table(rows: Sequence[Row], differences: Sequence[Difference | None]) -> Table:
    """One line an entry."""
    grid = Table()
    grid.add_column("")
    for heading in ("ms/token", "tokens/s", "speed"):
        grid.add_column(heading, justify="right")
    grid.add_column("tokens")
    for number, (row, each) in enumerate(zip(rows, differences, strict=True)):
        grid.add_row(
            row.name,
            f"{row.seconds_per_token * 1e3:.1f}",
            f"{1 / row.seconds_per_token:.1f}",
            f"{row.speed:.2f}x",
            "reference" if number == 0 else verdict(each, len(row.tokens)),
        )
    return grid


def verdict(each: Difference | None, count: int) -> str:
    """Whether the tokens are the reference's, in words."""
    if each is None:
        return f"all {count} equal"
    kind = "a near-tie" if each.near_tie else "NOT a near-tie"
    return f"differ from token {each.index} on (gap {each.gap:.2g}, {kind})"
