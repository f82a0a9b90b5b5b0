"""selfspec itself, plain decoding: measured through the same door as everyone else."""

from __future__ import annotations

from selfspec import LLM, SamplingParams


class Peer:
    packages = ("torch",)

    def load(self, folder: str, dtype: str, threads: int) -> None:
        self.llm = LLM.from_pretrained(folder, dtype=dtype, threads=threads)

    def generate(self, ids: list[int], max_new_tokens: int, eos: list[int]) -> list[int]:
        # sampling is said outright: left open, it would take up the repetition penalty of the model's own generation config
        result = self.llm.generate(ids, sampling=SamplingParams(), max_new_tokens=max_new_tokens, draft=None, eos=eos)
        return list(result.tokens)
