"""Predictors as files: kept whole, for the model that they name, and never a pickle."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from selfspec.errors import BrokenCheckpoint, OptionError
from selfspec.exits.part import Wanted, find_predictors
from selfspec.model.from_transformers import from_transformers
from selfspec.model.layered import LayeredModel
from selfspec.testing import tiny_model, tiny_predictors
from selfspec.trained.files import TrainedPart


@pytest.fixture(scope="module")
def model() -> LayeredModel:
    return from_transformers(tiny_model(seed=4), check=False)


@pytest.fixture
def folder(model: LayeredModel, tmp_path: Path) -> Path:
    tiny_predictors(model).save(tmp_path / "p")
    return tmp_path / "p"


def test_they_are_read_as_they_were_written(model: LayeredModel, folder: Path) -> None:
    """A tensor that is stored under another's name, or settings that are lost."""
    part, found = tiny_predictors(model), find_predictors(folder, model)
    assert (found.layers, found.count, found.source) == ((1, 2, 3), 4, "recycle")
    features = torch.randn(3, 12, generator=torch.Generator().manual_seed(0))
    expected = find_predictors(part, model).score(2, features)
    assert torch.equal(found.score(2, features), expected) and found.svm is not None


def test_those_of_another_model_are_refused(folder: Path) -> None:
    """They would fire anywhere, and nothing would say why drafts are bad."""
    other = from_transformers(tiny_model(seed=5), check=False)
    with pytest.raises(OptionError, match=r"another model.*selfspec fit-exits MODEL"):
        find_predictors(folder, other)
    deep = from_transformers(tiny_model(seed=4, num_hidden_layers=5), check=False)
    with pytest.raises(OptionError, match="its layers was 4, this one's is 5"):
        find_predictors(folder, deep)


@pytest.mark.parametrize("name", ["predictor.pth", "x.pt", "y.PKL", "model.bin"])
def test_a_pickle_is_never_opened(model: LayeredModel, tmp_path: Path, name: str) -> None:
    """The published predictors are pickles: reading one runs whatever it says."""
    marker = tmp_path / "ran"

    class Runs:
        def __reduce__(self) -> Any:
            return (Path.touch, (marker,))

    torch.save(Runs(), tmp_path / name)
    with pytest.raises(OptionError, match=r"pickled file.*safetensors"):
        find_predictors(tmp_path / name, model)
    assert not marker.exists()


def test_another_count_or_other_layers_are_explained(model: LayeredModel, folder: Path) -> None:
    """A shape error from a product, or a layer that is silently never looked at."""
    find_predictors(folder, model, Wanted(4, [1, 3]))
    with pytest.raises(OptionError, match=r"candidates=3.*fitted with 4.*--candidates 3"):
        find_predictors(folder, model, Wanted(3))
    with pytest.raises(OptionError, match=r"no predictor after layer 4.*\[1, 2, 3\]"):
        find_predictors(folder, model, Wanted(layers=[2, 4]))


DAMAGE: dict[str, tuple[dict[str, Any], str]] = {
    "layers that do not ascend": ({"layers": [2, 1, 3]}, "ascending"),
    "a layer beyond the model": ({"layers": [1, 2, 4]}, "outside 1 to 3"),
    "shares for other layers": ({"exits": [0.5]}, "one a layer"),
    "a share above 1": ({"exits": [0.5, 2.0, 0.1]}, "no shares"),
    "no candidates": ({"candidates": 0}, "candidates is 0"),
    "another width": ({"hidden": 9}, "has shape"),
    "another count": ({"candidates": 5}, "has shape"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_description_is_explained(model: LayeredModel, folder: Path, damage: str) -> None:
    """A file of somebody else's may say anything; it is an error before anything is computed."""
    changes, words = DAMAGE[damage]
    said = json.loads((folder / "part.json").read_text())
    said["settings"] |= changes
    (folder / "part.json").write_text(json.dumps(said))
    with pytest.raises(BrokenCheckpoint, match=words):
        find_predictors(folder, model)


def test_half_of_an_svm_is_refused(model: LayeredModel, tmp_path: Path) -> None:
    """A weight without its bias."""
    part: TrainedPart = tiny_predictors(model)
    tensors = {name: each for name, each in part.tensors.items() if name != "svm.bias"}
    replace(part, tensors=tensors).save(tmp_path / "p")
    with pytest.raises(BrokenCheckpoint, match=r"svm\.bias"):
        find_predictors(tmp_path / "p", model)
