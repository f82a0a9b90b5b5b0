"""`scripts/bench agreement`: what two distributions allow, and that every draft is counted."""

from __future__ import annotations

import pytest
import torch

from benchmarks.agreement import by_inversion, measure, overlap, report
from selfspec import LLM
from selfspec.draft.from_layers.early_exit import EarlyExit
from selfspec.testing import tiny_model


def test_what_inversion_in_token_order_gives() -> None:
    """Intervals that are compared by their lengths: distributions that are alike but shifted would
    seem to agree."""
    p, q = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.0, 0.5, 0.5])
    assert by_inversion(p, p) == pytest.approx(1)
    assert by_inversion(p, q) == pytest.approx(0)
    assert overlap(p, q) == pytest.approx(0.5)


@pytest.mark.parametrize("sample", [False, True])
def test_what_is_kept_is_what_the_distributions_allow(sample: bool) -> None:
    """Pairs of distributions that are not of the same place, or drafts without one."""
    llm = LLM.from_pretrained(tiny_model("llama", 4, vocab_size=40, tie_word_embeddings=False))
    drafter = EarlyExit(layer=2, sample=sample)
    found = measure(llm, [[5, 7], [8], [9, 3, 4]], drafter, 1.5, 100, error=0.03)
    assert found["error"] < 0.03 < (0.25 / 170) ** 0.5, "one turn of three texts is not enough"
    assert found["texts"] > 3 and found["drafts"] > 200
    allowed = found["overlap" if sample else "coupling"]
    assert abs(found["acceptance"] - allowed) < 4 * found["error"]
    assert found["least"] <= found["coupling"] <= found["overlap"]
    row = {"drafter": "early-exit", "temperature": 1.5, "drawn": found, "outright": found}
    assert f"{found['acceptance']:.3f} ± {found['error']:.3f}" in report([row])[-1]
