"""selfspec itself: measured through the same door as everyone else. Lookups are chains here, as the other peers' are."""

from __future__ import annotations

from typing import Any

from selfspec import LLM, SamplingParams

LONGEST_NGRAM = 3


class Peer:
    packages = ("torch",)

    def load(self, folder: str, dtype: str, threads: int) -> None:
        self.llm = LLM.from_pretrained(folder, dtype=dtype, threads=threads)

    def generate(
        self, ids: list[int], max_new_tokens: int, eos: list[int], method: str = "plain", tokens: int = 0, layer: int = 0
    ) -> list[int]:
        # sampling is said outright: left open, it would take up the repetition penalty of the model's own generation config
        result = self.llm.generate(
            ids, sampling=SamplingParams(), max_new_tokens=max_new_tokens, eos=eos, **drafting(method, tokens, layer)
        )
        self.counts = {"drafted": result.stats.drafted, "accepted": result.stats.accepted}
        return list(result.tokens)


def drafting(method: str, tokens: int, layer: int) -> dict[str, Any]:
    fixed = {"control": "fixed", "control_options": {"tokens": tokens}}
    if method == "plain":
        return {"draft": None}
    if method == "auto":
        return {"draft": "auto"}
    if method == "lookup":
        return {"draft": "ngram", "draft_options": {"longest": LONGEST_NGRAM, "branches": 1}, **fixed}
    if method == "early-exit":
        return {"draft": "early-exit", "draft_options": {"layer": layer}, **fixed}
    raise ValueError(f"this peer has no method {method!r}")
