"""Turns of a tuning: who is timed for long, what Ctrl-C leaves, a busy machine, what is said."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from selfspec.cli import common
from selfspec.cli.app import app
from selfspec.llm import LLM
from selfspec.profile import Way
from selfspec.testing import near_identity_model, tiny_tokenizer
from selfspec.tune import steps, verdict
from selfspec.tune.options import TuneOptions
from selfspec.tune.run import LOOKED, Tuning
from selfspec.tune.saying import seldom
from selfspec.tune.texts import ASKED
from selfspec.tune.timing import Trials


def _llm() -> LLM:
    return LLM.from_pretrained(near_identity_model(0.8), tokenizer=tiny_tokenizer(), profile=None)


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
    costs = steps.measure(_llm().model, 0.1)
    monkeypatch.setattr(run, "costs_of", lambda *_: (costs, False))
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


def test_one_turn_says_that_the_machine_was_busy() -> None:
    """Advice from a single turn, half of which something else disturbed."""
    for plain, turns, busy in (
        ([1.0, 1.1, 1.0, 1.8], 1, True),
        ([1.0, 1.1, 1.0, 1.2], 1, False),
        ([1.0, 1.8, 1.0, 1.0, 1.1, 1.0], 3, False),
        ([1.0, 1.0, 1.0, 1.0, 2.0, 2.0], 3, True),
    ):
        trials = Trials(_llm(), [[5]] * (len(plain) // turns), 8)
        trials._plain, trials.turns = plain, turns
        assert trials.busy == busy


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
