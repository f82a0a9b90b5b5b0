"""selfspec itself: measured through the same door as everyone else.

A method is what `selfspec bench --methods` takes. With `tokens` it is one of those that other
libraries have too, at exactly so many drafts a round, and lookups are chains as theirs are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from selfspec import LLM, SamplingParams
from selfspec.bench.contestants import own_options

LONGEST_NGRAM = 3


class Peer:
    packages = ("selfspec", "torch")
    first: Any  # set by the host

    def load(self, folder: str, dtype: str, threads: int, device: str = "cpu") -> None:
        self.llm = LLM.from_pretrained(folder, dtype=dtype, threads=threads, device=device)
        self.step_timer: Any = None

    def generate(
        self, ids: list[int], max_new_tokens: int, eos: list[int], method: str = "plain", tokens: int = 0, layer: int = 0,
        sampling: dict[str, Any] | None = None,
    ) -> list[int]:  # fmt: skip
        # sampling is said outright: left open, it would take up the repetition penalty of the
        # model's own generation config
        options = drafting(method, tokens, layer) if tokens else own_options(method)
        params = SamplingParams(**(sampling or {}))
        stream = self.llm.stream(
            ids, sampling=params, max_new_tokens=max_new_tokens, eos=eos, **options
        )
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
        params = SamplingParams(**(sampling or {}))
        results = self.llm.generate(
            rows, sampling=params, max_new_tokens=max_new_tokens, eos=eos, **own_options(method)
        )
        self.counts = counts(results[0].call, [])
        return [list(result.tokens) for result in results]

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
        from dataclasses import asdict

        from selfspec.bench.step_costs import StepTimer

        if self.step_timer is None:
            self.step_timer = StepTimer(
                self.llm.model, ids, {text: own_options(text) for text in methods}, most
            )
        self.step_timer.measure()
        return [asdict(point) for point in self.step_timer.points]


def counts(stats: Any, sizes: Sequence[int]) -> dict[str, Any]:
    """The fields of the schema's `Counts`."""
    return {
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "verifications": stats.verifications,
        "draft_seconds": stats.draft_seconds,
        "verify_seconds": stats.verify_seconds,
        "host_seconds": stats.host_seconds,
        "drafted_at": stats.drafted_at,
        "accepted_at": stats.accepted_at,
        "verified": [sizes.count(size) for size in range(1, max(sizes, default=0) + 1)],
        **(
            {"peak_memory_bytes": torch.cuda.max_memory_allocated()}
            if torch.cuda.is_available()
            else {}
        ),
    }


def drafting(method: str, tokens: int, layer: int) -> dict[str, Any]:
    fixed = {"control": "fixed", "control_options": {"tokens": tokens}}
    if method == "plain":
        return {"draft": None}
    if method == "auto":
        return {"draft": "auto"}
    if method == "lookup":
        return {
            "draft": "ngram",
            "draft_options": {"longest": LONGEST_NGRAM, "branches": 1},
            **fixed,
        }
    if method == "early-exit":
        return {"draft": "early-exit", "draft_options": {"layer": layer}, **fixed}
    raise ValueError(f"this peer has no method {method!r}")
