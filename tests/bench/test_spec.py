"""The benchmark of drafters: tables from numbers known by heart, and one small run of everything. Nothing about speed is asserted
of real timings."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from selfspec.bench.questions import Question, read_questions
from selfspec.bench.spec import Asking, Method, SpecRun, answer
from selfspec.bench.spec_costs import CostModel, StepTimer, fitting
from selfspec.bench.spec_plot import plot
from selfspec.bench.spec_report import by_position, load_spec, markdown, reached, rows
from selfspec.bench.versus import contestants
from selfspec.bench.versus_report import faster, load_versus
from selfspec.bench.versus_report import markdown as versus_markdown
from selfspec.errors import OptionError
from selfspec.testing import tiny_llm

PROVENANCE = {"threads": 2, "cpu": "a processor", "versions": {"torch": "1"}}


def a_turn(method: str, question: int, seconds: float, **changes: Any) -> dict[str, Any]:
    """10 tokens out of 10 passes."""
    task = "qa" if question < 4 else "rag"
    turn: dict[str, Any] = {"method": method, "task": task, "question": question, "round": 0, "prompt_tokens": 95, "decoded": 10}
    turn |= {"seconds": seconds, "draft_seconds": 0.0, "verify_seconds": seconds * 0.9, "prefill_seconds": 1.0}
    turn |= {"verifications": 10, "drafted": 0, "accepted": 0, "drafted_at": [], "accepted_at": [], "verified": [10]}
    return {**turn, "identical": True, **changes}


def a_run(cost: dict[str, float], **changes: Any) -> dict[str, Any]:
    """Plain decoding takes 0.1 to 0.17 s an answer; each method so many times as long."""
    turns = [
        a_turn(method, question, factor * (0.1 + 0.01 * question), **(changes if method != "plain" else {}))
        for question in range(8)
        for method, factor in {"plain": 1.0, **cost}.items()
    ]
    run = {"kind": "spec", "schema_version": 2, "model": "m", "kernel": "native", "dtype": "float32", "new_tokens": 11}
    return {**run, "sample": 4, "rounds": 1, "methods": ["plain", *cost], "turns": turns, "steps": [], "provenance": PROVENANCE}


def row(run: dict[str, Any], method: str) -> dict[str, Any]:
    return next(found for found in rows(run) if found["method"] == method)


def test_a_handicapped_method_is_flagged_and_its_twin_is_not() -> None:
    """Catches a ratio upside down, and a benchmark that cannot call a slow drafter slow or calls an identical one so."""
    run = a_run({"slow": 1.25, "same": 1.0, "fast": 0.5})
    assert row(run, "slow")["slower"] == ["qa", "rag"] and row(run, "slow")["mean"] == pytest.approx((0.8, 0.8, 0.8))
    assert row(run, "same")["slower"] == [] and row(run, "same")["mean"] == pytest.approx((1, 1, 1))
    assert row(run, "fast")["slower"] == [] and row(run, "fast")["mean"][0] == pytest.approx(2)
    slow, same = (next(line for line in markdown(run).splitlines() if line.startswith(f"| {name} ")) for name in ("slow", "same"))
    assert slow.count("0.80 -") == 2 and "1.00 -" not in same


def test_noise_is_not_called_slower() -> None:
    """Catches flags without an interval: half the questions are slower, half as much faster."""
    run = a_run({"noisy": 1.0})
    for turn in run["turns"]:
        if turn["method"] == "noisy":
            turn["seconds"] *= 1.3 if turn["question"] % 2 else 0.8
    assert row(run, "noisy")["slower"] == []
    _, low, high = row(run, "noisy")["mean"]
    assert low < 1 < high


def test_one_question_alone_is_never_significant() -> None:
    """Catches an interval without width, which one question has, being taken for certainty."""
    run = a_run({"slow": 2.0})
    run["turns"] = [turn for turn in run["turns"] if turn["question"] in (0, 4)]
    assert row(run, "slow")["slower"] == []


def test_one_wrong_answer_shows() -> None:
    """Catches a table that says 'same tokens' for a majority."""
    run = a_run({"fast": 0.5})
    run["turns"][-1]["identical"] = False
    assert row(run, "fast")["identical"] is False and "| NO |" in " ".join(markdown(run).split())
    assert row(a_run({"fast": 0.5}), "fast")["identical"] is True


def test_positions_are_pooled_over_turns_of_different_depth() -> None:
    """Catches a mean of rates (2 of 2 and 0 of 8 are 20%, not 50%) and turns that were cut to the shortest."""
    turns = [{"drafted_at": [2], "accepted_at": [2]}, {"drafted_at": [8, 4], "accepted_at": [0, 1]}]
    assert by_position(turns) == [0.2, 0.25]


POINTS = [
    {"kind": "verify", "context": 100, "tokens": 1, "seconds": [0.010, 0.020]},  # the machine went half as fast the second time
    {"kind": "verify", "context": 100, "tokens": 2, "seconds": [0.010, 0.020]},
    {"kind": "verify", "context": 100, "tokens": 3, "seconds": [0.014, 0.028]},
    {"kind": "verify", "context": 300, "tokens": 1, "seconds": [0.010, 0.010]},
    {"kind": "verify", "context": 300, "tokens": 2, "seconds": [0.012, 0.012]},
    {"kind": "verify", "context": 300, "tokens": 3, "seconds": [0.018, 0.018]},
    {"kind": "exit", "context": 100, "tokens": 1, "seconds": [0.003, 0.006]},
    {"kind": "exit", "context": 300, "tokens": 1, "seconds": [0.005, 0.005]},
]


def test_steps_are_interpolated_in_units_of_plain_passes() -> None:
    """Catches seconds of one moment mixed with those of another (drift), and a context or length taken for its neighbour."""
    costs = CostModel(POINTS)
    assert [costs.verify(count, 100) for count in (1, 2, 3)] == pytest.approx([1.0, 1.0, 1.4])
    assert costs.verify(3, 200) == pytest.approx(1.6), "between 1.4 and 1.8"
    assert costs.verify(3, 50) == pytest.approx(1.4) and costs.verify(3, 5000) == pytest.approx(1.8)
    assert costs.verify(5, 100) == pytest.approx(1.8), "beyond what was measured: on along the line from 1 to the longest"
    assert costs.draft("exit", 200) == pytest.approx(0.4)
    assert costs.draft("lookup", 200) is None


def test_the_prediction_of_an_answer() -> None:
    """Catches a model that prices the mean block instead of the blocks, leaves drafts out, or counts some twice."""
    costs = CostModel(POINTS)
    turn = a_turn("exit", 0, 1.0, verified=[6, 0, 4], drafted=8, draft_seconds=9.0)
    assert turn["prompt_tokens"] + turn["decoded"] / 2 == 100
    assert costs.seconds(turn, 0.02) == pytest.approx(0.02 * (6 * 1.0 + 4 * 1.4 + 8 * 0.3))
    lookup = a_turn("lookup", 0, 1.0, verified=[6, 0, 4], drafted=8, draft_seconds=0.001)
    assert costs.seconds(lookup, 0.02) == pytest.approx(0.02 * (6 * 1.0 + 4 * 1.4) + 0.001)


def test_what_rounds_lose_beside_their_steps_is_seen() -> None:
    """Catches a share that is always 100%: here a tenth of plain decoding is host, and the method loses as much again."""
    run = a_run({"lossy": 1.0})
    run["steps"] = [point for point in POINTS if point["kind"] == "verify"]
    plain, lossy = reached(run, "plain"), reached(run, "lossy")
    assert plain is not None and lossy is not None
    assert plain[0] == pytest.approx(0.9) and lossy[0] == pytest.approx(0.9)
    for turn in run["turns"]:
        turn["seconds"] *= 1.25 if turn["method"] == "lossy" else 1
    found = reached(run, "lossy")
    assert found is not None and found[0] == pytest.approx(0.72)
    assert "72% (72%-72%)" in markdown(run)
    assert reached(a_run({"x": 1.0}), "x") is None, "without step times nothing is predicted"


def test_methods_and_their_options() -> None:
    """Catches options that are lost or stay strings, by which a benchmark would measure defaults under another name."""
    assert Method("plain").options() == {"draft": None}
    found = Method("early-exit:layer=8,reuse=false@fixed:tokens=4").options()
    assert found["draft"] == "early-exit" and found["draft_options"] == {"layer": 8, "reuse": False}
    assert (found["control"], found["control_options"]) == ("fixed", {"tokens": 4})
    assert "control" not in Method("auto").options()


def write_questions(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


def test_the_sample_is_fixed_and_spread(tmp_path: Path) -> None:
    """Catches a sample of the first few, or one that changes; and Spec-Bench's eight kinds of conversation as eight tasks."""
    lines = [{"question_id": n, "category": "qa", "turns": [str(n), "second"]} for n in range(10)]
    lines += [{"question_id": 90 + n, "category": kind, "turns": ["x"]} for n, kind in enumerate(["writing", "math", "stem"])]
    file = write_questions(tmp_path / "q.jsonl", lines)
    asked = read_questions(file, 2)
    assert [(q.task, q.number, q.text) for q in asked] == [
        ("qa", 0, "0"), ("qa", 5, "5"), ("conversation", 90, "x"), ("conversation", 91, "x")
    ]  # fmt: skip
    assert asked == read_questions(file, 2) and len(read_questions(file, 99)) == 13


def test_a_question_that_is_none_is_refused_by_line(tmp_path: Path) -> None:
    """Catches questions that are left out silently, so that two runs are not of the same sample."""
    file = write_questions(tmp_path / "q.jsonl", [{"question_id": 1, "category": "qa", "turns": ["a"]}, {"category": "qa"}])
    with pytest.raises(OptionError, match="line 2"):
        read_questions(file, 1)
    with pytest.raises(OptionError, match="no file"):
        read_questions(tmp_path / "none.jsonl", 1)
    with pytest.raises(OptionError, match="at least 1"):
        read_questions(file, 0)


def test_a_run_of_everything_on_a_tiny_model(tmp_path: Path) -> None:
    """Catches methods that are not asked the same, counts of rounds that do not add up, and a file that cannot be read again."""
    llm = tiny_llm()
    methods = ["plain", "early-exit:layer=2@fixed:tokens=3", "ngram@fixed:tokens=3"]
    run = SpecRun(PROVENANCE, "tiny", "native", "float32", 12, 1, 2, methods)
    asking, file = Asking(llm, run, tmp_path / "spec.json"), tmp_path / "spec.json"
    said: list[str] = []
    for index, question in enumerate([Question("qa", 7, "aaa bbb"), Question("rag", 8, "ccc ddd")]):
        asking.ask(index, question, said.append)
    read = load_spec(file)
    assert read["turns"] == [asdict(turn) for turn in run.turns] and len(run.turns) == len(said) == 2 * 2 * 3
    for turn in run.turns:
        assert turn.identical, f"{turn.method} wrote something else than plain decoding"
        assert sum(turn.verified) == turn.verifications
        assert sum(size * count for size, count in enumerate(turn.verified)) == turn.drafted
    assert {turn.drafted for turn in run.turns if turn.method == "plain"} == {0}
    steps = {(point.kind, point.tokens) for point in run.steps}
    assert steps == {("verify", n) for n in range(1, 9)} | {(methods[1], 1)}, "a lookup has no step of its own"
    assert {len(point.seconds) for point in run.steps} == {2}, "once after each question"
    assert all(method in markdown(read) for method in methods)


def test_blocks_are_counted_without_the_prefill() -> None:
    """Catches the prefill taken for a round, and a first piece whose drafts are lost."""
    llm = tiny_llm()
    result, verified = answer(llm, [5, 6, 7, 5, 6, 7], 9, Method("ngram@fixed:tokens=2"))
    assert sum(verified) == result.stats.rounds and len(verified) <= 3
    assert answer(llm, [5, 6], 1, Method("plain"))[1] == [], "one token is the prefill's: there is no round"


def test_timing_steps_changes_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches isolated drafts and passes that pile up in their cache, each reading a longer text than the one before."""
    llm, made = tiny_llm(), []
    real = llm.model.new_cache
    monkeypatch.setattr(llm.model, "new_cache", lambda *a, **k: made.append(real(*a, **k)) or made[-1])
    timer = StepTimer(llm.model, list(range(3, 140)) * 2, {"exit": {"draft": "early-exit"}, "plain": {"draft": None}}, 3)
    timer.measure()
    assert {(point.kind, point.context) for point in timer.points} == {("verify", 128), ("exit", 128)}
    assert [cache.lengths.tolist() for cache in made] == [[[128] * 4]], "one cache, as it was after the prefill"
    assert fitting((128, 512), 300) == [128] and fitting((128, 512), 60) == [60]


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    """Catches a plot that fails on a method without drafts or a task that was not asked."""
    pytest.importorskip("matplotlib", reason="plots need selfspec[bench]")
    run = a_run({"fast": 0.5, "slow": 1.5}, drafted_at=[30, 3], accepted_at=[20, 1])
    for suffix, start in ((".png", b"\x89PNG"), (".svg", b"<?xml")):
        plot(run, tmp_path / f"p{suffix}")
        assert (tmp_path / f"p{suffix}").read_bytes().startswith(start)


@pytest.mark.parametrize(
    "text", ["{}", "[]", "{", '{"kind": "spec", "schema_version": 1}', '{"kind": "plain", "schema_version": 2}']
)
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    """Catches tables made of another benchmark's numbers, or of an older format's."""
    file = tmp_path / "r.json"
    file.write_text(text)
    for read in (load_spec, load_versus):
        with pytest.raises(OptionError, match=r"Measure again"):
            read(file)


def an_answer(peer: str, method: str, question: int, full: float, **changes: Any) -> dict[str, Any]:
    made = {"peer": peer, "method": method, "question": question, "prompt_tokens": 9, "first": 0.1, "full": full, "made": 11}
    return {**made, "difference": None, "drafted": None, "accepted": None, **changes}


def a_contest() -> dict[str, Any]:
    """Theirs 20 ms a token, ours 10, plain 15; one failed."""
    pairs = contestants(["transformers", "selfspec", "flashspec"], ["plain", "lookup"])
    full = {
        ("transformers", "plain"): 0.25,
        ("transformers", "lookup"): 0.3,
        ("selfspec", "lookup"): 0.2,
        ("selfspec", "plain"): 0.25,
    }
    answers = [an_answer(*pair, question, seconds) for question in range(3) for pair, seconds in full.items()]
    run = {"kind": "versus", "schema_version": 1, "model": "m", "factor": 1.0, "layer": 2, "tokens": 4, "new_tokens": 11}
    failures = {"flashspec lookup": "no answer | in time"}
    return {**run, "contestants": pairs, "answers": answers, "failures": failures, "complete": True, "provenance": PROVENANCE}


def test_peers_are_compared_by_method() -> None:
    """Catches ratios upside down, prefill in the decode time, and peers that fail or differ left out."""
    run = a_contest()
    run["answers"][-3]["difference"] = 4  # transformers' lookup, third question
    text = [" ".join(line.split()) for line in versus_markdown(run).splitlines()]
    assert "| transformers | 20.0 | 0.75 (0.75-0.75) | 2.00 (2.00-2.00) | 27.3 | - | NO, 1 of 3 differ |" in text
    assert "| selfspec | 10.0 | 1.50 (1.50-1.50) | 1 | 18.2 | - | yes |" in text
    assert "| flashspec | - | - | - | - | - | failed: no answer / in time |" in text


def test_contestants_begin_with_the_reference() -> None:
    """Catches a contest in which nothing says what is right, and peers that cannot decode plainly counted as failures."""
    assert contestants(["selfspec", "flashspec"], ["lookup"]) == [
        ("transformers", "plain"), ("selfspec", "lookup"), ("flashspec", "lookup")
    ]  # fmt: skip
    assert ("flashspec", "plain") not in contestants(["transformers", "flashspec"], ["plain", "lookup"])
    assert faster({1: (0.2, 10)}, {2: (0.1, 10)}) is None, "no question that both answered"
