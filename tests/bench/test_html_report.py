"""The page and the verdict of a suite result, on made-up runs whose figures are known."""

from __future__ import annotations

import copy
import re

import pytest
from suite_world import PROVENANCE, SPEED, a_suite, the_sample

from selfspec.bench.schema import Score, SuiteRun
from selfspec.bench.suite_report import report_page
from selfspec.bench.suite_stats import rows
from selfspec.bench.suite_verdict import reason, settings, verdict
from selfspec.bench.sweep_report import sweep_page, sweep_verdict
from selfspec.bench.sweep_result import Sweep, SweepOptions, SweepTurn, Threshold

EXIT = "selfspec/early-exit@fixed:tokens=4"


@pytest.fixture(scope="module")
def run() -> SuiteRun:
    return the_sample()


def changed(run: SuiteRun, contestant: str, **counts: float) -> SuiteRun:
    """The run with other counts of one contestant."""
    other = copy.deepcopy(run)
    for turn in other.turns:
        if turn.contestant == contestant and turn.counts is not None:
            for name, value in counts.items():
                setattr(turn.counts, name, value)
    return other


def test_the_verdict_names_the_best_and_why_another_loses(run: SuiteRun) -> None:
    """Naming the wrong row, or a loser without its reason, is worse than no verdict."""
    said = verdict(changed(run, EXIT, accepted=5))
    assert said.startswith("Use auto: 1.60x") and "which is the fastest plain decoding here" in said
    assert (
        "Not early-exit, control fixed with tokens=4: 0.70x, because 12% of its drafts are "
        "accepted." in said
    )
    assert "All 24 texts of our methods are token for token" in said


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ({"accepted": 4}, "10% of its drafts are accepted"),
        (
            {"draft_seconds": 9.0, "verify_seconds": 1.0, "host_seconds": 0.0},
            "drafting takes 90% of its time for 2.00",
        ),
        ({"draft_seconds": 0.0, "verify_seconds": 2.0}, "a pass over its drafts costs"),
        (
            {"draft_seconds": 0.0, "verify_seconds": 0.5, "verifications": 40, "accepted": 40},
            "seldom finds a guess",
        ),
        ({"draft_seconds": 0.0, "verify_seconds": 0.5}, "does not pay for what it costs"),
    ],
)
def test_reasons_follow_the_figures(run: SuiteRun, counts: dict[str, float], said: str) -> None:
    """Each branch, by counts that only it fits."""
    other = changed(run, EXIT, **counts)
    row = next(row for row in rows(other, 1) if row.contestant == EXIT)
    assert said in reason(other, row, 1)


def test_nothing_that_wins_is_said_so() -> None:
    """The least bad method recommended, because it came first in a list."""
    said = verdict(a_suite({"selfspec/plain": 1.0, "selfspec/auto": 0.9, "selfspec/ngram": 0.5}))
    assert said.startswith("Keep plain decoding") and "Use" not in said and "ngram: 0.50x" in said
    assert verdict(a_suite({"selfspec/plain": 1.0})).startswith("None of our methods took part.")
    unsure = a_suite({"selfspec/plain": 1.0, "selfspec/auto": 1.5}, tasks=("qa",), questions=2)
    for turn in unsure.turns:
        if turn.contestant == "selfspec/auto" and turn.questions == ["qa/0"]:
            turn.seconds += 0.5
    said = verdict(unsure)
    assert (
        "Keep plain" in said
        and "auto may be, at 1.1" in said
        and "more questions would tell" in said
    )


def test_a_close_second_is_named() -> None:
    """Two methods within each other's interval: the order is chance, and a reader should know."""
    run = a_suite(
        {
            "selfspec/plain": 1.0,
            "selfspec/auto": 1.6,
            "selfspec/ngram": 1.58,
            "selfspec/recycle": 1.2,
        }
    )
    for turn in run.turns:  # questions differ, so that there is an interval
        if turn.contestant == "selfspec/auto":
            turn.seconds += 0.1 if turn.questions[0].endswith(("0", "3")) else -0.1
    said = verdict(run)
    assert "Use auto" in said and "No worse within the interval: ngram (1.58x)." in said


def test_a_faster_rival_and_a_slower_baseline_are_named() -> None:
    """A report that hides that another engine is faster."""
    said = verdict(a_suite({**SPEED, "ctranslate2/plain": 2.0}))
    assert (
        "The fastest here is ctranslate2/plain, at 1.25x the best of ours." in said
        and "0.80x the fastest plain" in said
    )


def test_one_unit_cannot_say(run: SuiteRun) -> None:
    """A single question has an interval without width; the verdict must not sound sure."""
    said = verdict(a_suite(tasks=("qa",), questions=1))
    assert "ask more questions" in said and "Not " not in said


def test_differing_texts_and_interruptions_are_said() -> None:
    """They are what a reader must know first."""
    run = the_sample()
    difference = next(turn for turn in run.turns if turn.differences).differences[0]
    next(turn for turn in run.turns if turn.contestant == "selfspec/auto").differences.append(
        difference
    )
    run.complete = False
    said = verdict(run)
    assert (
        "1 of 24 texts of our methods differ" in said
        and "1 of them at near-ties" in said
        and "interrupted" in said
    )


def test_settings_are_words() -> None:
    """They are to be typed again."""
    assert settings("ngram:longest=3,branches=1@fixed:tokens=6") == (
        "ngram with longest=3, branches=1, control fixed with tokens=6"
    )
    assert settings("auto") == "auto"


def test_the_page_has_every_contestant_and_its_figures(run: SuiteRun) -> None:
    """A row that lost or failed is left out, or a figure of another row stands beside a name."""
    page = report_page(run)
    page = page.replace("<wbr>", "")
    for name in run.plan.contestants:
        assert name in page
    assert "No module named &#x27;openvino_genai&#x27;" in page
    bars = dict(re.findall(r'<div class="name">([^<]+)</div>.*?<div>([\d.]+)x', page))
    assert bars == {name: f"{speed:.2f}" for name, speed in SPEED.items()}
    assert list(bars) == sorted(SPEED, key=lambda name: -SPEED[name])
    assert "2.1e-05" in page and "How often a draft is kept" in page and "Quality" not in page
    assert not re.search(r"https?:|<script|url\(", page)


def test_scores_batches_and_precisions_get_their_sections(run: SuiteRun) -> None:
    """Two batch sizes in one picture would be compared with one another."""
    other = copy.deepcopy(run)
    other.scores = [Score("selfspec/plain", "qa", "rouge2", 0.0785, 4)]
    more = copy.deepcopy([turn for turn in other.turns if turn.contestant.startswith("selfspec/")])
    for turn in more:
        turn.batch, turn.questions = 4, [turn.questions[0]] * 4
    other.turns += more
    other.plan.batches.append(4)
    page = report_page(other)
    assert (
        "0.0785" in page
        and "Speed (float32, batch 1)" in page
        and "Speed (float32, batch 4)" in page
    )
    assert "At batch 4: " in verdict(other)


def test_the_page_of_a_sweep() -> None:
    """A best cell below 1 must not be recommended; an empty sweep is no crash."""
    run = Sweep(PROVENANCE, "m", "native", "float32", 4, SweepOptions(new_tokens=8), {"p": 5})
    assert sweep_verdict(run) == "Nothing was measured yet." and "</html>" in sweep_page(run)

    def a_turn(kind: str, first: int, seconds: float) -> SweepTurn:
        return SweepTurn("a", "grid", "p", kind, first, first, 10, seconds, 5, 10, 3, True)

    turns = [("plain", 0, 1.0), ("grid", 1, 2.0), ("grid", 2, 1.6), ("plain", 0, 1.0)]
    run.turns = [a_turn(*each) for each in turns]
    assert (
        "comes nearest, 0.62x plain decoding with 30% of its drafts accepted: do not use it here"
        in sweep_verdict(run)
    )
    run.turns[2] = a_turn("grid", 2, 0.5)
    assert "Early exit at layer 2 with 2 drafts a round: 2.00x" in sweep_verdict(run)
    run.gamma = [Threshold("p", 0.6 + step / 1000, 1, 1) for step in range(900)]
    page = sweep_page(run)
    assert ">2.00</td>" in page and "30% accepted" in page and "The adaptive threshold" in page
    assert page.count("polyline") == 4 and page.count("polygon") == 2 and len(page) < 60_000
