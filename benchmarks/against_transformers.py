"""`scripts/bench against_transformers MODEL`: does a model of your own say here what it says in
transformers, and how fast?

For each length of prompt: logits of all its tokens next to transformers' own, then greedy text by
transformers, by us plainly and with drafts, in turns. A first difference of the texts is a near-tie
if the two best logits there are within 1e-4; any other one fails, where a token's bits do not
depend on its company. Models of any source that loads; prompts of English only.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.command import Out, made_by, run_command
from selfspec.bench.prompts import prompt_ids
from selfspec.bench.schema import write_json
from selfspec.bench.suite import first_difference
from selfspec.bench.timing import interleave, timed
from selfspec.core.options import numbers
from selfspec.errors import OptionError, SelfCheckFailed
from selfspec.llm import LLM
from selfspec.model.from_transformers import from_transformers
from selfspec.model.layered import LayeredModel
from selfspec.model.load.loading import load

NEAR_TIE = 1e-4
DRAFTS = (None, "ngram", "auto")


def compare_logits(model: Any, layered: LayeredModel, ids: list[int]) -> dict[str, float]:
    """How far our logits of a text are from transformers', and on how many of its tokens both
    choose the same next one."""
    with torch.inference_mode():
        theirs = (
            model(input_ids=torch.tensor([ids], device=layered.device), use_cache=False)
            .logits[0]
            .float()
        )
    cache = layered.new_cache(1, len(ids))
    ours = layered.forward(
        torch.tensor(ids, device=layered.device), cache, cache.layout([len(ids)])
    ).float()
    same = (ours.argmax(-1) == theirs.argmax(-1)).float().mean().item()
    return {
        "gap": (ours - theirs).abs().max().item(),
        "largest": theirs.abs().max().item(),
        "same_argmax": same,
    }


def compare_texts(
    model: Any, llm: LLM, ids: list[int], count: int, rounds: int
) -> dict[str, dict[str, Any]]:
    """Greedy text of each way to write it: the first token that is not transformers', and the
    seconds of its turns."""
    texts: dict[str, list[int]] = {}

    def reference() -> None:
        given = torch.tensor([ids], device=llm.model.device)
        options = {
            "attention_mask": torch.ones_like(given),
            "max_new_tokens": count,
            "do_sample": False,
            "eos_token_id": None,
        }
        texts["transformers"] = model.generate(given, pad_token_id=0, **options)[
            0, len(ids) :
        ].tolist()

    def ours(draft: str | None) -> None:
        texts[_name(draft)] = llm.generate(ids, max_new_tokens=count, eos=[], draft=draft).tokens

    ways = {
        "transformers": timed(reference),
        **{_name(draft): timed(partial(ours, draft)) for draft in DRAFTS},
    }
    timings = interleave(ways, rounds)
    return {
        name: {
            "seconds": timings.of(name),
            "tokens_per_second": count / statistics.median(timings.of(name)),
            **_difference(model, ids, texts["transformers"], texts[name]),
        }
        for name in ways
    }


def _name(draft: str | None) -> str:
    return "selfspec" if draft is None else f"selfspec, {draft}"


def _difference(model: Any, ids: list[int], expected: list[int], text: list[int]) -> dict[str, Any]:
    """Where a text leaves transformers', and how far apart transformers' two best logits are
    there."""
    first = first_difference(text, expected)
    if first is None:
        return {"first_difference": None}
    with torch.inference_mode():
        logits = model(
            input_ids=torch.tensor([ids + expected[:first]], device=model.device), use_cache=False
        ).logits[0, -1]
    best = logits.float().topk(2).values
    return {"first_difference": first, "gap_there": (best[0] - best[1]).item()}


def lines(
    length: int, logits: Mapping[str, float], texts: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """A length's results as a person reads them."""
    found = [
        f"prompt of {length} tokens: logits within {logits['gap']:.2g} (largest "
        f"{logits['largest']:.3g}), "
        f"{logits['same_argmax']:.1%} of argmaxes equal"
    ]
    for name, row in texts.items():
        first = row["first_difference"]
        text = (
            "the same text"
            if first is None
            else f"differs at {first}, best logits {row['gap_there']:.2g} apart"
        )
        found.append(
            f"  {name:18} {row['tokens_per_second']:6.1f} tokens/s with the prompt   {text}"
        )
    return found


def against_transformers(
    model: Annotated[
        str,
        typer.Argument(
            help="A folder, a GGUF file, a hub name, an adapter: whatever loads.", metavar="MODEL"
        ),
    ],
    lengths: Annotated[str, typer.Option(help="Prompt lengths in tokens.")] = "60,640",
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Write this many new tokens.")] = 40,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each.")] = 3,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of both.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    out: Out = None,
) -> None:
    """Compare a model's logits, greedy text and speed here with transformers'.

    Example: scripts/bench against_transformers ~/models/my-model --lengths 100
    """
    if threads is not None:
        torch.set_num_threads(threads)
    start = time.perf_counter()
    loaded = load(model, dtype=dtype)
    if loaded.tokenizer is None:
        raise OptionError(
            f"{model} has no tokenizer, so no prompt can be made of English. Put its "
            "tokenizer.json "
            "beside it."
        )
    tokenizer: Any = loaded.tokenizer
    llm = LLM(from_transformers(loaded.model), tokenizer, Path(model).name)
    seconds = time.perf_counter() - start
    rows: list[dict[str, Any]] = []
    for length in numbers(lengths, "--lengths"):
        ids = prompt_ids(lambda text: tokenizer(text, add_special_tokens=False).input_ids, length)
        logits = compare_logits(loaded.model, llm.model, ids)
        texts = compare_texts(loaded.model, llm, ids, max_new_tokens, rounds)
        typer.echo("\n".join(lines(length, logits, texts)))
        sizes = {"prompt_tokens": length, "new_tokens": max_new_tokens}
        rows.append({**sizes, "logits": logits, "texts": texts})
    if out is not None:  # the committed files are of a time when this was `same`
        facts = {"kind": "same", "model": vars(llm.info), "load_seconds": seconds, "rows": rows}
        provenance = made_by("against_transformers", llm.info.threads)
        write_json({**facts, "provenance": vars(provenance)}, out)
    gaps = [text.get("gap_there", 0) for row in rows for text in row["texts"].values()]
    wrong = sum(gap > NEAR_TIE for gap in gaps)
    stable = llm.info.row_stable
    said = {"load_seconds": round(seconds, 1), "row_stable": stable, "wrong_texts": wrong}
    typer.echo(json.dumps(said))
    if wrong and stable:
        raise SelfCheckFailed(
            f"{wrong} texts differ from transformers' where the best logits are more than "
            f"{NEAR_TIE:g} apart."
        )


if __name__ == "__main__":
    run_command(against_transformers)
