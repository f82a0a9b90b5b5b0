"""`scripts/bench guesses`: what a tree's guesses are worth, and that every verification counts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from suite_world import PROVENANCE

from benchmarks.guesses import GuessesRun, Kept, allowed, markdown, measure
from selfspec import LLM
from selfspec.bench.schema import read, write
from selfspec.draft.registry import make_drafter
from selfspec.testing import tiny_model, tiny_tokenizer


def test_what_a_tree_of_guesses_is_worth() -> None:
    """Chances of siblings that are multiplied, of a child that are not, or of another place."""
    p = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.8, 0.1], [0.4, 0.4, 0.2], [1.0, 0.0, 0.0]])
    contexts = [[7], [7, 0], [7, 1], [7, 0, 1]]  # two after the root, one after the first of them
    mean, variance = allowed(p, contexts)
    assert mean == pytest.approx(0.5 + 0.3 + 0.5 * 0.8)
    lengths = {0: 0.2, 1: 0.3 + 0.1, 2: 0.4}
    square = sum(chance * length**2 for length, chance in lengths.items())
    assert variance == pytest.approx(square - mean**2)
    assert allowed(p[:1], contexts[:1]) == (0.0, 0.0)


@pytest.mark.parametrize("name", ["ngram", "recycle", "hybrid"])
def test_guesses_from_the_text_are_kept_as_often_as_the_model_says_them(
    name: str, tmp_path: Path
) -> None:
    """Verifications that are not counted, or guesses kept more or less often than p allows."""
    model = tiny_model("llama", 4, vocab_size=12, tie_word_embeddings=False)
    llm = LLM.from_pretrained(model, tokenizer=tiny_tokenizer())
    run, kept = GuessesRun(PROVENANCE, "tiny", 0.8, 5, 3, 60), Kept()
    drafter = make_drafter(name, {})
    assert drafter is not None
    for _ in range(6):
        kept = measure(llm, [[5, 7, 5, 7], [8], [9, 3, 4, 9]], drafter, run, kept)
    assert kept.texts == 18 and kept.kept > 60
    # a prompt's pass gives the first token of its text, each verification one and what is kept
    assert kept.verifications + kept.kept == 18 * 59
    assert abs(kept.ratio - 1) < 4 * kept.error
    run.drafters[name] = kept
    write(run, tmp_path / "run.json")
    said = markdown(read(GuessesRun, tmp_path / "run.json"))
    assert f"{kept.ratio:.3f} ± {kept.error:.3f}" in said
