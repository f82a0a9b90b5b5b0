"""A whole tuning of a tiny model: it ends in time, keeps a profile, and says what it found."""

from __future__ import annotations

import json
import time
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
from selfspec.tune.candidates import Prediction
from selfspec.tune.options import Setting, TuneOptions
from selfspec.tune.run import CLOSE, LOOKED, Tuning
from selfspec.tune.saying import seldom
from selfspec.tune.texts import ASKED, BUILT_IN, READ, chosen, digest_of_question
from selfspec.tune.timing import Trials


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
    assert {prediction.tokens for _, prediction in found.predicted} <= set(range(1, 9))
    timed = [way for way in found.ways if way.measured is not None]
    assert len(timed) >= CLOSE and all(way.low is not None for way in timed)
    assert found.ways[: len(timed)] == timed, "ways without a speed stand before others"
    assert [way.measured for way in profile.ways] == sorted(
        (way.measured or 0.0 for way in timed if (way.measured or 0.0) > 1), reverse=True
    )
    assert found.verdict and found.answer in ("helps", "does not", "undecided")
    assert stages[0] == "the model writes"
    assert set(profile.questions) == set(map(digest_of_question, ("hello", "you", "there")))


def test_ctrl_c_ends_the_search_and_what_was_found_is_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An interrupted search that loses everything."""
    from selfspec.tune import run

    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(run, "grown", interrupted)
    tuning = Tuning(_llm(), TuneOptions(minutes=0.1, max_new_tokens=24), ["hello", "you"])
    assert tuning.run().verdict


@pytest.mark.parametrize("stage", ["_copies", "_exits", "_skips", "_climbed"])
def test_ctrl_c_at_any_stage_keeps_what_was_found(
    monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """Minutes of work that are lost, stages that go on, and turns that take all of the time that
    was left."""
    from selfspec.tune import run

    begun: list[str] = []

    def interrupted(*_: Any, **__: Any) -> Any:
        begun.append(stage)
        raise KeyboardInterrupt

    if stage == "_climbed":
        monkeypatch.setattr(run, "climbed", interrupted)
    for name in ("_copies", "_exits", "_skips"):
        begin = interrupted if name == stage else lambda *_, name=name: begun.append(name) or []
        monkeypatch.setattr(Tuning, name, begin)
    monkeypatch.setattr(run, "measure_quietly", lambda model, *_: steps.measure(model, 0.1))
    tuning = Tuning(_llm(), TuneOptions(minutes=60, max_new_tokens=16), ["hello", "you"])
    turned: list[int] = []
    own = Trials.turn
    monkeypatch.setattr(Trials, "turn", lambda self, ways: turned.append(1) or own(self, ways))
    profile = tuning.run()
    assert begun[-1] == stage, "later stages went on"
    assert tuning.found.stopped and "stopped early" in profile.verdict
    assert {way.draft for way in tuning.found.ways} == {"hybrid", "auto"}
    assert all(way.measured for way in tuning.found.ways)
    assert len(turned) == 1 + 2, "an hour of turns behind Ctrl-C"


@pytest.mark.parametrize("turns", [-1, 0, 1])
def test_ctrl_c_between_turns_keeps_whole_ones(monkeypatch: pytest.MonkeyPatch, turns: int) -> None:
    """A half turn that is compared with whole ones, and a verdict from no turn at all (-1: it is
    the second Ctrl-C, in the look at all ways)."""
    options = TuneOptions(minutes=0.1, max_new_tokens=16, search="none")
    tuning = Tuning(_llm(), options, ["hello", "you"])
    own, calls = Trials._answer, [0]
    ways = [Way("ngram"), Way("hybrid", {}, "cost-aware")]
    a_turn = 1 + len(ways)  # one prompt is timed
    tuning.found.stopped = turns < 0

    def answer(self: Trials, ids: Any, way: Any) -> Any:
        calls[0] += 1
        if calls[0] == a_turn * (turns + 1) + 2:  # behind the look
            raise KeyboardInterrupt
        return own(self, ids, way)

    monkeypatch.setattr(Trials, "_answer", answer)
    trials = tuning._time(ways)
    assert tuning.found.stopped and trials.turns == max(0, turns)
    assert {len(trials._plain), *map(len, trials._taken.values())} <= {max(0, turns)}
    timed = [trials.timed(way) for way in ways]
    said = verdict.words(timed, None, stopped=True)
    assert "stopped early" in said and said.startswith("Nothing was timed") == (turns < 0)
    assert turns >= 0 or verdict.answer(timed) == "undecided"


def test_the_fastest_of_a_look_are_timed_further(monkeypatch: pytest.MonkeyPatch) -> None:
    """Minutes for ways that a look has settled; `auto` left out since it begins slowly; a way that
    was looked at and not kept."""
    tuning = Tuning(_llm(), TuneOptions(minutes=0.1, max_new_tokens=16, search="none"))
    assert len(tuning._timed) == ASKED
    ways = [Way("ngram", control="fixed", control_options={"tokens": n}) for n in range(1, 6)]
    ways.append(Way("auto"))
    speeds = dict(zip(map(str, ways), (1.1, 1.5, 1.2, 1.4, 1.3, 0.5), strict=True))
    asked: list[str] = []

    def answer(self: Trials, ids: Any, way: Way | None) -> Any:
        asked.append(str(way))
        return [[1]], 1 / speeds[str(way)] if way else 1.0

    monkeypatch.setattr(Trials, "_answer", answer)
    trials = tuning._time(ways)
    assert set(trials._taken) == {str(ways[n]) for n in (1, 3, 4, 5)}
    assert asked.count(str(ways[0])) == LOOKED
    assert asked.count(str(ways[1])) == LOOKED + trials.turns * ASKED
    measured = [trials.timed(way).measured for way in ways]
    assert measured == pytest.approx([None, 1.5, None, 1.4, 1.3, 0.5])


def test_nothing_timed_keeps_no_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A good profile that an interrupted tuning writes over with an empty one, and a traceback
    for ways without a measured speed."""
    llm, out = _llm(), tmp_path / "p.json"
    out.write_text("a good one")
    monkeypatch.setattr(common, "open_model", lambda name, how: llm)

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(Trials, "turn", interrupted)
    flags = ["--minutes", "0.1", "-n", "16", "--drafters", "text", "--out", str(out)]
    done = CliRunner().invoke(app, ["tune", "x", *flags])
    assert done.exit_code == 0, done.output
    assert out.read_text() == "a good one" and "no profile is kept" in done.output
    assert "Nothing was timed" in done.output


def test_turns_on_a_busy_machine_are_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spoiled turns that are believed, quiet ones that are taken twice, the worse of two kept."""
    tuning = Tuning(_llm(), TuneOptions(minutes=0.1, max_new_tokens=16), ["hello", "you"])
    for spreads, kept in (((2.0, 1.1), 1.1), ((2.0, 3.0), 2.0), ((1.1, 9.0), 1.1)):
        told = iter(spreads)

        def turns(ways: Any, first: Any, told: Any = told) -> Trials:
            trials = Trials(tuning._llm, [[5]], 8)
            trials.turns, trials._plain = 3, [1.0, next(told), 1.0]
            return trials

        monkeypatch.setattr(tuning, "_turns", turns)
        assert tuning._time([Way("ngram")]).spread == kept
        assert len(list(told)) == (spreads[0] < 1.5)


def test_what_is_going_on_is_said_a_few_times_a_second() -> None:
    """A log of ten thousand lines for five seconds, or a stage that nobody is told of."""
    said: list[tuple[str, float]] = []
    say = seldom(lambda stage, share: said.append((stage, share)))
    begin = time.perf_counter()
    say("begins", 0.0)
    while time.perf_counter() < begin + 0.5:
        say("goes on", 0.5)
    say("another", 0.0)
    assert said[0] == ("begins", 0.0) and said[-1] == ("another", 0.0)
    assert 2 <= said.count(("goes on", 0.5)) <= 3


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


def test_other_text_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A way that changes the text and is recommended for its speed."""
    trials, own = Trials(_llm(), [[5, 6, 7]], 8), Trials._answer
    ways = [Way("ngram"), Way("hybrid")]

    def answer(self: Trials, ids: Any, way: Any) -> Any:
        tokens, seconds = own(self, ids, way)
        return ([[9]], seconds) if way is ways[0] else (tokens, seconds)

    trials.turn(ways)
    assert trials.exact
    monkeypatch.setattr(Trials, "_answer", answer)
    trials.turn(ways)
    assert not trials.exact
    assert "please report this" in verdict.words([trials.timed(ways[0])], None, exact=False)


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


def test_ctrl_c_ends_all_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next task's five minutes behind a Ctrl-C."""
    llm, begun = _llm(), list[str]()
    monkeypatch.setattr(common, "open_model", lambda name, how: llm)
    own = Tuning.run

    def run(self: Tuning) -> Any:
        begun.append(self._task)
        self.found.stopped = self._task == "b"
        return own(self)

    monkeypatch.setattr(Tuning, "run", run)
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text("hello\nyou\n")
    flags = ["--minutes", "0.1", "-n", "16", "--drafters", "text", "--out", str(tmp_path / "p")]
    tasks = [f"--task={name}={tmp_path / name}.txt" for name in "abc"]
    done = CliRunner().invoke(app, ["tune", "x", *flags, *tasks])
    assert done.exit_code == 0, done.output
    assert begun == ["a", "b"] and len(list((tmp_path / "p").iterdir())) == 2


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

    monkeypatch.setattr(run, "measure_quietly", measured)
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
    assert Setting(drafters="exits,text").auto_options == {"candidates": ["hybrid", "early-exit"]}
    tuning = Tuning(_llm(), TuneOptions(), ["hello"], setting=Setting(drafters="text"))
    for way in tuning._from_text():
        drafter, _ = resolve(**way.options)
        if isinstance(drafter, Auto):
            assert [each.name for each in drafter._drafters] == ["hybrid"]


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
