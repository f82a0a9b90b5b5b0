"""`scripts/bench agreement`: what two distributions allow, and that every draft is counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.agreement import begun, by_inversion, error, measure, overlap, report
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
    found = None
    for _ in range(4):
        found = measure(llm, [[5, 7], [8], [9, 3, 4]], drafter, 1.5, 60, found)
    assert found["texts"] == 12 and found["drafts"] > 350
    kept, allowed = found["accepted"], found["overlap" if sample else "coupling"]
    assert abs(kept - allowed) < 4 * error(found) * found["drafts"]
    assert found["least"] <= found["coupling"] <= found["overlap"]
    row = {"drafter": "early-exit", "temperature": 1.5, "drawn": found, "outright": found}
    assert f"{kept / found['drafts']:.3f} ± {error(found):.3f}" in report([row])[-1]


def test_an_interrupted_run_goes_on(tmp_path: Path) -> None:
    """A run that begins anew after every commit, or goes on with the counts of another command."""
    file, rows = tmp_path / "run.json", [{"drafter": "layer-skip"}]
    made = {"command": "one", "commit": "a"}
    file.write_text(json.dumps({"provenance": made, "complete": False, "rows": rows}))
    assert begun(file, made) == begun(file, {**made, "commit": "b"}) == rows
    assert begun(file, {**made, "command": "two"}) == begun(tmp_path / "none", made) == []
    file.write_text(json.dumps({"provenance": made, "complete": True, "rows": rows}))
    assert begun(file, made) == []
