"""What recurrent layers cost beside their products, and what verifying drafts costs with them.

A few layers at the width of a real model, with random weights, which say nothing about text and
everything about time: the products of a pass alone, a pass over one token behind another such one,
and one over eight of which some are rejected each time, behind another such one, in turns, medians.
So each pays for what its own kind leaves behind. Writes benchmarks/results/recurrent-PROCESSOR.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from statistics import median
from typing import Any

import torch

from selfspec.bench.provenance import gather, results_folder, slug
from selfspec.model.from_transformers import from_transformers
from selfspec.model.layered import LayeredModel
from selfspec.testing import tiny_model

WIDTHS: dict[str, dict[str, Any]] = {
    # of Qwen3.5 0.8B, LFM2 700M and Granite 4.0 H 350M, a few layers each
    "qwen3_5_text": {
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_attention_heads": 8,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
    "lfm2": {
        "hidden_size": 1536,
        "intermediate_size": 6912,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "head_dim": 64,
    },
    "granitemoehybrid": {
        "hidden_size": 768,
        "shared_intermediate_size": 2048,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "mamba_n_heads": 48,
        "mamba_d_head": 32,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
    },
}
CONTEXT, DRAFTED, KEPT = 200, 8, 5


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("families", nargs="*", default=list(WIDTHS))
    parser.add_argument("--seconds", type=float, default=6.0, help="for each family")
    parser.add_argument("--threads", type=int, default=2)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    found = {}
    for family in asked.families:
        model = tiny_model(family, initializer_range=0.02, **WIDTHS[family])
        found[family] = measured(from_transformers(model, owned=True, check=False), asked.seconds)
        print(f"{family}: {json.dumps(found[family])}", flush=True)
    about = asdict(
        gather("python -m benchmarks.recurrent", asked.threads, {"torch": torch.__version__})
    )
    target = results_folder() / f"recurrent-{slug(about['cpu'])}.json"
    target.write_text(json.dumps({**about, "families": found}, indent=1) + "\n")


@torch.inference_mode()
def measured(model: LayeredModel, seconds: float) -> dict[str, float]:
    """Milliseconds, and the two ratios."""
    cache = model.new_cache(1, 4 * CONTEXT)
    model.prefill([list(range(3, 3 + CONTEXT))], cache)
    at = CONTEXT

    def products() -> None:
        for linear in model.linears:
            linear(ones[linear.inputs])

    def go_on(tokens: int, kept: int) -> None:
        nonlocal at
        model.scored([7] * tokens, cache, cache.layout([tokens]), ranks=1)
        at += kept
        cache.rollback(0, at)
        cache.settle(0, at)

    step, verify = partial(go_on, 1, 1), partial(go_on, DRAFTED, KEPT)
    ones = {linear.inputs: torch.ones(1, linear.inputs) for linear in model.linears}
    turns: dict[str, tuple[Callable[[], None], list[float]]] = {
        "products": (products, []),
        "step": (step, []),
        "verify": (verify, []),
    }
    end = time.perf_counter() + seconds
    while time.perf_counter() < end and at < 3 * CONTEXT:
        for run, times in turns.values():
            run()
            begin = time.perf_counter()
            run()
            times.append(time.perf_counter() - begin)
    took = {name: 1000 * median(times[2:]) for name, (_, times) in turns.items()}
    ratios = {
        "step over products": took["step"] / took["products"],
        "verify 8 over step": took["verify"] / took["step"],
    }
    return {name: round(value, 4) for name, value in {**took, **ratios}.items()}


if __name__ == "__main__":
    main()
