"""A profile goes to a file and back, is found for its model here, and is refused for another."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from selfspec.core.machine import this_machine
from selfspec.draft.auto import Auto
from selfspec.draft.registry import make_drafter
from selfspec.errors import OptionError
from selfspec.llm import LLM
from selfspec.profile import SCHEMA, Profile, Way, kept_in, profile_for, read_profile
from selfspec.testing import tiny_llm, tiny_model, tiny_tokenizer
from selfspec.trained.files import signature

WAYS = (
    Way(
        "layer-skip", {"attention": [1], "mlp": [2, 3]}, "fixed", {"tokens": 3}, 1.2, 1.3, 1.1, 1.4
    ),
    Way("early-exit", {"layer": 2}, "fixed", {"tokens": 4}, measured=1.1),
)


def _profile(llm: LLM) -> Profile:
    machine, info = this_machine(), llm.info
    base = signature(llm.model)
    return Profile(
        SCHEMA, "general", info.name, base, info.weights, machine, "abc", "Use it.", WAYS
    )


@pytest.fixture
def llm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LLM:
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path / "cache"))
    return tiny_llm()


def test_a_profile_is_read_as_it_was_written(llm: LLM, tmp_path: Path) -> None:
    """Fields that are lost or change their kind."""
    profile = _profile(llm)
    profile.write(tmp_path / "p.json")
    assert read_profile(tmp_path / "p.json") == profile


def test_a_loaded_model_finds_its_profile_and_auto_begins_with_it(llm: LLM) -> None:
    """A profile that is not found, or that changes what is written."""
    profile = _profile(llm)
    profile.write(kept_in(profile.model) / profile.file)
    again = LLM.from_pretrained(tiny_model(), tokenizer=tiny_tokenizer())
    assert again.profile == profile
    drafter = again._drafter({"draft": "auto", "draft_options": None})  # type: ignore[typeddict-item]
    assert isinstance(drafter, Auto)
    names = [each.name for each in drafter._drafters]
    assert names == ["hybrid", "layer-skip", "early-exit"]
    plain = again.generate("hello", max_new_tokens=20, draft=None)
    assert again.generate("hello", max_new_tokens=20).tokens == plain.tokens
    other = LLM.from_pretrained(tiny_model(), tokenizer=tiny_tokenizer(), profile=None)
    assert other.profile is None


def test_each_drafter_is_one_candidate_with_the_options_that_pay(llm: LLM) -> None:
    """Two candidates that are the same drafter, each of which learns half; a lookup that is lost;
    options that chance put first; options that pay and are dropped."""
    lucky = Way("quantised", {"first": "none"}, "fixed", measured=2.1, low=1.8, high=2.4)
    level = Way("quantised", {}, "fixed", measured=1.9, low=1.7, high=2.05)
    slower = Way("early-exit", {}, "fixed", measured=1.02, low=1.0, high=1.05)
    found = (lucky, level, *WAYS, slower, Way("hybrid", {"then": "ngram"}), Way("auto"))
    drafter = replace(_profile(llm), ways=found).drafter()
    assert isinstance(drafter, Auto)
    expected = [
        make_drafter("hybrid", {"then": "ngram"}),
        make_drafter("quantised", {}),
        make_drafter("layer-skip", {"attention": [1], "mlp": [2, 3]}),
        make_drafter("early-exit", {"layer": 2}),
    ]
    assert sorted(map(repr, drafter._drafters)) == sorted(map(repr, expected))
    assert drafter._drafters[0].name == "hybrid"


def test_a_profile_of_other_weights_is_not_found(llm: LLM) -> None:
    """A model of the same shape that takes another's profile."""
    profile = _profile(llm)
    profile.write(kept_in(profile.model) / profile.file)
    other = LLM.from_pretrained(tiny_model(seed=1), tokenizer=tiny_tokenizer())
    assert other.profile is None


def test_another_models_profile_is_refused_and_another_machines_warned_of(
    llm: LLM, tmp_path: Path
) -> None:
    """A file that is taken on trust."""
    profile, machine = _profile(llm), this_machine()
    profile.write(tmp_path / "p.json")
    with pytest.raises(OptionError, match="of another model"):
        profile_for(tiny_llm(seed=1).model, tmp_path / "p.json", machine, "float32")
    foreign = replace(machine, cpu="Another")
    with pytest.warns(UserWarning, match="another machine"):
        assert profile_for(llm.model, tmp_path / "p.json", foreign, "float32") == profile


@pytest.mark.parametrize("damage", ["truncated", "schema", "way", "list", "missing"])
def test_a_damaged_profile_is_an_error_that_says_what_to_do(
    llm: LLM, tmp_path: Path, damage: str
) -> None:
    """A traceback from inside, or nonsense that is accepted."""
    file = tmp_path / "p.json"
    _profile(llm).write(file)
    data = json.loads(file.read_text())
    if damage == "schema":
        data["schema"] = 99
    if damage == "way":
        data["ways"][0]["draft"] = "no such drafter"
    if damage == "missing":
        del data["machine"]
    text = json.dumps([data] if damage == "list" else data)
    file.write_text(text[:-40] if damage == "truncated" else text)
    with pytest.raises(OptionError, match=r"is no profile .* selfspec tune"):
        read_profile(file)
    kept = kept_in(signature(llm.model)) / "general-float32.json"
    kept.parent.mkdir(parents=True)
    file.rename(kept)
    with pytest.warns(UserWarning, match="going on without it"):
        assert profile_for(llm.model, "auto", this_machine(), "float32") is None


@pytest.mark.parametrize("wrong", [5, b"x", ["a"], True])
def test_a_profile_of_a_wrong_kind_is_an_error(llm: LLM, wrong: object) -> None:
    """A traceback from pathlib."""
    with pytest.raises(OptionError, match="is no profile"):
        profile_for(llm.model, wrong, this_machine(), "float32")  # type: ignore[arg-type]
