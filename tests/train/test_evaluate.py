"""Scores of exits against transformers' own hidden states."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from selfspec import OptionError
from selfspec.model.from_transformers import from_transformers
from selfspec.testing import tiny_model
from selfspec.train.data import Blocks
from selfspec.train.evaluate import ExitScore, evaluate_exits


def text(rows: int = 3, length: int = 150) -> Blocks:
    """Longer than the positions scored at a time."""
    ids = torch.randint(
        3, 250, (rows, length), generator=torch.Generator().manual_seed(4), dtype=torch.int32
    )
    trained = torch.ones(rows, length, dtype=torch.bool)
    trained[0, :40] = False
    return Blocks(ids, trained)


def test_scores_equal_the_reference() -> None:
    """States of the neighbouring layer, masked positions that count, agreement with the text
    instead of with the whole model."""
    model, blocks = tiny_model(seed=4, initializer_range=0.05), text()
    found = {score.layers: score for score in evaluate_exits(from_transformers(model), blocks)}
    assert sorted(found) == [1, 2, 3, 4]
    losses, agreed, count = dict.fromkeys(found, 0.0), dict.fromkeys(found, 0), 0
    for row in range(len(blocks)):
        ids, kept = blocks.ids[row].long(), blocks.trained[row, 1:]
        out = model.model(input_ids=ids[None, :-1], use_cache=False, output_hidden_states=True)
        count += int(kept.sum())
        final = model.lm_head(out.last_hidden_state[0])[kept]
        for layer in found:
            states = (
                out.last_hidden_state if layer == 4 else model.model.norm(out.hidden_states[layer])
            )
            logits = model.lm_head(states[0])[kept]
            losses[layer] += float(functional.cross_entropy(logits, ids[1:][kept], reduction="sum"))
            agreed[layer] += int((logits.argmax(-1) == final.argmax(-1)).sum())
    for layer, score in found.items():
        assert score.loss == pytest.approx(losses[layer] / count, rel=1e-4)
        assert score.agreement == pytest.approx(agreed[layer] / count, abs=0.005)
    assert found[4].agreement == 1.0 and 0.05 < found[3].agreement < 0.95


def test_only_what_was_asked_for() -> None:
    """Blocks beyond the limit that are read anyway, or exits without the whole model that agreement
    refers to."""
    model = from_transformers(tiny_model(seed=4))
    assert [score.layers for score in evaluate_exits(model, text(), exits=[2])] == [2, 4]
    assert evaluate_exits(model, text(), most=1) == evaluate_exits(
        model, Blocks(text().ids[:1], text().trained[:1])
    )
    for wrong in (0, 5):
        with pytest.raises(
            OptionError, match=f"exit layer {wrong} is not inside this model of 4 layers"
        ):
            evaluate_exits(model, text(), exits=[wrong])
    with pytest.raises(OptionError, match="no position"):
        evaluate_exits(model, Blocks(text().ids, torch.zeros_like(text().trained)))


def test_perplexity_is_of_the_mean_loss() -> None:
    """A hopeless exit's perplexity must not overflow, nor be infinite, which JSON cannot hold."""
    assert ExitScore(1, math.log(8), 0.5).perplexity == pytest.approx(8.0)
    assert math.isfinite(ExitScore(1, 5000.0, 0.0).as_dict()["perplexity"])
