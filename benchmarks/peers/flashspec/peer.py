"""flashspec, uncompiled, as it runs without CUDA: its prompt lookup, and a draft model that is the
first layers of the target.

It has no early exit. The draft model makes the same drafts from the same weights, on a cache of its
own.
"""

from __future__ import annotations

from typing import Any

import torch
from flashspec import BanditConfig, FlashSpecConfig, SamplingConfig, SpeculativeEngine
from flashspec.engine import HuggingFaceDrafter, NgramDrafter, TargetModel
from transformers import AutoModelForCausalLM

LONGEST_NGRAM = 3


class Peer:
    packages = ("flashspec", "transformers", "torch")
    methods = {  # noqa: RUF012  (read from the source, without importing it)
        "lookup": ("tokens",),
        "early-exit": ("layer", "tokens"),
    }

    def load(self, folder: str, dtype: str, threads: int) -> None:
        torch.set_num_threads(threads)
        self.folder, self.dtype = folder, getattr(torch, dtype)
        self.target = TargetModel("target", torch.device("cpu"), self.dtype, model=self.model())
        self.engines: dict[tuple[str, int, int], Any] = {}

    def model(self, **changes: int) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.folder, dtype=self.dtype, **changes).eval()

    def generate(
        self,
        ids: list[int],
        max_new_tokens: int,
        eos: list[int],
        method: str = "plain",
        tokens: int = 0,
        layer: int = 0,
    ) -> list[int]:
        key = method, tokens, layer
        if key not in self.engines:
            self.engines[key] = self.engine(method, tokens, layer)
        with torch.inference_mode():
            result = self.engines[key].generate(
                torch.tensor([ids]), max_new_tokens, eos_token_ids=eos
            )
        self.counts = {
            "drafted": sum(step.proposed for step in result.arm_steps),
            "accepted": sum(step.accepted for step in result.arm_steps),
        }
        return result.output_ids[0, : result.n_tokens_generated].tolist()

    def engine(self, method: str, tokens: int, layer: int) -> Any:
        if method == "lookup":
            drafter: Any = NgramDrafter(max_ngram=LONGEST_NGRAM, min_ngram=1)
        elif method == "early-exit":
            first_layers = self.model(num_hidden_layers=layer)
            drafter = HuggingFaceDrafter(
                "first layers", "cpu", self.dtype, temperature=0.0, model=first_layers
            )
        else:
            raise ValueError(f"this peer has no method {method!r}: it only decodes with a drafter")
        config = FlashSpecConfig(
            device="cpu", drafter_strategy="bandit", bandit=BanditConfig(n_arms=1), compile=False,
            sampling=SamplingConfig(temperature=0.0, gamma=tokens, variant="greedy"),
        )  # fmt: skip
        return SpeculativeEngine(config, [drafter], self.target)
