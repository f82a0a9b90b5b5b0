"""economize: its early exit (frozen, the model's own norm and head, as LayerSkip's) and its prompt
lookup, eager.

A cycle of N tokens is one exact pass and up to N - 1 drafts.
"""

from __future__ import annotations

from typing import Any

import economize
import torch
from economize.techniques.early_exit import EarlyExitConfig
from economize.techniques.lookup import LookupConfig
from transformers import AutoModelForCausalLM

LONGEST_NGRAM = 3


class Peer:
    packages = ("economize", "transformers", "torch")
    methods = {  # noqa: RUF012  (read from the source, without importing it)
        "plain": (),
        "lookup": ("tokens",),
        "early-exit": ("layer", "tokens"),
    }

    def load(self, folder: str, dtype: str, threads: int) -> None:
        torch.set_num_threads(threads)
        self.base = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        self.models: dict[tuple[str, int], Any] = {}

    def generate(
        self,
        ids: list[int],
        max_new_tokens: int,
        eos: list[int],
        method: str = "plain",
        tokens: int = 0,
        layer: int = 0,
    ) -> list[int]:
        if (method, layer) not in self.models:
            self.models[method, layer] = economize.apply(self.base, *technique(method, layer))
        settings = economize.DecodeConfig(cycle_length=1 if method == "plain" else tokens + 1)
        with torch.inference_mode():
            result = self.models[method, layer].decode(
                torch.tensor(ids), max_new_tokens, decoding=settings, stop=eos or None
            )
        self.counts = {
            "drafted": sum(drafted for drafted, _ in result.acceptance),
            "accepted": sum(accepted for _, accepted in result.acceptance),
        }
        return result.tokens.tolist()


def technique(method: str, layer: int) -> list[Any]:
    if method == "plain":
        return []
    if method == "lookup":
        return [LookupConfig(max_ngram=LONGEST_NGRAM, min_ngram=1, match="latest")]
    if method == "early-exit":
        return [EarlyExitConfig(exit_layer=layer, head="shared", adaptation="frozen")]
    raise ValueError(f"this peer has no method {method!r}")
