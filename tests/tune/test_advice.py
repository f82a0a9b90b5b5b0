"""A whole tuning of a tiny model: it ends in time, keeps a profile, and says what it found."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.shrunken import tiny
from selfspec.cli import common
from selfspec.cli.app import app
from selfspec.core.machine import this_machine
from selfspec.draft.auto import Auto
from selfspec.draft.registry import resolve
from selfspec.errors import OptionError
from selfspec.llm import LLM
from selfspec.profile import Way, profile_for, read_profile
from selfspec.testing import near_identity_model, tiny_tokenizer
from selfspec.tune import steps, verdict
from selfspec.tune.candidates import MOST_DRAFTS, Prediction
from selfspec.tune.options import Setting, TuneOptions
from selfspec.tune.run import CLOSE, Tuning
from selfspec.tune.texts import ASKED, BUILT_IN, READ, chosen, digest_of_question


def _llm() -> LLM:
    return LLM.from_pretrained(near_identity_model(0.8), tokenizer=tiny_tokenizer(), profile=None)


def test_a_tuning_times_its_best_candidates_and_keeps_those_that_pay() -> None:
    """Candidates that are predicted and never timed, ways slower than plain in a profile."""
    stages: list[str] = []
    options = TuneOptions(minutes=0.1, max_new_tokens=24)
    tuning = Tuning(
        _llm(), options, ["hello", "you", "there"], lambda stage, _: stages.append(stage)
    )
    profile = tuning.run()
    found = tuning.found
    assert {"hybrid", "auto"} <= {way.draft for way in found.ways}
    assert found.tried, "no skip set was looked at"
    assert {each.tokens for _, each in found.predicted} <= set(range(1, MOST_DRAFTS + 1))
    timed = [way for way in found.ways if way.measured is not None]
    assert len(timed) >= CLOSE and all(way.low is not None for way in timed)
    assert found.ways[: len(timed)] == timed, "ways without a speed stand before others"
    assert [way.measured for way in profile.ways] == sorted(
        (way.measured or 0.0 for way in timed if (way.measured or 0.0) > 1), reverse=True
    )
    assert found.verdict and found.answer in ("helps", "does not", "undecided")
    assert stages[0] == "the model writes"
    assert set(profile.questions) == set(map(digest_of_question, ("hello", "you", "there")))


def test_many_questions_take_no_longer() -> None:
    """A file of a thousand questions that are all answered before anything else; one task alone
    that is timed, since the file has its tasks one after another; questions read and timed too."""
    questions = [f"{task} {number}" for task in "ab" for number in range(500)]
    read, timed = chosen(questions)
    assert (len(read), len(timed)) == (READ, ASKED)
    assert not set(read) & set(timed) and set(read + timed) <= set(questions)
    assert {text[0] for text in timed} == {text[0] for text in read} == {"a", "b"}
    assert chosen([]) == (list(BUILT_IN[:4]), list(BUILT_IN[4:])) and len(BUILT_IN) == 4 + ASKED
    assert chosen(["one"]) == (["one"], ["one"])


def test_costs_of_a_busy_machine_are_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spoiled costs that are believed, quiet ones that are measured twice."""
    parts = steps.measure(_llm().model, 0.1)
    for spreads, expected in (((2.0, 1.1), 1.1), ((2.0, 3.0), 2.0), ((1.1, 9.0), 1.1)):
        told = iter(replace(parts, spread=spread) for spread in spreads)
        monkeypatch.setattr(steps, "measure", lambda *_, told=told: next(told))
        found = steps.measure_quietly(_llm().model, 0.1)
        assert found.spread == expected
        assert found.busy == (expected > steps.BUSY)
        assert len(list(told)) == (spreads[0] < steps.BUSY)
    said = verdict.words([Way("ngram", measured=1.4, low=1.2, high=1.6)], None, busy=True)
    assert "busy" in said and "measured again" in said


def test_a_budget_too_small_says_so() -> None:
    """The best so far that is sold as the best there is."""
    tuning = Tuning(_llm(), TuneOptions(minutes=0.1, max_new_tokens=48), ["hello", "you"])
    tuning._end = 0.0
    assert "too short" in tuning.run().verdict


def test_tasks_get_profiles_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One task's profile over another's, a name that is not found, pictures of nothing."""
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path / "cache"))
    llm = _llm()
    monkeypatch.setattr(common, "open_model", lambda name, how: llm)
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(f"hello {name}\nyou {name}\n")
    flags = ["--minutes", "0.1", "-n", "24", "--trials", "4"]
    tasks = [f"--task={name}={tmp_path / name}.txt" for name in ("a", "b")]
    done = CliRunner().invoke(app, ["tune", "x", *flags, *tasks])
    assert done.exit_code == 0, done.output
    machine = this_machine()
    first, second = (profile_for(llm.model, name, machine, "float32") for name in ("a", "b"))
    assert first is not None and second is not None
    assert (first.task, second.task) == ("a", "b") and first.text != second.text
    assert profile_for(llm.model, "auto", machine, "float32") is None, (
        "a task's is nobody's default"
    )
    with pytest.raises(OptionError, match=r"no profile 'c'.*known: a, b"):
        profile_for(llm.model, "c", machine, "float32")
    picture = tmp_path / "p.png"
    done = CliRunner().invoke(app, ["tune", "x", *flags, tasks[0], "--png", str(picture)])
    assert done.exit_code == 0 and picture.stat().st_size > 10_000, done.output


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--task", "chat"], "names no questions"),
        (["--task", "=x"], "cannot name a task"),
        (["--task", "none=x"], "cannot name a task"),
        (["--task", "a/b=x"], "cannot name a task"),
        (["--task", "a=x", "--task", "a=y"], "is there twice"),
        (["--task", "a=x", "--questions", "y"], "both name questions"),
        (["--task", "a=x", "--task", "b=y", "--png", "p.png"], "is one picture"),
    ],
)  # fmt: skip
def test_tasks_that_cannot_be_are_an_error(flags: list[str], said: str) -> None:
    """Minutes of work before a mistake is noticed, or a file somewhere else."""
    done = CliRunner().invoke(app, ["tune", "x", *flags])
    assert done.exit_code == 1
    assert said in " ".join(done.output.split())


@pytest.mark.filterwarnings("ignore:.*kernel 'floor'")
def test_a_model_that_runs_whole_is_advised_too() -> None:
    """Costs of layers that it does not have."""
    llm = LLM.from_pretrained(tiny("ctrl"), tokenizer=tiny_tokenizer(), profile=None)
    tuning = Tuning(llm, TuneOptions(minutes=0.1, max_new_tokens=24), ["hello", "you"])
    assert tuning.run().verdict
    assert {way.draft for way in tuning.found.ways} == {"hybrid", "auto"}


@pytest.mark.parametrize(
    ("gains", "expected"),
    [
        ([(1.4, 1.2, 1.6)], "helps"),
        ([(1.4, 1.0, 1.6)], "undecided"),
        ([(0.9, 0.8, 1.0), (1.02, 1.0, 1.04)], "does not"),
        ([], "does not"),
    ],
    ids=["helps", "undecided", "slower", "nothing"],
)
def test_the_verdict_follows_the_interval(
    gains: list[tuple[float, float, float]], expected: str
) -> None:
    """A gain that noise explains and that is praised."""
    ways = [Way("ngram", measured=value, low=low, high=high) for value, low, high in gains]
    assert verdict.answer(ways) == expected
    said = verdict.words(ways, None)
    beginnings = {"helps": "Use ngram: 1.40", "undecided": "Undecided", "does not": "Do not use"}
    assert said.startswith(beginnings[expected])


def test_advise_says_it_as_json_and_tune_writes_the_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flags that do not arrive, a profile that cannot be read back."""
    monkeypatch.setattr(common, "open_model", lambda name, how: _llm())
    monkeypatch.setattr("selfspec.cli.tune.ADVICE_MINUTES", 0.1)
    prompts = tmp_path / "asked.txt"
    prompts.write_text("hello\n\nyou\n")
    asked = ["--questions", str(prompts)]
    done = CliRunner().invoke(app, ["advise", "x", "--json"])
    assert "built-in" in done.stderr, "nobody was told that the model answers our questions"
    done = CliRunner().invoke(app, ["advise", "x", "--json", *asked])
    assert "built-in" not in done.stderr
    said = json.loads(done.stdout)
    assert said["answer"] in ("helps", "does not", "undecided") and said["ways"]
    out = tmp_path / "p.json"
    flags = ["--minutes", "0.1", "-n", "24", "--search", "none", "--out", str(out)]
    done = CliRunner().invoke(app, ["tune", "x", *flags, *asked])
    assert done.exit_code == 0, done.output
    assert read_profile(out).verdict in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    "wrong", [{"batch": 0}, {"temperature": -1.0}, {"drafters": "copies,luck"}]
)
def test_settings_that_cannot_be_say_so(wrong: dict[str, Any]) -> None:
    """A batch of nothing, a kind of drafter that nobody has."""
    with pytest.raises(OptionError, match=next(iter(wrong))):
        Setting(**wrong)


def test_a_setting_says_what_drafts_and_how_many_rows() -> None:
    """Kinds that draft though they may not, one row where several are asked for."""
    options = TuneOptions(minutes=0.1, max_new_tokens=16, trials=3)
    setting = Setting(batch=3, temperature=0.7, drafters="exits,skips")
    tuning = Tuning(_llm(), options, ["hello", "you", "there"], setting=setting)
    asked: list[int] = []
    own = tuning._llm.generate

    def generate(prompts: Any, **how: Any) -> Any:
        asked.append(len(prompts))
        assert how.get("draft") is None or how["sampling"].temperature == 0.7
        return own(prompts, **how)

    tuning._llm.generate = generate  # type: ignore[method-assign]
    profile = tuning.run()
    assert {way.draft for way, _ in tuning.found.predicted} == {"early-exit", "layer-skip"}
    assert {way.draft for way in tuning.found.ways} <= {"early-exit", "layer-skip"}
    assert not any("weights" in way.draft_options for way in tuning.found.ways), "a copy drafts"
    assert set(asked[1:]) == {3}
    assert "WARNING" not in profile.verdict


def test_another_models_study_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A minute of costs, copies and exits, and then an error."""
    pytest.importorskip("optuna")
    from selfspec.tune import run

    place = str(tmp_path / "study.log")
    run.study_in(place, "tpe", "another model")
    options = TuneOptions(minutes=0.1, max_new_tokens=16, search="tpe", study=place)

    def measured(*_: Any) -> Any:
        raise AssertionError("costs were measured first")

    monkeypatch.setattr(run, "costs_of", measured)
    with pytest.raises(OptionError, match="is of another model, and this is"):
        Tuning(_llm(), options, ["hello", "you"]).run()


def test_the_best_exit_is_found_between_those_looked_at_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every third exit of a deep model, and never the two between."""
    llm = LLM.from_pretrained(
        near_identity_model(0.8, 4, num_hidden_layers=30), tokenizer=tiny_tokenizer(), profile=None
    )
    tuning, probe = Tuning(llm, TuneOptions(), ["hello", "you"]), SimpleNamespace(everywhere=(0,))
    for best in (1, 7, 8, 29):

        def predict(candidate: Any, *_: Any, best: int = best) -> Prediction:
            return Prediction(2, 30 - abs(candidate.plan.stop - best), 0.5)

        monkeypatch.setattr(tuning, "_predict", predict)
        (way,) = tuning._exits(probe, None)  # type: ignore[arg-type]
        assert way.draft_options == {"layer": best}


def test_auto_keeps_to_what_may_draft() -> None:
    """`auto` with a copy in its memory for somebody who left copies out."""
    assert Setting().auto_options == {}
    kept = {"candidates": ["hybrid", "draft-head", "early-exit"]}
    assert Setting(drafters="exits,text").auto_options == kept
    tuning = Tuning(_llm(), TuneOptions(), ["hello"], setting=Setting(drafters="text"))
    for way in tuning._from_text():
        drafter, _ = resolve(**way.options)
        if isinstance(drafter, Auto):
            assert [each.name for each in drafter._drafters] == ["hybrid", "draft-head"]


@pytest.mark.parametrize(
    "wrong",
    [{"minutes": 0.0}, {"max_new_tokens": 3}, {"search": "luck"}, {"study": "a.log"}],
    ids=["minutes", "tokens", "search", "study"],
)
def test_options_that_cannot_work_say_so(wrong: dict[str, Any]) -> None:
    """An error after minutes of work."""
    with pytest.raises(
        OptionError, match=next(iter(wrong)).replace("search", "there is no search")
    ):
        TuneOptions(**wrong)


def test_prompts_that_cannot_be_read_are_an_error(tmp_path: Path) -> None:
    """A traceback for a folder, or silence for an empty file."""
    empty = tmp_path / "empty.txt"
    empty.write_text("\n\n")
    for path in (tmp_path, empty):
        done = CliRunner().invoke(app, ["advise", "x", "--questions", str(path)])
        assert done.exit_code == 1
        assert "--questions" in done.output
