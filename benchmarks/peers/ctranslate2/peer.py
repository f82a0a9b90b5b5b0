"""CTranslate2: a C++ engine with its own Llama; greedy is beam size 1 with top-k 1."""

from __future__ import annotations

import json
from typing import Any

import ctranslate2
import numpy as np

from benchmarks.convert import converted, loss_of, write_ctranslate2


class Peer:
    packages = ("ctranslate2",)
    first: Any  # set by the host

    def load(self, folder: str, dtype: str, threads: int, weights: str = "auto") -> None:
        if weights not in ("auto", "int8"):
            raise ValueError(f"weights={weights!r}: on a CPU its smallest weights are int8")
        model = converted(folder, "ctranslate2", write_ctranslate2)
        if weights == "int8":
            dtype, self.precision = (
                "int8_float32",
                "int8, a scale an output; activations int8 a row; float32",
            )
        # it takes token strings; the vocabulary maps our ids to them, one to one
        self.words: list[str] = json.loads((model / "vocabulary.json").read_text(encoding="utf-8"))
        self.generator = ctranslate2.Generator(
            str(model), device="cpu", compute_type=dtype, intra_threads=threads, inter_threads=1
        )

    def read(self, ids: list[int]) -> tuple[float, list[int]]:
        """The summed loss of all ids but the first, and what was likeliest in their places."""
        words = [[self.words[token] for token in ids[:-1]]]
        return loss_of(np.asarray(self.generator.forward_batch(words))[0], ids[1:])

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
