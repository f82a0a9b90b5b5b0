"""Training an exit adapter: it sees in use what it saw in training, and drafts in a row are counted
as they are verified."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from own_text import calm_model, shown_command, with_text

from selfspec import LLM
from selfspec.draft.from_layers.early_exit import EarlyExit
from selfspec.errors import OptionError
from selfspec.model.families import family_of
from selfspec.model.shaping import shape_of
from selfspec.testing import tiny_model
from selfspec.train.exit_adapter import AdapterRecipe, in_a_row
from selfspec.train.part_run import train_small_part
from selfspec.train.parts import PartOptions
from selfspec.train.states import States
from selfspec.trained.files import load_part


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_text(calm_model(tmp_path_factory.mktemp("model")))


def test_it_learns_and_drafts_what_it_measured(model: Path, tmp_path: Path) -> None:
    """Training that moves nothing; a part that drafts otherwise than it was measured: other
    positions, another norm, an entry of its cache that is not the kept text's."""
    report = train_small_part(
        str(model),
        [model / "own.jsonl"],
        tmp_path,
        recipe=AdapterRecipe(exit=2, blocks=2, vocabulary=259, start="random"),
        options=PartOptions(
            epochs=30, batch_tokens=400, learning_rate=3e-3, save_every=10, measured=8
        ),
        held_out=0.2,
        plot=False,
    )
    assert report.kind == "exit-adapter" and len(report.acceptance) == 4
    assert report.log[-1]["loss"] < 0.9 * report.log[0]["loss"]
    llm, kept, tried, right = LLM.from_pretrained(model), States(tmp_path / "states"), 0, 0
    for number in kept.held_out[:8]:
        tokens, begin = kept.batch([number])["tokens"][0].tolist(), kept.where[number][3]
        # a draft after every token of the answer, as it was measured
        for end in range(begin + 1, len(tokens)):
            call: dict[str, Any] = {
                "control": "fixed",
                "control_options": {"tokens": 1},
                "draft": EarlyExit(part=tmp_path),
            }
            found = llm.generate(tokens[: end - 1], max_new_tokens=3, eos=[], **call)
            tried, right = tried + 1, right + found.stats.accepted_at[0]
    assert right / tried == pytest.approx(report.acceptance[0], abs=0.03)


def test_drafts_in_a_row_are_counted_as_they_are_verified() -> None:
    """Depth k conditional on the k - 1 before it, within the answer only: against a count written
    out."""
    generator = torch.Generator().manual_seed(0)
    hits, answered = (torch.rand(5, 20, generator=generator) < share for share in (0.6, 1.1))
    answered[:, :3] = False
    answered[2, 11:] = False
    hits &= answered
    tried, right = [0] * 4, [0] * 4
    for row in range(5):
        for root in range(20):
            for depth in range(4):
                if root + depth >= 20 or not answered[row, root] or not answered[row, root + depth]:
                    break
                tried[depth] += 1
                if not hits[row, root + depth]:
                    break
                right[depth] += 1
    found = in_a_row(hits, answered)
    assert found[0].tolist() == tried and found[1].tolist() == right


def test_states_of_the_exit_are_asked_for() -> None:
    """An exit after E layers reads what layer E - 1 left, not layer E."""
    config = tiny_model().config
    shape = shape_of(config, family_of(config))  # type: ignore[arg-type]
    assert AdapterRecipe(exit=3).state_layers(shape) == (2,) and AdapterRecipe().state_layers(
        shape
    ) == (0,)
    for wrong in ({"exit": 4}, {"exit": 0}, {"blocks": 0}, {"start": "middle"}):
        with pytest.raises(OptionError, match="this model has 4 layers"):
            AdapterRecipe(**wrong).state_layers(shape)  # type: ignore[arg-type]


def test_a_part_has_its_kind(model: Path, tmp_path: Path) -> None:
    """An adapter stored as a head would be refused by its own drafter."""
    train_small_part(
        str(model),
        [model / "own.jsonl"],
        tmp_path,
        recipe=AdapterRecipe(exit=1),
        options=PartOptions(epochs=0.1, batch_tokens=400, measured=2),
        held_out=0.2,
        plot=False,
    )
    assert load_part(tmp_path).kind == "exit-adapter"
    assert f"--draft early-exit --draft-option part={tmp_path.name}" in shown_command(tmp_path)
