"""States that are computed when a batch is asked for: those that are kept, without a folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from own_text import calm_model, random_answers
from transformers import AutoModelForCausalLM

from selfspec.model.families import family_of
from selfspec.model.from_transformers import from_transformers
from selfspec.model.shaping import shape_of
from selfspec.train import part_run
from selfspec.train.draft_head import HeadRecipe
from selfspec.train.live_states import LiveStates
from selfspec.train.part_run import train_small_part
from selfspec.train.parts import PartOptions
from selfspec.train.states import StateOptions, States, gather, read_conversations
from selfspec.trained.files import load_part, signature

OPTIONS = StateOptions((1, 3), held_out=0.2)


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return calm_model(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="module")
def text(model: Path) -> Path:
    """What the model wrote, answers of several lengths."""
    lines = random_answers(model, 24, 20)
    for index, line in enumerate(lines):
        del line["response_ids"][4 + index % 16 :]
    path = model / "own.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines), encoding="utf-8")
    return path


def live(model: Path, text: Path) -> LiveStates:
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    family = family_of(network.config)
    assert family is not None
    shape = shape_of(network.config, family)
    rows = read_conversations([text], OPTIONS, shape.vocabulary)
    return LiveStates(network, family, shape, rows, OPTIONS)


def test_a_batch_is_what_would_be_kept(model: Path, text: Path, tmp_path: Path) -> None:
    """States of another layer, a row that sees its neighbour or its padding, a distribution at the
    wrong token, an answer that is held out here and trained there."""
    layered = from_transformers(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32))
    assert gather(layered, signature(layered), [text], tmp_path, OPTIONS)
    kept, now = States(tmp_path), live(model, text)
    assert (now.trained, now.held_out, now.names) == (kept.trained, kept.held_out, kept.names)
    assert now.tokens == kept.tokens
    numbers = [*now.trained[:5], now.held_out[0]]
    assert len({now.lengths()[number] for number in numbers}) > 2
    expected, found = kept.batch(numbers), now.batch(numbers)
    assert torch.equal(found["tokens"], expected["tokens"])
    for row, number in enumerate(numbers):
        inside = slice(now.lengths()[number])
        torch.testing.assert_close(
            found["states"][row, inside], expected["states"][row, inside], atol=4e-3, rtol=4e-3
        )
    torch.testing.assert_close(found["chances"], expected["chances"], atol=2e-3, rtol=2e-2)
    clear = (expected["chances"][..., 0] - expected["chances"][..., 1] > 0.01)[..., None]
    assert clear.any() and torch.equal(
        found["ids"][..., :1][clear], expected["ids"][..., :1][clear]
    )


def test_frequencies_count_what_is_answered_and_trained(model: Path, text: Path) -> None:
    """Prompts, held-out answers, or a token that nothing drafts, among what a part can say."""
    now = live(model, text)
    rows = [json.loads(line) for line in text.read_text(encoding="utf-8").splitlines()]
    counts = torch.zeros(now.batch([0])["ids"].max() + 300, dtype=torch.float64)
    for number in now.trained:
        for token in rows[number]["response_ids"][1:]:
            counts[token] += 1
    assert torch.equal(now.frequencies(len(counts)), counts)


def test_a_head_is_trained_on_them(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that keeps states although none were asked for, or one that cannot use them."""
    asked: list[int] = []
    batch = LiveStates.batch

    def counted(self: LiveStates, numbers: Sequence[int]) -> dict[str, torch.Tensor]:
        asked.append(len(numbers))
        return batch(self, numbers)

    monkeypatch.setattr(LiveStates, "batch", counted)
    monkeypatch.setattr(part_run, "computes_live", lambda device: True)
    options = PartOptions(epochs=2, batch_tokens=200, save_every=4, measured=4, others=16)
    recipe = HeadRecipe(layers=(1, 3), vocabulary=120)
    report = train_small_part(
        str(model), [text], tmp_path, recipe=recipe, options=options, held_out=0.2, plot=False
    )
    assert report.done and report.step > 4 and len(asked) > report.step
    assert not (tmp_path / "states").exists() and load_part(tmp_path).kind == "draft-head"
