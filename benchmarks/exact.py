"""`scripts/bench exact`: are a token's logits the same bits however they are computed? Counts
positions, on a real model.

Every text is read whole (the prefill), token by token, in blocks of random sizes, and all texts
together as a ragged batch. A position's logits become a 64-bit fingerprint of all their bits.
Fingerprints are compared, times are not taken. In half precision and on a GPU bits differ, and
`ties.py` looks for near-ties instead.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import torch
import typer
from rich.progress import track
from torch import Tensor

from benchmarks.command import (
    Model,
    Out,
    device_name,
    made_by,
    result_path,
    run_command,
    tokenizer_of,
)
from benchmarks.models import folder_of
from benchmarks.ties import find_ties, sentence
from selfspec.bench.prompts import prompt_ids
from selfspec.bench.schema import write_json
from selfspec.llm import LLM
from selfspec.model.layered import LayeredModel


def fingerprint(logits: Tensor) -> Tensor:
    """(tokens, vocab) float32 -> (tokens,) int64 that changes with any bit of a row."""
    bits = logits.contiguous().view(torch.int32).long()
    chance = torch.Generator().manual_seed(0)
    weights = torch.randint(1, 2**62, (bits.shape[1],), generator=chance) | 1
    return (bits * weights).sum(-1)  # wraps around, which is what a fingerprint may do


def read(model: LayeredModel, text: Tensor, sizes: Iterator[int]) -> Tensor:
    """Fingerprints of a text's positions, read in pieces of these sizes."""
    cache, found, first = model.new_cache(1, len(text)), [], 0
    while first < len(text):
        piece = text[first : first + next(sizes)]
        found.append(fingerprint(model.forward(piece, cache, cache.layout([len(piece)]))))
        first += len(piece)
    return torch.cat(found)


def read_together(model: LayeredModel, texts: list[Tensor], sizes: Iterator[int]) -> list[Tensor]:
    """The same for all texts as one batch, each row advancing by its own random steps."""
    cache = model.new_cache(len(texts), max(len(text) for text in texts))
    found: list[list[Tensor]] = [[] for _ in texts]
    while any(cache.length(row) < len(text) for row, text in enumerate(texts)):
        counts = [min(next(sizes), len(text) - cache.length(row)) for row, text in enumerate(texts)]
        tokens = torch.cat(
            [
                text[cache.length(row) :][:count]
                for row, (text, count) in enumerate(zip(texts, counts, strict=True))
            ]
        )
        prints = fingerprint(model.forward(tokens, cache, cache.layout(counts)))
        for row, part in enumerate(prints.split(counts)):
            found[row].append(part)
    return [torch.cat(parts) for parts in found]


def compare(
    model: LayeredModel, texts: list[Tensor], progress: Callable[[list[Tensor], str], object]
) -> dict[str, int]:
    """For each way of reading, how many positions differ from the prefill."""
    chance = random.Random(0)
    ways: dict[str, Callable[[], int]] = {
        "single steps": lambda: 1,
        "blocks of 1 to 16": lambda: chance.randint(1, 16),
    }
    whole = [read(model, text, iter([len(text)])) for text in texts]
    differ = {}
    for name, size in ways.items():
        pairs = zip(progress(texts, name), whole, strict=True)  # type: ignore[call-overload]
        differ[name] = sum(
            int((read(model, text, iter(size, 0)) != reference).sum()) for text, reference in pairs
        )
    together = read_together(model, texts, iter(lambda: chance.randint(0, 12), -1))
    differ["ragged batch"] = sum(int((a != b).sum()) for a, b in zip(together, whole, strict=True))
    return differ


def pieces(ids: Sequence[int], rows: int, length: int) -> list[Sequence[int]]:
    """One after the other, each a little shorter, and none below half of the length."""
    shorter = min(13, length // (2 * rows))
    return [ids[row * length : (row + 1) * length - shorter * row] for row in range(rows)]


def exact(
    model: Model = "demo",
    rows: Annotated[int, typer.Option(help="How many texts.")] = 5,
    length: Annotated[
        int, typer.Option(help="Tokens of the longest text; the others are a little shorter.")
    ] = 2100,
    dtype: Annotated[
        str, typer.Option(help="float32; bfloat16 and float16 look for near-ties instead.")
    ] = "float32",
    device: Annotated[str, typer.Option(help="cpu; cuda looks for near-ties instead.")] = "cpu",
    max_new_tokens: Annotated[
        int, typer.Option(help="Near-ties: tokens that continue each text.")
    ] = 64,
    draft: Annotated[
        str, typer.Option(help="Near-ties: which drafters, separated by commas.")
    ] = "hybrid,early-exit",
    out: Out = None,
) -> None:
    """Compare the bits of logits between prefill, single steps, blocks and a ragged batch. In half
    precision or on a GPU, where bits differ: whether drafts change a text at near-ties only.

    Example: scripts/bench exact --rows 2 --length 200
    Example: scripts/bench exact --dtype bfloat16 --rows 8 --length 60
    """
    folder = folder_of(model)
    llm = LLM.from_pretrained(folder, dtype=dtype, device=device)
    ids = prompt_ids(tokenizer_of(folder), rows * length)
    texts = [torch.tensor(piece) for piece in pieces(ids, rows, length)]
    machine = device_name(llm.model.device)
    if dtype == "float32" and device == "cpu":
        found, lines, failed = _bits(llm, texts)
        target = out or result_path("exact", machine)
    else:
        found, lines, failed = _ties(llm, texts, max_new_tokens, draft.split(","))
        target = out or result_path("ties", machine, f"-{llm.info.dtype}")
    facts = {"model": model, "kernel": llm.info.kernel, "dtype": llm.info.dtype, "device": machine}
    provenance = vars(made_by("exact", llm.info.threads))
    write_json({**facts, **found, "provenance": provenance}, target)
    typer.echo("\n".join(lines))
    counts = {name: value for name, value in found.items() if isinstance(value, int)}
    typer.echo(json.dumps({**counts, "file": target.name}))
    if failed:
        raise typer.Exit(1)


def _bits(llm: LLM, texts: list[Tensor]) -> tuple[dict[str, Any], list[str], bool]:
    """What goes into the result, what is said of it, and whether it breaks a promise."""
    differ = compare(
        llm.model, texts, lambda items, name: track(items, description=name, transient=True)
    )
    positions = sum(map(len, texts))
    lines = [
        f"{name}: {count} of {positions} positions differ from the prefill"
        for name, count in differ.items()
    ]
    found = {
        "kind": "exact",
        "positions": positions,
        "differing": sum(differ.values()),
        "differing_positions": differ,
    }
    return found, lines, False


def _ties(
    llm: LLM, texts: list[Tensor], new_tokens: int, drafters: list[str]
) -> tuple[dict[str, Any], list[str], bool]:
    """The same of near-ties."""
    ways = {
        name: {"draft": name, "control": "fixed", "control_options": {"tokens": 4}}
        for name in drafters
        if name != "auto"
    }
    if "auto" in drafters:
        ways["auto"] = {"draft": "auto"}
    reports = find_ties(llm, [text.tolist() for text in texts], new_tokens, ways)
    partings, wrong = (
        sum(len(getattr(each, name)) for each in reports) for name in ("partings", "wrong")
    )
    found = {
        "kind": "ties",
        "texts": sum(each.texts for each in reports),
        "partings": partings,
        "wrong": wrong,
    }
    return (
        {**found, "ways": [each.as_dict() for each in reports]},
        [sentence(each) for each in reports],
        wrong > 0,
    )


if __name__ == "__main__":
    run_command(exact)
