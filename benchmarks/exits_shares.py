"""What a decoded token's time is made of: seconds of all layers, and of the head, on one token
behind a prompt. Does not know what is left out of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

import torch

from selfspec.llm import LLM
from selfspec.model.compute.cache import RowSpan

TURNS, WARMUP = 21, 3


@torch.inference_mode()
def shares(llm: LLM, prompt: Sequence[int]) -> dict[str, float]:
    """Medians over turns."""
    model, count = llm.model, len(prompt)
    cache = model.new_cache(1, count + 1)
    model.prefill([list(prompt)], cache)
    last, seconds = torch.tensor(prompt[-1:]), dict[str, list[float]](layers=[], head=[])
    for turn in range(TURNS + WARMUP):
        cache.rollback(0, count)
        begin = time.perf_counter()
        x = model.run(
            model.embed(last), model.full_plan, cache, cache.layout_at([RowSpan(0, count, 1)])
        )
        middle = time.perf_counter()
        model.head(x).argmax(-1).tolist()
        end = time.perf_counter()
        if turn >= WARMUP:
            seconds["layers"].append(middle - begin)
            seconds["head"].append(end - middle)
    return {name: median(some) for name, some in seconds.items()}
