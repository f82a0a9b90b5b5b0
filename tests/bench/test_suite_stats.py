"""Figures and tables from made-up results: ratios the right way up, like with like, losers and
failures kept."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from suite_world import PLAIN_SECONDS, SPEED, a_suite, a_turn, the_sample

from selfspec.bench.pictures import draw
from selfspec.bench.schema import Counts, Difference, StepPoint, SuiteRun
from selfspec.bench.suite_report import markdown, picture_title, pictures
from selfspec.bench.suite_stats import (
    Row,
    best_baseline,
    by_position,
    costs_of,
    drafts_of,
    interval,
    near_tie,
    rows,
    student,
)


def row(run: SuiteRun, name: str, task: str | None = None) -> Row:
    return next(each for each in rows(run, 1, task) if each.contestant == name)


def test_speeds_are_over_the_own_plain_and_over_the_best() -> None:
    """Catches a ratio upside down, prefill in the decoding time, and another engine's plain
    decoding as the baseline."""
    run = a_suite()
    assert best_baseline(run, 1, "float32") == "selfspec/plain"
    by_name = {each.contestant: each for each in rows(run, 1)}
    for name, speed in SPEED.items():
        own = SPEED[name.partition("/")[0] + "/plain"]
        found = by_name[name]
        assert found.over_plain is not None and found.over_best is not None
        assert found.over_plain.value == pytest.approx(
            speed / own
        ) and found.over_best.value == pytest.approx(speed)
    auto = by_name["selfspec/auto"]
    assert auto.tokens_per_second == pytest.approx(1.6 / PLAIN_SECONDS, rel=0.03)
    assert auto.tokens_per_second_with_prefill == pytest.approx(
        41 / (0.2 + 40 * PLAIN_SECONDS / 1.6), rel=0.03
    )
    assert [
        by_name[name].verdict for name in ("selfspec/auto", "selfspec/early-exit@fixed:tokens=4")
    ] == ["faster", "slower"]
    assert auto.first_seconds == 0.2 and auto.cold_start_seconds == pytest.approx(3.4)


def test_a_faster_peer_is_the_baseline() -> None:
    """Catches our own plain decoding taken for the best where another engine's, compiled say, is
    faster."""
    run = a_suite(
        {
            "selfspec/plain": 1.0,
            "selfspec/auto": 1.5,
            "transformers/compiled": 2.0,
            "transformers/lookup:tokens=4": 3.0,
        }
    )
    assert best_baseline(run, 1, "float32") == "transformers/compiled", (
        "a lookup is no plain decoding"
    )
    auto = row(run, "selfspec/auto").over_best
    assert auto is not None and auto.value == pytest.approx(0.75)


def test_only_like_precisions_are_compared() -> None:
    """Catches an 8-bit engine that sets the pace for float32 ones, and a table that has both."""
    run = a_suite({"selfspec/plain": 1.0, "selfspec/auto": 1.5, "tiny/plain": 4.0})
    run.engines[-1].precision = "int8"
    assert (
        best_baseline(run, 1, "float32") == "selfspec/plain"
        and best_baseline(run, 1, "int8") == "tiny/plain"
    )
    text = markdown(run)
    assert "**float32, batch 1**" in text and "**int8, batch 1**" in text
    before, _, after = text.partition("**int8, batch 1**")
    assert (
        "tiny/plain" not in before.partition("| contestant")[2]
        and "selfspec/auto" not in after.partition("Speeds are")[0]
    )


def test_rounds_are_medians_and_units_are_paired() -> None:
    """Catches a mean that one disturbed round spoils, and a question that only one of the two
    answered."""
    run = a_suite({"selfspec/plain": 1.0, "selfspec/auto": 2.0}, ("qa",), 3)
    slow = a_turn("selfspec/auto", "qa", "qa/0", 0.01, round=1)
    quick = a_turn("selfspec/auto", "qa", "qa/0", 2.0, round=2)
    run.turns += [slow, quick]
    assert costs_of([turn for turn in run.turns if turn.contestant == "selfspec/auto"])[
        "qa/0",
    ] == pytest.approx(PLAIN_SECONDS / 2)
    run.turns = [
        turn
        for turn in run.turns
        if (turn.contestant, turn.questions) != ("selfspec/auto", ["qa/1"])
    ]
    found = row(run, "selfspec/auto")
    assert (
        found.units == 2
        and found.over_plain is not None
        and found.over_plain.value == pytest.approx(2)
    )


def test_one_question_alone_is_never_significant() -> None:
    """Catches an interval without width, which one question has, being taken for certainty."""
    run = a_suite({"selfspec/plain": 1.0, "selfspec/slow": 0.5}, ("qa",), 1)
    assert row(run, "selfspec/slow").verdict is None and "| slower |" not in markdown(run)


def test_an_answer_of_one_token_has_no_cost() -> None:
    """Catches a division by nothing where the model ends at once."""
    run = a_suite({"selfspec/plain": 1.0, "selfspec/auto": 2.0}, ("qa",), 3)
    for turn in run.turns[:2]:
        turn.made, turn.seconds = [1], 0.2
    assert row(run, "selfspec/auto").units == 2


def test_noise_is_not_called_a_difference() -> None:
    """Catches verdicts without an interval, over 20 pairs of contestants that are alike but for 10%
    of noise."""
    chance = random.Random(3)
    verdicts = []
    for _ in range(20):
        run = a_suite({"selfspec/plain": 1.0, "selfspec/twin": 1.0}, ("qa", "rag"), 5)
        for turn in run.turns:
            turn.seconds = 0.2 + (turn.seconds - 0.2) * chance.uniform(0.9, 1.1)
        verdicts.append(row(run, "selfspec/twin").verdict)
    assert verdicts.count("equal") >= 19


def test_intervals_of_few_are_wide() -> None:
    """Catches a bootstrap of three values that claims the certainty of thirty; and a slip in
    Student's t."""
    chance = random.Random(0)
    few = interval([[(1.0, chance.uniform(0.9, 1.1)) for _ in range(3)]])
    many = interval([[(1.0, chance.uniform(0.9, 1.1)) for _ in range(30)]])
    assert few is not None and many is not None and few.high - few.low > 4 * (many.high - many.low)
    assert (
        student(2) == pytest.approx(4.303)
        and student(11) == pytest.approx(2.201, abs=0.003)
        and student(60) == pytest.approx(2.0, abs=0.003)
    )
    alone = interval([[(1.0, 0.5)], [(1.0, 0.4)], [(1.0, 0.6)]])
    assert alone is not None and alone.low < alone.value < alone.high, (
        "one question a task: the tasks are drawn"
    )
    assert interval([]) is None and interval([[]]) is None


def test_positions_are_pooled_over_turns_of_different_depth() -> None:
    """Catches a mean of rates (2 of 2 and 0 of 8 are 20%, not 50%) and turns that were cut to the
    shortest."""
    counts = [
        Counts(drafted_at=[2], accepted_at=[2]),
        Counts(drafted_at=[8, 4], accepted_at=[0, 1]),
    ]
    assert by_position(counts) == (0.2, 0.25)


def test_acceptance_and_times_are_shares_of_sums() -> None:
    """Catches acceptance without its K, and shares of another whole."""
    found = row(a_suite(), "selfspec/ngram@fixed:tokens=4")
    assert (found.acceptance, found.drafts, found.tokens_per_verification) == (0.5, "4", 2.0)
    assert found.draft_share == pytest.approx(0.1) and found.verify_share == pytest.approx(0.8)
    assert [
        drafts_of(name)
        for name in (
            "selfspec/plain",
            "selfspec/auto",
            "selfspec/ngram",
            "selfspec/ngram@adaptive",
            "x/lookup:tokens=6",
            "x/own",
        )
    ] == ["-", "auto", "4", "adaptive", "6", "own"]


def test_near_ties_are_judged_by_precision() -> None:
    """Catches a rounding in bfloat16 called a bug, and a bug in float32 called a rounding."""
    assert near_tie(Difference("q", 1, 5e-5, 20.0), "float32") and not near_tie(
        Difference("q", 1, 0.1, 20.0), "float32"
    )
    assert near_tie(Difference("q", 1, 0.1, 20.0), "bfloat16") and not near_tie(
        Difference("q", 1, 2.0, 20.0), "bfloat16"
    )
    assert not near_tie(Difference("q", 1), "float32"), (
        "where nothing could say, nothing is excused"
    )


def test_the_table_keeps_losers_differences_and_failures() -> None:
    """Catches rows that are left out because they look bad, or because there is nothing to put into
    them."""
    text = [" ".join(line.split()) for line in markdown(the_sample()).splitlines()]
    early = next(line for line in text if line.startswith("| selfspec/early-exit"))
    assert "| 0.70 - | 0.70 - | 0.70 (0.70-0.70) | slower |" in early and early.endswith("| yes |")
    assert any("no: 1 of 8 differ, at 17 by gap 2.1e-05; all near-ties" in line for line in text)
    assert any(
        line.startswith("| openvino/plain | - |") and "failed: ModuleNotFoundError" in line
        for line in text
    )
    assert "Energy: no counter: /sys/class/powercap has no intel-rapl." in text


def test_what_the_cost_model_says_is_a_column_where_steps_were_timed() -> None:
    """Catches a share that is always 100%, and a column without measurements."""
    run = a_suite({"selfspec/plain": 1.0, "selfspec/auto": 1.0})
    run.steps = [StepPoint("verify", 100, n, [0.02, 0.04]) for n in range(1, 4)]
    lines = [
        line
        for line in markdown(run).splitlines()
        if "95%" in line and line.startswith("| selfspec/plain")
    ]
    assert lines and "95% (95%-95%)" in lines[0], "a twentieth of plain decoding is the host's"
    run.steps = []
    assert "measured/predicted" not in markdown(run)


def test_skipped_lines_and_interruptions_are_said() -> None:
    """Catches a table that hides what it is not."""
    run = a_suite()
    run.plan = replace(
        run.plan,
        samples=[
            replace(run.plan.samples[0], skipped=["q.jsonl, line 2: no"]),
            run.plan.samples[1],
        ],
    )
    run.complete = False
    text = markdown(run)
    assert "Left out: q.jsonl, line 2: no." in text and "**Interrupted**" in text


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    """Catches a plot that fails on a method without drafts, a task that was not asked, or an engine
    that did not start."""
    pytest.importorskip("matplotlib", reason="plots need selfspec[bench]")
    for suffix, start in ((".png", b"\x89PNG"), (".svg", b"<?xml")):
        draw(picture_title(the_sample()), pictures(the_sample()), tmp_path / f"p{suffix}")
        assert (tmp_path / f"p{suffix}").read_bytes().startswith(start)
