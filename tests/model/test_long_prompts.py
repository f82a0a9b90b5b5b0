"""Long prompts, of which each thread takes rows of its own, against the same in short pieces."""

from __future__ import annotations

import pytest
import torch
from variants import build

from selfspec.model.from_transformers import from_transformers

LONG = [(7 * token + 3) % 250 for token in range(390)]  # more than 128 for each of three threads
SHORT = 40  # tokens of a piece: fewer than 32 for each


@pytest.mark.zeros
@pytest.mark.parametrize("many", [2, 3])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize(
    "variant", ["llama-biases", "llama-odd-sizes", "cohere2", "gemma2", "gpt2", "bamba"]
)
def test_rows_of_a_threads_own_change_no_bit(variant, kind, many, threads):
    """Rows that a thread reads at the wrong place, a residual or a rounded row of another's,
    columns that nobody activates."""
    threads(many)
    model = from_transformers(build(variant), weights=kind)
    ours, theirs = model.new_cache(1, 400), model.new_cache(1, 400)
    long = model.prefill([LONG], ours)
    for first in range(0, len(LONG), SHORT):
        short = model.prefill([LONG[: first + SHORT]], theirs)
    assert torch.equal(long, short)
    assert torch.equal(ours.keys, theirs.keys) and torch.equal(ours.values, theirs.values)
