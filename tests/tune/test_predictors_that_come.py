"""Exit predictors that lie in a model's own folder: found without being named, timed by the tuner,
and those of another model passed over."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from selfspec import LLM, OptionError
from selfspec.cli import common
from selfspec.cli.app import app
from selfspec.exits.part import find_predictors
from selfspec.profile import Way
from selfspec.testing import near_identity_model, tiny_predictors, tiny_tokenizer
from selfspec.trained.files import DESCRIPTION
from selfspec.tune.neighbours import neighbours
from selfspec.tune.options import Setting, TuneOptions
from selfspec.tune.run import Tuning

PROMPT = list(b"once upon a time, once upon")
CALL: dict[str, Any] = {"max_new_tokens": 24, "eos": []}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder, without predictors."""
    near_identity_model(0.6, seed=2).save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def loaded(folder: Path) -> LLM:
    return LLM.from_pretrained(folder, profile=None)


def ways(llm: LLM, **setting: Any) -> tuple[list[Way], list[str]]:
    """What a tuning would time with predictors, and what it says of that."""
    options = TuneOptions(minutes=0.1, max_new_tokens=16, search="none")
    tuning = Tuning(llm, options, ["hello", "you"], setting=Setting(**setting))
    return tuning._by_predictors(), tuning.found.notes


def test_predictors_in_the_models_folder_need_no_name(folder: Path) -> None:
    """Predictors that lie beside the weights and have to be named all the same; or a text that is
    not the model's."""
    tiny_predictors(loaded(folder).model, candidates=7, seed=3).save(folder / "exits")
    llm = loaded(folder)
    assert find_predictors(None, llm.model).count == 7
    plain = llm.generate(PROMPT, draft=None, **CALL)
    drafted = llm.generate(PROMPT, draft="dynamic-exit", **CALL)
    assert drafted.tokens == plain.tokens and drafted.stats.drafted > 0
    found, notes = ways(llm)
    assert [(way.draft, way.draft_options) for way in found] == [("dynamic-exit", {})]
    assert len(notes) == 1 and "predictors that come with this model" in notes[0]


def test_a_tuning_times_them_and_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A way that is named and never timed, or timed without a word of whose predictors those
    were."""
    tiny_predictors(loaded(folder).model, candidates=7, seed=3).save(folder / "exits")
    llm, out = loaded(folder), folder.parent / "p.json"
    monkeypatch.setattr(common, "open_model", lambda name, how: llm)
    flags = ["--minutes", "0.1", "-n", "16", "--drafters", "exits", "--search", "none"]
    done = CliRunner().invoke(app, ["tune", "x", *flags, "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "timed with the predictors that come with this model" in done.output
    assert re.search(r"dynamic-exit @ cost-aware +\d\.\d\d", done.output), done.output


def test_what_is_no_part_for_this_model_is_passed_over(folder: Path) -> None:
    """Predictors of another model that draft uselessly, or somebody else's file that ends every
    load."""
    other = LLM.from_pretrained(near_identity_model(0.6, seed=7), tokenizer=tiny_tokenizer())
    tiny_predictors(other.model, candidates=7, seed=3).save(folder / "another")
    for name, text in (("broken", "{"), ("foreign", json.dumps({"kind": "exit-predictors"}))):
        (folder / name).mkdir()
        (folder / name / DESCRIPTION).write_text(text, encoding="utf-8")
    llm = loaded(folder)
    assert ways(llm) == ([], [])
    with pytest.raises(OptionError, match="or lies in a folder inside the model's own"):
        llm.generate(PROMPT, draft="dynamic-exit", **CALL)
    assert llm.generate(PROMPT, draft="hybrid", **CALL).tokens


def test_a_named_folder_can_be_found_from_elsewhere(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A profile with a path that holds in one directory only, or that prefers what comes along."""
    llm = loaded(folder)
    tiny_predictors(llm.model, candidates=5, seed=3).save(folder.parent / "mine")
    monkeypatch.chdir(folder.parent)
    (way,), notes = ways(llm, predictors="mine")
    assert way.draft_options == {"part": str(folder.parent.resolve() / "mine")} and not notes


def test_neighbours_of_predictors_can_be_used(folder: Path) -> None:
    """A tuning that climbs to an option that the drafter does not have."""
    tiny_predictors(loaded(folder).model, candidates=7, seed=3).save(folder / "exits")
    llm = loaded(folder)
    plain = llm.generate(PROMPT, draft=None, **CALL).tokens
    near = [*neighbours(Way("dynamic-exit", {}, "cost-aware"))]
    assert sum(bool(way.draft_options) for way in near) >= 4
    for way in near:
        how: dict[str, Any] = {"draft_options": way.draft_options, "control": way.control}
        how["control_options"] = way.control_options
        assert llm.generate(PROMPT, draft=way.draft, **how, **CALL).tokens == plain
