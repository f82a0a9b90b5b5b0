"""transformers: greedy `generate` with its ordinary dynamic cache, eager. The other peers' tokens are compared with its."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, GenerationConfig


class Peer:
    packages = ("transformers", "torch")

    def load(self, folder: str, dtype: str, threads: int) -> None:
        torch.set_num_threads(threads)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        # whatever the model's own generation_config says (sampling, penalties, end tokens) would be filled in for what we leave
        # open
        self.model.generation_config = GenerationConfig(pad_token_id=0)

    def generate(self, ids: list[int], max_new_tokens: int, eos: list[int]) -> list[int]:
        prompt = torch.tensor([ids])
        settings = GenerationConfig(
            max_new_tokens=max_new_tokens, do_sample=False, use_cache=True, eos_token_id=eos or None, pad_token_id=0
        )
        with torch.inference_mode():
            out = self.model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=settings)
        return out[0, len(ids) :].tolist()
