"""transformers: greedy `generate` with its ordinary dynamic cache, eager. The other peers' tokens are compared with its.

Also its prompt lookup and its early exit as an assistant, with exactly as many drafts a round as were asked for.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

LONGEST_NGRAM = 3


class Peer:
    packages = ("transformers", "torch")

    def load(self, folder: str, dtype: str, threads: int) -> None:
        torch.set_num_threads(threads)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        # whatever the model's own generation_config says (sampling, penalties, end tokens) would be filled in for what we leave
        # open
        self.model.generation_config = GenerationConfig(pad_token_id=0)

    def generate(
        self, ids: list[int], max_new_tokens: int, eos: list[int], method: str = "plain", tokens: int = 0, layer: int = 0
    ) -> list[int]:
        prompt = torch.tensor([ids])
        settings = GenerationConfig(
            max_new_tokens=max_new_tokens, do_sample=False, use_cache=True, eos_token_id=eos or None, pad_token_id=0,
            **self.drafting(method, tokens, layer),
        )  # fmt: skip
        with torch.inference_mode():
            out = self.model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=settings)
        return out[0, len(ids) :].tolist()

    def drafting(self, method: str, tokens: int, layer: int) -> dict[str, Any]:
        if method == "plain":
            return {}
        if method == "lookup":
            return {"prompt_lookup_num_tokens": tokens, "max_matching_ngram_size": LONGEST_NGRAM}
        if method != "early-exit":
            raise ValueError(f"this peer has no method {method!r}")
        # how much is drafted is read from the generation config of the assistant, which is this model itself
        fixed = {"num_assistant_tokens": tokens, "num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0}
        self.model.generation_config = GenerationConfig(pad_token_id=0, **fixed)
        return {"assistant_early_exit": layer, **fixed}
