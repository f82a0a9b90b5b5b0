"""Trained parts as files: what a kind has to hold; a model can be let go with its parts."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from selfspec.draft.from_models.draft_head import DraftHead
from selfspec.draft.registry import drafter_class
from selfspec.errors import BrokenCheckpoint
from selfspec.model.layered import LayeredModel
from selfspec.testing import tiny_adapter, tiny_head, tiny_llm, tiny_lora
from selfspec.trained.files import DESCRIPTION, TENSORS, TrainedPart, load_part
from selfspec.trained.kinds import KINDS

MAKERS: dict[str, Callable[[LayeredModel], TrainedPart]] = {
    "draft-head": tiny_head,
    "exit-adapter": tiny_adapter,
    "draft-lora": tiny_lora,
}


NONSENSE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "negative": lambda ids: torch.cat([-1 - ids[:1], ids[1:]]),
    "beyond": lambda ids: torch.cat([ids[:-1], ids[-1:] + 10**6]),
    "fractional": lambda ids: ids + 0.5,
    "twice": lambda ids: torch.cat([ids[:1], ids[:1], ids[2:]]),
    "nan": lambda numbers: torch.full_like(numbers, float("nan")),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_drafter_of_a_kind_takes_a_part(kind: str) -> None:
    """A card that tells people to use a drafter that is not there, or that takes no part."""
    assert "part" in drafter_class(KINDS[kind].drafter).__dataclass_fields__


@pytest.mark.parametrize("kind", MAKERS)
def test_an_incomplete_part_is_refused_when_it_is_read(kind: str, tmp_path: Path) -> None:
    """A KeyError in the midst of a request, without a word about the folder."""
    MAKERS[kind](tiny_llm().model).save(tmp_path)
    assert load_part(tmp_path).kind == kind
    tensors = load_file(tmp_path / TENSORS)
    described: dict[str, Any] = json.loads((tmp_path / DESCRIPTION).read_text())
    for name in KINDS[kind].tensors:
        save_file({key: each for key, each in tensors.items() if key != name}, tmp_path / TENSORS)
        with pytest.raises(BrokenCheckpoint, match=f"is no {kind}: .* lacks .*{name!r}"):
            load_part(tmp_path)
    save_file(tensors, tmp_path / TENSORS)
    for name in described["settings"]:
        settings = {key: each for key, each in described["settings"].items() if key != name}
        (tmp_path / DESCRIPTION).write_text(json.dumps({**described, "settings": settings}))
        with pytest.raises(BrokenCheckpoint, match=f"is no {kind}: .* lacks .*{name!r}"):
            load_part(tmp_path)
    for name in ("base", "facts"):
        rest = {key: each for key, each in described.items() if key != name}
        (tmp_path / DESCRIPTION).write_text(json.dumps(rest))
        with pytest.raises(BrokenCheckpoint, match=f"is no {kind}: .* lacks .*{name!r}"):
            load_part(tmp_path)


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("nonsense", NONSENSE)
def test_nonsense_in_a_part_is_refused_when_it_is_read(
    kind: str, nonsense: str, tmp_path: Path
) -> None:
    """Tokens that cannot be, that are named twice, and numbers that are none: all were taken, and
    drafted rubbish, or failed in the midst of a request."""
    MAKERS[kind](tiny_llm().model).save(tmp_path)
    tensors = load_file(tmp_path / TENSORS)
    numbers = next(name for name, each in tensors.items() if each.is_floating_point())
    name = numbers if nonsense == "nan" else "vocabulary"
    tensors[name] = NONSENSE[nonsense](tensors[name])
    save_file(tensors, tmp_path / TENSORS)
    expected = {"fractional": "not whole numbers", "twice": "twice", "nan": "not finite"}
    with pytest.raises(BrokenCheckpoint, match=expected.get(nonsense, "outside 0 to")):
        load_part(tmp_path)


def test_a_model_can_be_let_go_with_its_parts(tmp_path: Path) -> None:
    """A part that was made ready holds the model it was made ready for. Kept outside that model,
    it would keep the model, and its weights, for good."""
    llm = tiny_llm()
    tiny_head(llm.model).save(tmp_path)
    assert llm.generate([5, 6, 7], max_new_tokens=8, draft=DraftHead(str(tmp_path))).tokens
    model = weakref.ref(llm.model)
    del llm
    gc.collect()
    assert model() is None
