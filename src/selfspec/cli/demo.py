"""`selfspec demo`: one real answer, in turns by transformers, by selfspec plainly and drafting.

A further way to generate is one more entry. `bench` knows how to time fairly.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ..errors import SelfCheckFailed
from . import common, options

if TYPE_CHECKING:
    from ..llm import LLM

PROMPT = "Explain in a few sentences why the sky is blue."
Entries = dict[str, Callable[[], list[int]]]  # ways to generate, each returning the new tokens
NEAR_TIE = 1e-4  # two top logits closer than this may change places by rounding alone


@dataclass(frozen=True)
class Row:
    """What came out of an entry. `speed`: times as fast as the first, the median of paired runs."""

    name: str
    tokens: list[int]
    seconds_per_token: float
    speed: float


@dataclass(frozen=True)
class Difference:
    """The first token unlike the reference's, and how close the model's two best are there."""

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
    """Write an answer by transformers, by selfspec plainly and drafting: compare text and speed.

    All run greedily in float32 on the CPU. The first time the model is fetched (about 100 MB).

    Example:  selfspec demo --prompt "Write a haiku about the sea." --rounds 5
    """
    reference, llm = open_pair(threads)
    ids = llm.encode_chat([common.user(prompt)])
    rows = measure(entries(reference, llm, ids, max_new_tokens), rounds)
    differences = [difference(reference, ids, rows[0].tokens, row.tokens) for row in rows]
    show(llm, prompt, rows, differences, rounds)
    for row, apart in zip(rows, differences, strict=True):
        if apart and not apart.near_tie:
            raise SelfCheckFailed(
                f"{row.name} wrote another token than {rows[0].name} at position {apart.index}, "
                f"where the model's two best logits are {apart.gap:.2g} apart. That is more than "
                f"rounding explains ({NEAR_TIE:g}). Do not trust the output; please report it."
            )


def open_pair(threads: int | None) -> tuple[Any, LLM]:
    """The demo model twice: as transformers runs it, and as we do."""
    from ..model.load.demo import demo_folder

    common.quiet_bars()
    folder = demo_folder(progress=True)
    how = options.ModelOptions(dtype="float32", device="cpu", threads=threads)
    llm = common.open_model("demo", how)
    import torch
    from transformers import AutoModelForCausalLM

    reference: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return reference.eval(), llm


def entries(reference: Any, llm: LLM, ids: list[int], max_new_tokens: int) -> Entries:
    """Who takes part. The first is what the others are compared with."""

    def ours(**how: Any) -> Callable[[], list[int]]:
        return lambda: llm.generate(ids, max_new_tokens=max_new_tokens, **how).tokens

    return {
        "transformers generate": lambda: reference_tokens(reference, ids, max_new_tokens),
        "selfspec, plain": ours(draft=None),
        "selfspec, self-speculative": ours(),
    }


def reference_tokens(model: Any, ids: Sequence[int], max_new_tokens: int) -> list[int]:
    """Greedy tokens of transformers' own generate."""
    import torch

    prompt = torch.tensor([list(ids)])
    how = {"attention_mask": torch.ones_like(prompt), "do_sample": False}
    with torch.inference_mode():
        out = model.generate(prompt, max_new_tokens=max_new_tokens, **how)
    new: list[int] = out[0, len(ids) :].tolist()
    return new


def measure(entered: Entries, rounds: int) -> list[Row]:
    """All of them in turns, a first turn of each not counted."""
    from ..bench.timing import interleave, timed

    written: dict[str, list[int]] = {}

    def turn(name: str) -> Callable[[], None]:
        return lambda: written.update({name: entered[name]()})

    with common.bar("writing answers", transient=True) as progress:
        task = progress.add_task("", total=len(entered) * (rounds + 1), words="")
        turns = {name: timed(turn(name)) for name in entered}
        timings = interleave(turns, rounds, on_turn=lambda _: progress.advance(task))
    first = next(iter(entered))
    return [summary(name, first, written, timings.seconds) for name in entered]


def summary(
    name: str, first: str, written: dict[str, list[int]], seconds: dict[str, list[float | None]]
) -> Row:
    """Medians. Answers of different length are compared by the token."""
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
    """Where the tokens part, and how far apart the reference's logits are there, or None."""
    import torch

    from ..bench.suite import first_difference

    index = first_difference(tokens, expected)
    if index is None:
        return None
    with torch.inference_mode():
        logits = reference(torch.tensor([ids + expected[:index]])).logits[0, -1]
    best, second = torch.topk(logits.float(), 2).values.tolist()
    return Difference(index, best - second)


def show(
    llm: LLM, prompt: str, rows: Sequence[Row], apart: Sequence[Difference | None], rounds: int
) -> None:
    """The answer (or each of them, should they differ) and the table."""
    tokenizer: Any = llm.tokenizer
    console, info = Console(highlight=False), llm.info
    facts = f"{info.dtype}, {info.threads} threads, kernel {info.kernel}"
    console.print(f"[bold]{info.name}[/bold], {facts}\n")
    console.print(f"> {prompt}", style="cyan", markup=False)
    texts = (tokenizer.decode(row.tokens, skip_special_tokens=True) for row in rows)
    for text in dict.fromkeys(texts):
        console.print(f"{text}\n", markup=False)
    console.print(table(rows, apart))
    what = f"{rounds} interleaved rounds of {len(rows[0].tokens)} tokens"
    console.print(f"Medians of {what}, the prompt's share included.", style="dim")


def table(rows: Sequence[Row], differences: Sequence[Difference | None]) -> Table:
    """One line an entry."""
    grid = Table()
    grid.add_column("")
    for heading in ("ms/token", "tokens/s", "speed"):
        grid.add_column(heading, justify="right")
    grid.add_column("tokens")
    for row, apart in zip(rows, differences, strict=True):
        seconds = row.seconds_per_token
        words = "reference" if row is rows[0] else verdict(apart, len(row.tokens))
        numbers = f"{seconds * 1e3:.1f}", f"{1 / seconds:.1f}", f"{row.speed:.2f}x"
        grid.add_row(row.name, *numbers, words)
    return grid


def verdict(apart: Difference | None, count: int) -> str:
    """Whether the tokens are the reference's, in words."""
    if apart is None:
        return f"all {count} equal"
    kind = "a near-tie" if apart.near_tie else "NOT a near-tie"
    return f"differ from token {apart.index} on (gap {apart.gap:.2g}, {kind})"
