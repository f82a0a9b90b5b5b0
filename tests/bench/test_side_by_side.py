"""`scripts/bench side_by_side`: two ways to write a batch in alternating rounds, and its ratios."""

from __future__ import annotations

from pathlib import Path

import pytest
from suite_world import PROVENANCE

from benchmarks import side_by_side
from benchmarks.side_by_side import FEWEST, SideBySideRun, TaskRow, Turn, Writer, measure
from selfspec.bench.prompts import Prompt
from selfspec.bench.schema import read
from selfspec.bench.suite import Unit
from selfspec.errors import OptionError
from selfspec.testing import tiny_llm

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks/results"
TEXTS = [b"once upon a time, once upon a", b"the", b"aXb aXb aXb"]
UNIT = Unit("task", [Prompt("task", str(at), list(text)) for at, text in enumerate(TEXTS)])


def test_a_batch_is_written_again_and_says_the_same() -> None:
    """Answers that go on where the last turn ended, prompts that are read anew in each, first
    tokens that are timed, or a task that never ends though its interval is small."""
    llm = tiny_llm(seed=4)
    plain = llm.generate([list(text) for text in TEXTS], draft=None, max_new_tokens=9)
    run = SideBySideRun(PROVENANCE, "tiny", "float32", "auto", 9)
    row, ticks = TaskRow("task", len(TEXTS), UNIT.names), list[str]()
    measure(llm, run, row, [UNIT, UNIT], ticks.append, turns=FEWEST + 2, within=1e9)
    assert len(row.turns) == len(ticks) == FEWEST and not row.different
    longest = max(len(each.tokens) for each in plain)
    assert {turn.plain_rounds for turn in row.turns} == {2 * (longest - 1)}
    assert all(turn.plain > 0 and turn.drafting > 0 for turn in row.turns)

    writer = Writer(llm, UNIT, 9, None)
    for _ in range(2):
        writer.begin()
        cached = [each.stats.cached_prompt_tokens for each in writer._generation.rows]
        assert cached == [len(text) - 1 for text in TEXTS]
        assert writer.written == len(TEXTS) and not writer.seconds
        while not writer.ended:
            writer.round()
        assert writer.answers == [each.tokens for each in plain]


def test_other_answers_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter that is faster because it writes something else."""
    llm = tiny_llm(seed=4)
    begin = Writer.begin

    def shorter(self: Writer) -> None:
        self._new = 5 if self._draft else 9
        begin(self)

    monkeypatch.setattr(Writer, "begin", shorter)
    row = TaskRow("task", len(TEXTS), UNIT.names)
    run = SideBySideRun(PROVENANCE, "tiny", "float32", "auto", 9, [row])
    measure(llm, run, row, [UNIT], lambda _: None, turns=2, within=0.01)
    assert row.different == 2
    (line,) = [each for each in side_by_side.markdown(run).splitlines() if "| task " in each][1:]
    assert line.split("|")[-2].strip() == "2"


def test_whoever_has_written_less_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is done before the other begins: they would meet different moments."""
    llm, went = tiny_llm(seed=4), list[str]()
    both = [Writer(llm, UNIT, 9, draft) for draft in (None, "ngram")]
    ahead: list[int] = []
    once = Writer.round

    def noted(self: Writer) -> None:
        went.append(str(self._draft))
        other = both[self is both[0]]
        if not other.ended:
            ahead.append(self.written - other.written)
        once(self)

    monkeypatch.setattr(Writer, "round", noted)
    turn = side_by_side.write_both(*both)
    assert max(ahead) <= 0 and went[:2] == ["None", "ngram"]
    assert (turn.plain_rounds, turn.drafting_rounds) == (went.count("None"), went.count("ngram"))


def test_ratios_are_plain_time_over_the_drafters() -> None:
    """A ratio the wrong way round, one of medians, or a task given up before much is known."""
    row = TaskRow("task", 4, [], [Turn(2.0, 1.0, 9, 5), Turn(4.0, 2.0, 9, 5)] * 2)
    assert row.times_as_fast.value == pytest.approx(2.0) and not row.settled(0.01)
    row.turns += row.turns
    assert row.settled(0.01)
    row.turns.append(Turn(8.0, 16.0, 9, 5))
    assert row.times_as_fast.value == pytest.approx(32 / 28) and not row.settled(0.1)
    text = side_by_side.markdown(SideBySideRun(PROVENANCE, "demo", "int8", "auto", 9, [row]))
    assert "**4 rows**: mean 1.143, lowest 1.143" in text and " none |" in text


def test_a_task_has_to_be_named() -> None:
    """A run that measures nothing, and says that it is complete."""
    with pytest.raises(OptionError, match="name a task"):
        side_by_side.side_by_side()


def test_committed_results_are_whole() -> None:
    """A result of a run that was cut short, or of answers that were not the same."""
    files = list(RESULTS.glob("side-by-side-*.json"))
    assert files
    for file in files:
        run = read(SideBySideRun, file)
        assert run.complete and not any(task.different for task in run.tasks)
        assert all(len(task.turns) >= FEWEST for task in run.tasks)
