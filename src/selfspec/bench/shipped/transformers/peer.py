"""transformers: greedy `generate`, eager with its ordinary dynamic cache, or compiled over a static
one; and its own drafting.

`lookup` is its prompt lookup, `early-exit` its early exit as an assistant, `assistant` two-model
assistance: with the folder of a second model, or with a model of its own made of the target's first
layers, which drafts the same and shares nothing. All with exactly as many drafts a round as were
asked for.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, StaticCache
from transformers.generation.streamers import BaseStreamer

LONGEST_NGRAM = 3
ROOM = 512  # positions that a static cache is rounded up to


class Peer:
    packages = ("transformers", "torch")
    methods = {  # noqa: RUF012  (read from the source, without importing it)
        "plain": (),
        "compiled": (),
        "lookup": ("tokens",),
        "early-exit": ("layer", "tokens"),
        "assistant": ("model", "layer", "tokens"),
    }
    first: Any  # set by the host

    def load(self, folder: str, dtype: str, threads: int, device: str = "cpu") -> None:
        torch.set_num_threads(threads)
        self.folder, self.dtype, self.device = folder, getattr(torch, dtype), device
        self.model = self.loaded(folder)
        self.assistants: dict[str, Any] = {}
        self.compiled: Any = None
        self.caches: dict[int, StaticCache] = {}

    def loaded(self, folder: str, **changes: int) -> Any:
        """A model without a generation config of its own: what that says (sampling, penalties, end
        tokens) would be filled in for what we leave open."""
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=self.dtype, **changes)
        model.generation_config = GenerationConfig(pad_token_id=0)
        return model.eval().to(self.device)

    def generate(
        self, ids: list[int], max_new_tokens: int, eos: list[int], method: str = "plain",
        tokens: int = 0, layer: int = 0, model: str = "",
    ) -> list[int]:  # fmt: skip
        prompt = torch.tensor([ids], device=self.device)
        settings = greedy(max_new_tokens, eos, **self.drafting(method, tokens, layer))
        extra: dict[str, Any] = {"attention_mask": torch.ones_like(prompt)}
        if method == "assistant":
            extra["assistant_model"] = self.assistant(model, layer, tokens)
        elif method == "compiled":
            extra["past_key_values"] = self.static_cache(len(ids) + max_new_tokens)
        runner = self.compiled_model() if method == "compiled" else self.model
        with torch.inference_mode(method != "compiled"), torch.no_grad():
            said = First(self.first)
            out = runner.generate(prompt, generation_config=settings, streamer=said, **extra)
        return list(out[0, len(ids) :].tolist())

    @torch.inference_mode()
    def read(self, ids: list[int]) -> tuple[float, list[int]]:
        """The summed loss of all ids but the first, and what was likeliest in their places."""
        from selfspec.bench.costs import loss_and_likeliest  # our engine's file: not beside timings

        window = torch.tensor(ids, device=self.device)
        logits = self.model(window[None, :-1]).logits[0]
        return loss_and_likeliest(logits, window[1:])

    def generate_batch(
        self, rows: list[list[int]], max_new_tokens: int, eos: list[int], method: str = "plain"
    ) -> list[list[int]]:
        """Rows padded on the left; what follows a row's end token is padding."""
        if method != "plain":
            raise ValueError(
                f"transformers drafts for one prompt at a time, so {method!r} has no batch"
            )
        longest = max(map(len, rows))
        padding = [[0] * (longest - len(row)) for row in rows]
        ids = [before + row for before, row in zip(padding, rows, strict=True)]
        seen = [before + [1] * len(row) for before, row in zip(padding, rows, strict=True)]
        prompt, mask = (torch.tensor(each, device=self.device) for each in (ids, seen))
        settings = greedy(max_new_tokens, eos)
        with torch.inference_mode():
            out = self.model.generate(prompt, attention_mask=mask, generation_config=settings)
        made = out[:, longest:].tolist()
        ends = [
            next((n for n, token in enumerate(row, 1) if token in eos), len(row)) for row in made
        ]
        return [row[:end] for row, end in zip(made, ends, strict=True)]

    def drafting(self, method: str, tokens: int, layer: int) -> dict[str, Any]:
        if method in ("plain", "compiled", "assistant"):
            return {}
        if method == "lookup":
            return {"prompt_lookup_num_tokens": tokens, "max_matching_ngram_size": LONGEST_NGRAM}
        if method != "early-exit":
            raise ValueError(f"this peer has no method {method!r}")
        # how much is drafted is read from the generation config of the assistant, which is this
        # model itself
        fixed = constant(tokens)
        self.model.generation_config = GenerationConfig(pad_token_id=0, **fixed)
        return {"assistant_early_exit": layer, **fixed}

    def assistant(self, model: str, layer: int, tokens: int) -> Any:
        """The second model: that of a folder, or the target's first layers."""
        name = model or f"first {layer} layers"
        if name not in self.assistants:
            changes = {} if model else {"num_hidden_layers": layer}
            self.assistants[name] = self.loaded(model or self.folder, **changes)
        config = GenerationConfig(pad_token_id=0, **constant(tokens))
        self.assistants[name].generation_config = config
        return self.assistants[name]

    def static_cache(self, length: int) -> StaticCache:
        """An empty cache of a rounded length, kept: every new shape would be compiled anew."""
        room = -(-length // ROOM) * ROOM
        if room not in self.caches:
            self.caches[room] = StaticCache(config=self.model.config, max_cache_len=room)
        self.caches[room].reset()
        return self.caches[room]

    def compiled_model(self) -> Any:
        """A second copy of the model object on the same weights, its forward compiled; the plain
        one stays as it is."""
        if self.compiled is None:
            self.compiled = self.loaded(self.folder)
            self.compiled.load_state_dict(self.model.state_dict(), assign=True)
            self.compiled.forward = torch.compile(self.compiled.forward, dynamic=True)
        return self.compiled


class First(BaseStreamer):
    """Says when the first new tokens are there: the second thing that `generate` puts, after the
    prompt."""

    def __init__(self, say: Any) -> None:
        self.say, self.put_so_far = say, 0

    def put(self, value: torch.Tensor) -> None:
        self.put_so_far += 1
        if self.put_so_far == 2:
            self.say(value.numel())

    def end(self) -> None:
        return


def greedy(max_new_tokens: int, eos: list[int], **drafting: Any) -> GenerationConfig:
    """Greedy decoding that stops at these tokens only."""
    limits = {"max_new_tokens": max_new_tokens, "eos_token_id": eos or None, "pad_token_id": 0}
    return GenerationConfig(do_sample=False, use_cache=True, **limits, **drafting)


def constant(tokens: int) -> dict[str, Any]:
    """Exactly so many drafts a round, however sure the assistant is."""
    return {
        "num_assistant_tokens": tokens,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0,
    }
