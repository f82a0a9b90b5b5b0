"""A suite run with engines that are not there: what is asked, compared, kept and continued. The
clock is theirs, so that no test is slow or flaky."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from suite_world import PROVENANCE

from selfspec.bench.contestants import Contestant
from selfspec.bench.engines import Engines
from selfspec.bench.meters import EnergyMeter
from selfspec.bench.peers import PeerFailed, PeerSpec, Reply
from selfspec.bench.prompts import Prompt
from selfspec.bench.schema import Plan, Sample, SuiteRun, read
from selfspec.bench.suite import Suite, units_of
from selfspec.bench.suite_report import markdown
from selfspec.bench.suite_run import open_run
from selfspec.bench.suite_stats import Row, rows
from selfspec.errors import OptionError, ResourceError, Unavailable

QUESTIONS = 6
NEW_TOKENS = 11
EOS = [2]


class World:
    """Seconds a token by contestant, what each writes, and what happens to it; every engine writes
    down what it is asked."""

    def __init__(self, **seconds: float) -> None:
        self.seconds = seconds
        self.asked: list[tuple[str, tuple[int, ...], int]] = []
        self.chance = random.Random(1)
        self.made: dict[str, Made] = {}
        self.called: list[dict[str, Any]] = []
        self.noise = 0.0
        self.event: Callable[[str, Sequence[int]], None] = lambda name, ids: None
        self.written: Callable[[str, Sequence[int]], list[int]] = lambda name, ids: (
            [ids[-1]] * NEW_TOKENS
        )

    def start(self, spec: PeerSpec, threads: int, limit: float) -> Made:
        self.made[spec.name] = Made(self, spec.name)
        return self.made[spec.name]


class Made:
    """An engine: `method` in the options names the contestant."""

    precision = "float32"
    pid = 1

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name, self.versions, self.dead = (
            world,
            name,
            {name: "0" if name == "selfspec" else "1"},
            False,
        )

    def load(self, folder: Path, dtype: str, device: str = "cpu", weights: str = "auto") -> float:
        self.world.event(f"load {self.name}", [])
        return 1.0

    def echo(self, something: Sequence[int]) -> float:
        return 0.0001

    def call(self, name: str, **arguments: Any) -> Any:
        assert name == "gap"
        self.world.called.append(arguments)
        return [0.25, 20.0] if arguments["ids"][-1] == 7 else [5e-5, 20.0]

    def answer(
        self,
        rows: Sequence[Sequence[int]],
        max_new_tokens: int,
        eos: Sequence[int],
        options: Mapping[str, Any],
    ) -> Reply:
        method = options.get("method", "plain")
        name = f"{self.name}/{method}"
        self.world.asked.append((name, tuple(row[-1] for row in rows), max_new_tokens))
        self.world.event(name, rows[0])
        made = [self.world.written(name, row)[:max_new_tokens] for row in rows]
        each = self.world.seconds[method] * (
            1 + self.world.noise * self.world.chance.uniform(-1, 1)
        )
        decoding = each * (sum(map(len, made)) - len(made))
        return Reply(
            made,
            1.0 + decoding,
            1.0,
            len(made),
            {"drafted": 4, "accepted": 2} if method != "plain" else None,
        )

    def close(self) -> None:
        self.world.event(f"close {self.name}", [])


def a_plan(names: Sequence[str], **changes: Any) -> Plan:
    samples = [Sample(task, f"{task}-3-0", "q.jsonl", 3, 9, True) for task in ("qa", "rag")]
    plan = Plan(
        "m", "float32", "cpu", 2, NEW_TOKENS, 1, [1], list(names), "selfspec/plain", samples
    )
    return replace(plan, **changes)


def prompts() -> list[Prompt]:
    """Question n ends with the token 10 + n."""
    return [Prompt("qa" if n < 3 else "rag", f"q/{n}", [5, 6, 10 + n]) for n in range(QUESTIONS)]


def a_suite(world: World, run: SuiteRun, out: Path) -> Suite:
    contestants = [
        Contestant(
            name, name.partition("/")[0], name.partition("/")[2], {"method": name.partition("/")[2]}
        )
        for name in run.plan.contestants
    ]
    specs = {each.engine: PeerSpec(each.engine, out.parent) for each in contestants}
    engines = Engines(
        specs, out.parent, "float32", "cpu", 2, 9.0, EnergyMeter([], "none"), world.start, settle=0
    )
    return Suite(
        run, contestants, prompts(), engines, out, lambda tokens: " ".join(map(str, tokens)), EOS
    )


def measured(world: World, out: Path, names: Sequence[str], **changes: Any) -> SuiteRun:
    run = open_run(SuiteRun(PROVENANCE, a_plan(names, **changes)), out)
    a_suite(world, run, out).measure()
    return run


def row(run: SuiteRun, name: str, batch: int = 1) -> Row:
    return next(each for each in rows(run, batch) if each.contestant == name)


def test_a_handicapped_method_is_slower_and_its_twin_is_equal(tmp_path: Path) -> None:
    """Catches a verdict upside down, one without an interval, and a table that calls noise a
    difference: 5% of it here."""
    world = World(plain=0.03, handicapped=0.036, twin=0.03, fast=0.02)
    world.noise = 0.05
    names = ["selfspec/plain", "selfspec/handicapped", "selfspec/twin", "selfspec/fast"]
    run = measured(world, tmp_path / "r.json", names, rounds=5)
    assert [row(run, name).verdict for name in names[1:]] == ["slower", "equal", "faster"]
    speed = row(run, "selfspec/handicapped").over_plain
    assert speed is not None and speed.low < 0.03 / 0.036 < speed.high
    line = next(
        line for line in markdown(run).splitlines() if line.startswith("| selfspec/handicapped")
    )
    assert "| slower |" in line and "0.8" in line


def test_two_runs_agree_within_their_intervals(tmp_path: Path) -> None:
    """Catches intervals that are too narrow to be believed, as a plain bootstrap's of 3 questions
    are: 16 of 20 pairs met."""
    inside = 0
    for number in range(8):
        found = []
        for run_number in range(2):
            world = World(plain=0.03, fast=0.02)
            world.noise, world.chance = 0.1, random.Random(100 * number + run_number)
            run = measured(
                world,
                tmp_path / f"{number}-{run_number}.json",
                ["selfspec/plain", "selfspec/fast"],
                rounds=2,
            )
            found.append(row(run, "selfspec/fast").over_plain)
        first, second = found
        assert first is not None and second is not None
        inside += first.low <= second.high and second.low <= first.high
    assert inside == 8


def test_contestants_take_turns_and_begin_elsewhere_each_time(tmp_path: Path) -> None:
    """Catches a benchmark that measures one after the other, on another machine each as far as
    drift goes, and a fixed order."""
    world = World(plain=0.03, fast=0.02)
    names = ["selfspec/plain", "selfspec/fast", "other/plain"]
    measured(world, tmp_path / "r.json", names)
    turns = [(name, ids[0]) for name, ids, count in world.asked if count == NEW_TOKENS]
    by_question = [turns[start : start + 3] for start in range(0, len(turns), 3)]
    assert [{name for name, _ in part} for part in by_question] == [set(names)] * QUESTIONS
    assert all(len({question for _, question in part}) == 1 for part in by_question)
    assert [part[0][0] for part in by_question] == [names[n % 3] for n in range(QUESTIONS)]


def test_the_slowest_question_is_told_by_the_median_of_its_rounds(tmp_path: Path) -> None:
    """Catches one unlucky turn taken for a slow question, and a question that is always slow lost
    in the mean: of question 1 all rounds are slow, of question 4 the first one."""
    world = World(plain=0.03, fast=0.02)
    asked: list[int] = []

    def event(name: str, ids: Sequence[int]) -> None:
        if name == "selfspec/fast":
            asked.append(ids[-1])
            slow = ids[-1] == 11 or (ids[-1] == 14 and asked.count(14) == 1)
            world.seconds["fast"] = (0.06 if ids[-1] == 14 else 0.032) if slow else 0.02

    world.event = event
    names = ["selfspec/plain", "selfspec/fast"]
    run = measured(world, tmp_path / "r.json", names, rounds=3)
    found = row(run, "selfspec/fast").slowest
    assert found is not None and found == ("q/1", pytest.approx(0.03 / 0.032))
    assert " q/1: 0.94 |" in markdown(run) and row(run, "selfspec/plain").slowest[1] == 1  # type: ignore[index]


def test_a_sitting_ends_with_its_minutes_and_the_next_one_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a limit that loses what was measured, cuts a round, or measures a round twice."""
    now = iter(range(10_000))
    # the suite's clock alone: other threads of the process look at the real one
    clock = SimpleNamespace(monotonic=lambda: 60.0 * next(now), perf_counter=time.perf_counter)
    monkeypatch.setattr("selfspec.bench.suite.time", clock)
    world, out = World(plain=0.03, fast=0.02), tmp_path / "r.json"
    names = ["selfspec/plain", "selfspec/fast"]
    kept = []
    for _ in range(9):
        suite = a_suite(world, open_run(SuiteRun(PROVENANCE, a_plan(names)), out), out)
        suite.minutes = 2.5  # two looks at the clock: two rounds, those that are done included
        suite.minutes += len(kept) and kept[-1] / 2
        suite.measure()
        kept.append(len(read(SuiteRun, out).turns))
        if suite.run.complete:
            break
    assert kept == [4, 8, 12] and suite.run.complete and suite.run.sittings == 3
    assert len({(turn.contestant, *turn.questions) for turn in suite.run.turns}) == 12


def test_weights_are_told_to_engines_and_kept_in_the_plan(tmp_path: Path) -> None:
    """Catches a run in 8 bits that is one in float32, and one that goes on in other weights."""
    told: list[str] = []
    world = World(plain=0.03)
    load = Made.load

    def heard(
        self: Made, folder: Path, dtype: str, device: str = "cpu", weights: str = "auto"
    ) -> float:
        told.append(weights)
        return load(self, folder, dtype)

    run = open_run(SuiteRun(PROVENANCE, a_plan(["selfspec/plain"], weights="int8")), tmp_path / "r")
    suite = a_suite(world, run, tmp_path / "r")
    suite.engines.weights = "int8"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Made, "load", heard)
        suite.measure()
    assert told == ["int8"] and "float32 with weights in int8, 2 threads" in markdown(run)
    run.complete = False
    with pytest.raises(OptionError, match="differs in weights"):
        open_run(SuiteRun(PROVENANCE, a_plan(["selfspec/plain"])), tmp_path / "r")


def test_what_differs_is_found_with_its_gap(tmp_path: Path) -> None:
    """Catches comparing with the wrong text, an index off by one, and a real difference that is
    called a near-tie."""
    world = World(plain=0.03, odd=0.03)
    world.written = lambda name, ids: (
        [7] * (3 if name == "selfspec/odd" and ids[-1] == 11 else 11) + [8] * 8
    )
    run = measured(world, tmp_path / "r.json", ["selfspec/plain", "selfspec/odd"])
    (found,) = row(run, "selfspec/odd").differences
    assert (found.question, found.at, found.gap, found.text) == ("q/1", 3, 0.25, "7 7 7" + " 8" * 8)
    assert world.called == [{"ids": [5, 6, 11, 7, 7, 7], "wanted": 7, "written": 8}]
    assert "no: 1 of 6 differ, at 3 by gap 0.25; 0 near-ties" in markdown(run)
    assert not row(run, "selfspec/plain").differences and len(run.answers) == QUESTIONS
    world.written = lambda name, ids: [9] * 11 if name == "selfspec/plain" else [9] * 4 + [3] * 7
    assert "all near-ties" in markdown(
        measured(world, tmp_path / "s.json", ["selfspec/plain", "selfspec/odd"])
    )


def test_a_batch_is_one_turn_of_several_questions(tmp_path: Path) -> None:
    """Catches tokens of one row over the time of all, rows of different tasks together, and answers
    compared across rows."""
    world = World(plain=0.03, fast=0.02)
    run = measured(world, tmp_path / "r.json", ["selfspec/plain", "selfspec/fast"], batches=[1, 3])
    (qa, rag) = [
        turn for turn in run.turns if (turn.batch, turn.contestant) == (3, "selfspec/fast")
    ]
    assert (qa.questions, qa.made, qa.first_tokens, qa.decoded) == (
        ["q/0", "q/1", "q/2"],
        [11, 11, 11],
        3,
        30,
    )
    assert rag.task == "rag" and row(run, "selfspec/fast", 3).tokens_per_second == pytest.approx(50)
    assert not any(turn.differences for turn in run.turns)
    with pytest.raises(OptionError, match="--batches 4 needs 4 questions a task and qa has 3"):
        units_of(prompts(), [4])


def failing(name: str, at: int, error: BaseException) -> Callable[[str, Sequence[int]], None]:
    """Raises when a contestant is asked a question."""

    def event(who: str, ids: Sequence[int]) -> None:
        if who == name and ids and ids[-1] == 10 + at:
            raise error

    return event


def test_a_contestant_that_fails_is_a_row_that_says_so(tmp_path: Path) -> None:
    """Catches one engine's failure that ends everybody's run, or that leaves no trace in the
    table."""
    world = World(plain=0.03, fast=0.02)
    world.event = failing("other/fast", 3, PeerFailed("no answer within 9 s"))
    run = measured(world, tmp_path / "r.json", ["selfspec/plain", "other/plain", "other/fast"])
    assert run.complete and sum(turn.contestant == "other/fast" for turn in run.turns) == 3
    assert sum(turn.contestant == "other/plain" for turn in run.turns) == QUESTIONS
    assert (
        "failed: no answer within 9 s" in markdown(run)
        and row(run, "other/fast").failure == "no answer within 9 s"
    )


def test_an_engine_that_does_not_start_is_a_row_that_says_so(tmp_path: Path) -> None:
    """Catches rows of an engine that is not installed left out, and a run that waits for it again
    and again."""
    world = World(plain=0.03, fast=0.02)

    def event(who: str, ids: Sequence[int]) -> None:
        if who == "load other":
            raise PeerFailed("No module named 'other'")

    world.event = event
    run = measured(world, tmp_path / "r.json", ["selfspec/plain", "other/plain", "other/fast"])
    assert run.complete and markdown(run).count("failed: No module named 'other'") == 2
    assert not any(name.startswith("other/") for name, _, _ in world.asked)


def test_an_engine_that_died_is_started_again_for_its_other_methods(tmp_path: Path) -> None:
    """Catches one method that hangs taking its engine's others along, and a dead engine's process
    left behind."""
    world, said = World(plain=0.03, fast=0.02), []

    def event(who: str, ids: Sequence[int]) -> None:
        said.append(who)
        if who == "other/fast" and ids[-1] == 12:
            world.made["other"].dead = True
            raise PeerFailed("no answer within 9 s, so it was ended")

    world.event = event
    run = measured(world, tmp_path / "r.json", ["selfspec/plain", "other/plain", "other/fast"])
    assert run.complete and sum(turn.contestant == "other/plain" for turn in run.turns) == QUESTIONS
    assert (
        said.count("load other") == 2
        and said.count("close other") == 2
        and run.failure("other/plain") is None
    )


def test_without_our_plain_decoding_there_is_no_run(tmp_path: Path) -> None:
    """Catches a table of ratios to nothing, and answers compared with nothing."""
    world = World(plain=0.03, fast=0.02)
    world.event = failing("selfspec/plain", 2, PeerFailed("out of memory"))
    with pytest.raises(Unavailable, match=r"plain decoding failed.*out of memory"):
        measured(world, tmp_path / "r.json", ["selfspec/plain", "selfspec/fast"])
    kept = read(SuiteRun, tmp_path / "r.json")
    assert not kept.complete and len(kept.turns) == 4, "the two questions before it are kept"


NAMES = ["selfspec/plain", "selfspec/fast"]


def test_an_interrupted_run_goes_on_where_it_was(tmp_path: Path) -> None:
    """Catches a run that begins again, one that asks a question twice, and one that loses more than
    the round under way."""
    out, world = tmp_path / "r.json", World(plain=0.03, fast=0.02)
    world.event = failing("selfspec/fast", 4, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        measured(world, out, NAMES)
    kept = read(SuiteRun, out)
    assert not kept.complete and len(kept.turns) == 2 * 4 and "Interrupted" in markdown(kept)
    world.event, world.asked = lambda name, ids: None, []
    run = measured(world, out, NAMES)
    asked = [ids[0] - 10 for _, ids, count in world.asked if count == NEW_TOKENS]
    assert asked == [4, 4, 5, 5] and run.complete and run.sittings == 2
    whole = read(SuiteRun, out)
    assert whole == run and len(whole.turns) == 2 * QUESTIONS and len(whole.answers) == QUESTIONS


def test_a_kill_loses_no_finished_round(tmp_path: Path) -> None:
    """Catches a result that is written at the end only: what a kill would leave is what is on the
    disk at that moment."""
    out, world, left = tmp_path / "r.json", World(plain=0.03, fast=0.02), []

    def event(who: str, ids: Sequence[int]) -> None:
        if out.exists():
            left.append(len(read(SuiteRun, out).turns))

    world.event = event
    measured(world, out, NAMES)
    assert left == [2, 2, 4, 4, 6, 6, 8, 8, 10, 10, 12], (
        "two turns a question; the last is the closing of the engine"
    )


def test_differences_are_found_after_going_on(tmp_path: Path) -> None:
    """Catches a second sitting that has forgotten what the reference wrote in the first."""
    out, world = tmp_path / "r.json", World(plain=0.03, fast=0.02)
    world.written = lambda name, ids: [7] * NEW_TOKENS
    asked = []

    def event(who: str, ids: Sequence[int]) -> None:
        asked.append((who, tuple(ids)))
        if (
            asked.count(("selfspec/fast", (5, 6, 11))) == 2
        ):  # in the second round of the second question
            raise KeyboardInterrupt

    world.event = event
    with pytest.raises(KeyboardInterrupt):
        measured(world, out, NAMES, rounds=2)
    world.event = lambda name, ids: None
    world.written = lambda name, ids: [7] * 10 + [7 if name == "selfspec/plain" else 9]
    run = measured(world, out, NAMES, rounds=2)
    assert [each.at for each in row(run, "selfspec/fast").differences] == [10] * 9
    wrote = {
        turn.contestant: [each.at for each in turn.differences]
        for turn in run.turns
        if turn.questions == ["q/1"] and turn.round
    }
    assert len(run.answers) == QUESTIONS and wrote == {"selfspec/plain": [], "selfspec/fast": [10]}


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a result that a failed write has cut short."""
    import errno
    import os

    out, world = tmp_path / "r.json", World(plain=0.03, fast=0.02)
    real, calls = os.fsync, []

    def fsync(handle: int) -> None:
        calls.append(handle)
        if len(calls) > 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(ResourceError, match="No space left"):
        measured(world, out, NAMES)
    assert len(read(SuiteRun, out).turns) == 2 * 3
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


def test_another_run_is_not_written_over(tmp_path: Path) -> None:
    """Catches an hour's measurements lost to a command typed again with another option, and two
    machines in one table."""
    out, world = tmp_path / "r.json", World(plain=0.03, fast=0.02)
    measured(world, out, NAMES)
    assert open_run(SuiteRun(PROVENANCE, a_plan(NAMES)), out).complete
    with pytest.raises(OptionError, match=r"differs in new_tokens, rounds.*--fresh"):
        open_run(SuiteRun(PROVENANCE, a_plan(NAMES, rounds=2, new_tokens=9)), out)
    assert open_run(SuiteRun(PROVENANCE, a_plan(NAMES, rounds=2)), out, fresh=True).turns == []
    kept = json.loads(out.read_text())
    out.write_text(json.dumps({**kept, "complete": False}))
    for changes in ({"cpu": "another"}, {"commit": "another"}, {"versions": {"selfspec": "9"}}):
        with pytest.raises(
            OptionError, match="another machine, at another commit or with other versions"
        ):
            open_run(SuiteRun(replace(PROVENANCE, **changes), a_plan(NAMES)), out)  # type: ignore[arg-type]


def test_sampled_texts_of_other_engines_are_not_compared(tmp_path: Path) -> None:
    """Catches a table that calls another engine's draws a difference, and sampling that is not
    asked for."""
    world, asked = World(plain=0.03, fast=0.02), []
    world.written = lambda name, ids: [7 if name.startswith("selfspec/") else 8] * NEW_TOKENS
    real = Made.answer

    def answer(self: Made, rows: Any, count: int, eos: Any, options: Mapping[str, Any]) -> Reply:
        asked.append(options.get("sampling"))
        return real(self, rows, count, eos, options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Made, "answer", answer)
        run = measured(
            world, tmp_path / "r.json", [*NAMES, "other/plain"], temperature=0.5, top_p=0.9, seed=3
        )
    assert not any(turn.differences for turn in run.turns)
    assert {json.dumps(each) for each in asked} == {'{"temperature": 0.5, "top_p": 0.9, "seed": 3}'}
