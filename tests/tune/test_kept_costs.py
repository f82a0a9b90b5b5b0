"""Costs that were measured here before: believed only where whole passes of now agree."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from selfspec.core.machine import Machine
from selfspec.model.from_transformers import from_transformers
from selfspec.model.layered import LayeredModel
from selfspec.testing import tiny_model
from selfspec.tune import kept_costs, steps
from selfspec.tune.kept_costs import costs_of
from selfspec.tune.steps import Steps


@pytest.fixture(scope="module")
def model() -> LayeredModel:
    return from_transformers(tiny_model(max_position_embeddings=512), check=False)


@pytest.fixture(scope="module")
def parts(model: LayeredModel) -> Steps:
    return steps.measure(model, 0.1)


@pytest.fixture
def measured(
    model: LayeredModel, parts: Steps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[LayeredModel]]:
    """An empty cache, and of what the costs were really measured. Whole passes always agree."""
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path))
    seen: list[LayeredModel] = []

    def measure(model: LayeredModel, *_: Any) -> Steps:
        seen.append(model)
        return replace(parts, spread=1.0, errors=[0.02])

    monkeypatch.setattr(kept_costs, "measure_quietly", measure)
    monkeypatch.setattr(kept_costs, "compared", lambda _, known, __: replace(known, errors=[0.01]))
    yield seen


def test_costs_are_measured_once(model: LayeredModel, measured: list[LayeredModel]) -> None:
    """Half a minute that is spent again at every call, or numbers that a file changes."""
    first, before = costs_of(model, "float32", 1.0)
    assert not before and len(measured) == 1
    again, before = costs_of(model, "float32", 1.0)
    assert before and len(measured) == 1
    assert again == replace(first, errors=[0.01])


def test_costs_are_those_of_the_weights_and_the_machine(
    model: LayeredModel, measured: list[LayeredModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another kind of weights, other sizes or another machine, in the same home folder."""
    costs_of(model, "float32", 1.0)
    costs_of(model, "int8", 1.0)
    other = from_transformers(
        tiny_model(max_position_embeddings=512, num_hidden_layers=2), check=False
    )
    costs_of(other, "float32", 1.0)
    monkeypatch.setattr(kept_costs, "this_machine", lambda: Machine("another", 2, 2))
    costs_of(model, "float32", 1.0)
    assert len(measured) == 4
    assert costs_of(model, "float32", 1.0)[1]


@pytest.mark.parametrize("errors", [[0.2, -0.2, 0.01], [0.0, 0.0, 0.3], [-0.06, -0.06, 0.06], []])
def test_costs_that_passes_contradict_are_measured_anew(
    model: LayeredModel,
    measured: list[LayeredModel],
    errors: list[float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A machine that has other work now, or a model too short for any whole pass to be compared."""
    costs_of(model, "float32", 1.0)
    monkeypatch.setattr(
        kept_costs, "compared", lambda _, known, __: replace(known, errors=list(errors))
    )
    assert not costs_of(model, "float32", 1.0)[1] and len(measured) == 2


def test_a_busy_machine_s_costs_are_not_kept(
    model: LayeredModel,
    measured: list[LayeredModel],
    parts: Steps,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Spoiled numbers that later calls would compare with and measure anew each time; passes that
    take something else than their parts say."""
    for spread, errors in ((9.0, [0.01]), (1.0, [0.01, 0.01, 0.4])):
        found = replace(parts, spread=spread, errors=errors)
        monkeypatch.setattr(kept_costs, "measure_quietly", lambda *_, found=found: found)
        assert costs_of(model, "float32", 1.0) == (found, False)
        assert not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize("content", ["", "{", "[]", '{"schema": 2}', "\x00"])
def test_a_spoiled_file_is_written_again(
    model: LayeredModel, measured: list[LayeredModel], content: str, tmp_path: Path
) -> None:
    """A crash in the middle of a tuning, long after the file was spoiled."""
    costs_of(model, "float32", 1.0)
    (file,) = tmp_path.rglob("*.json")
    whole = json.loads(file.read_text())
    file.write_text(content)
    assert not costs_of(model, "float32", 1.0)[1]
    assert json.loads(file.read_text()) == whole


def test_whole_passes_of_now_are_compared(model: LayeredModel, parts: Steps) -> None:
    """Errors of the day when the costs were measured, or of costs that are off by half."""
    now = steps.compared(model, replace(parts, errors=[9.0]), 0.1)
    assert len(now.errors) == len(steps.checks(model)) and 9.0 not in now.errors
    half = replace(parts, fixed=parts.fixed + 1.0)
    assert min(steps.compared(model, half, 0.05).errors) > 1.0, "a second more than it takes"
    short = from_transformers(tiny_model(max_position_embeddings=96), check=False)
    assert steps.compared(short, replace(parts, errors=[9.0]), 0.1).errors == []
