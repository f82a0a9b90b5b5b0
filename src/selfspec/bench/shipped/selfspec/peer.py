"""selfspec itself: measured through the same door as everyone else.

A method is what `selfspec bench --methods` takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

import torch

from selfspec import LLM, SamplingParams
from selfspec.bench.contestants import own_options
from selfspec.bench.costs import read_window
from selfspec.bench.schema import Counts

WEIGHTS = {
    "int8": "int8, a scale an output; activations int8 in 32s",
    "int4": "4 bits with a minimum in 32s, head int8; activations int8 in 32s",
    "stored": "the file's own blocks; activations int8 in 32s",
}  # what kinds of weights are; behind it the cache's numbers


class Peer:
    packages = ("selfspec", "torch")
    first: Any  # set by the host

    def load(
        self, folder: str, dtype: str, threads: int, device: str = "cpu", weights: str = "auto"
    ) -> None:
        # no profile: what a tuning here found would change what is compared
        self.llm = LLM.from_pretrained(
            folder, dtype=dtype, threads=threads, device=device, weights=weights, profile=None
        )
        self.precision = dtype if weights == "auto" else f"{WEIGHTS.get(weights, weights)}; {dtype}"
        self.step_timer: Any = None

    def generate(
        self, ids: list[int], max_new_tokens: int, eos: list[int], method: str = "plain",
        sampling: dict[str, Any] | None = None,
    ) -> list[int]:  # fmt: skip
        stream = self.llm.stream(ids, **settings(max_new_tokens, eos, method, sampling))
        sizes: list[int] = []
        for piece in stream:
            if not sizes:
                self.first(1)
            sizes.append(1 + piece.accepted + len(piece.rejected))
        self.counts = counts(stream.result.stats, sizes[1:])  # the first piece is the prefill's
        return list(stream.result.tokens)

    def generate_batch(
        self, rows: list[list[int]], max_new_tokens: int, eos: list[int], method: str = "plain",
        sampling: dict[str, Any] | None = None,
    ) -> list[list[int]]:  # fmt: skip
        results = self.llm.generate(rows, **settings(max_new_tokens, eos, method, sampling))
        call = results[0].call
        # another call for one token would read long prompts twice, whose times differ by more than
        # a few tokens take
        self.first(len(rows), call.decode_seconds)
        self.counts = counts(call, [])
        return [list(result.tokens) for result in results]

    @torch.inference_mode()
    def read(self, ids: list[int]) -> tuple[float, list[int]]:
        """The summed loss of all ids but the first, and what was likeliest in their places."""
        return read_window(self.llm.model, ids)

    @torch.inference_mode()
    def gap(self, ids: list[int], wanted: int, written: int) -> tuple[float, float]:
        """How much likelier one token is than another after a text, in logits, and the largest
        logit there."""
        cache = self.llm.model.new_cache(1, len(ids))
        logits = self.llm.model.prefill([ids], cache)[-1].float()
        return float(logits[wanted] - logits[written]), float(logits.abs().max())

    def steps(self, ids: list[int], methods: list[str], most: int) -> list[dict[str, Any]]:
        """Every isolated step once more, each with all its seconds so far; the first call sets them
        up."""
        from selfspec.bench.costs import StepTimer

        if self.step_timer is None:
            told = {text: own_options(text) for text in methods}
            self.step_timer = StepTimer(self.llm.model, ids, told, most)
        self.step_timer.measure()
        return [asdict(point) for point in self.step_timer.points]


def settings(
    max_new_tokens: int, eos: list[int], method: str, sampling: dict[str, Any] | None
) -> dict[str, Any]:
    """Sampling is said outright: left open, it would take up the repetition penalty of the model's
    own generation config."""
    params = SamplingParams(**(sampling or {}))
    said = {"sampling": params, "max_new_tokens": max_new_tokens, "eos": eos}
    return {**said, **own_options(method)}


def counts(stats: Any, sizes: Sequence[int]) -> dict[str, Any]:
    """The fields of the schema's `Counts`; a card also says its largest use of memory."""
    known = [field.name for field in fields(Counts) if field.name != "verified"]
    counts = {name: getattr(stats, name) for name in known}
    counts["verified"] = [sizes.count(size) for size in range(1, max(sizes, default=0) + 1)]
    if torch.cuda.is_available():
        counts["peak_memory_bytes"] = torch.cuda.max_memory_allocated()
    return counts
