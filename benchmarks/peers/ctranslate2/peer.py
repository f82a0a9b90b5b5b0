"""CTranslate2: a C++ engine with its own Llama; greedy is beam size 1 with top-k 1."""

from __future__ import annotations

import json
from typing import Any

import ctranslate2

from benchmarks.convert import converted, write_ctranslate2


class Peer:
    packages = ("ctranslate2",)
    first: Any  # set by the host

    def load(self, folder: str, dtype: str, threads: int) -> None:
        model = converted(folder, "ctranslate2", write_ctranslate2)
        # it takes token strings; the vocabulary maps our ids to them, one to one
        self.words: list[str] = json.loads((model / "vocabulary.json").read_text(encoding="utf-8"))
        self.generator = ctranslate2.Generator(
            str(model), device="cpu", compute_type=dtype, intra_threads=threads, inter_threads=1
        )

    def generate(self, ids: list[int], max_new_tokens: int, eos: list[int]) -> list[int]:
        return self.run(
            [ids], max_new_tokens, eos, lambda step: self.first(1) if step.step == 0 else None
        )[0]

    def generate_batch(
        self, rows: list[list[int]], max_new_tokens: int, eos: list[int]
    ) -> list[list[int]]:
        return self.run(rows, max_new_tokens, eos, None)

    def run(
        self, rows: list[list[int]], max_new_tokens: int, eos: list[int], callback: Any
    ) -> list[list[int]]:
        done = self.generator.generate_batch(
            [[self.words[token] for token in ids] for ids in rows],
            max_length=max_new_tokens, beam_size=1, sampling_topk=1, include_prompt_in_result=False,
            # an empty list: nothing ends it; leaving it out would mean the model's own
            end_token=eos, return_end_token=True,
            callback=callback,
        )  # fmt: skip
        return [each.sequences_ids[0] for each in done]
