"""The programs that hold the tuner against the real thing count and judge rightly."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import costs, probe, skipsets, verdicts, with_profile
from benchmarks.command import made_by
from selfspec.bench.schema import read
from selfspec.bench.tasks import Item
from selfspec.draft.registry import make_drafter
from selfspec.errors import OptionError
from selfspec.llm import LLM
from selfspec.model.from_transformers import from_transformers
from selfspec.profile import Way
from selfspec.testing import near_identity_model, tiny_llm, tiny_model, tiny_tokenizer
from selfspec.tune import candidates
from selfspec.tune.options import Setting, TuneOptions
from selfspec.tune.probe import Probe
from selfspec.tune.rounds import Rounds, room_for, scripted
from selfspec.tune.run import Found, Tuning
from selfspec.tune.search import Tried
from selfspec.tune.texts import own_texts
from selfspec.tune.timing import Trials


def test_rounds_draft_what_they_are_told_and_time_themselves() -> None:
    """Rounds without drafts, with some of them, or over a context that is not there."""
    model = tiny_llm().model
    for rows, drafter, tokens in (
        (1, None, 0),
        (2, scripted(2, 3), 3),
        (2, make_drafter("early-exit", {}), 2),
    ):
        rounds = Rounds(model, rows, 40, drafter, tokens)
        before = model.layers
        taken = rounds.run(3)
        assert len(taken) == 3 and model.layers == before
        assert all(each.all > each.draft >= 0 for each in taken)
        assert all((each.draft > 0) == bool(tokens) for each in taken)
        lengths = [rounds._cache.length(row) for row in range(rows)]
        # plain rounds may come at once, as many as there is room for
        most = 40 + room_for(3, 0) if tokens == 0 else 44 + 4 * tokens
        assert all(44 <= length <= most for length in lengths), lengths


def test_every_cost_case_is_predicted_and_an_error_is_relative() -> None:
    """Errors of the wrong sign, contexts that the model has no room for."""
    model = tiny_llm(max_position_embeddings=2048).model
    bench, ticks = costs.Bench.of(model), list[str]()
    bench.turn(random.Random(0), ticks.append, 0.0)
    rows = bench.rows()
    assert {row.context for row in rows} == {64, 512}
    assert {row.way for row in rows} == {"verified", "early-exit", "layer-skip", "quantised"}
    assert all(row.predicted > 0 and row.error is not None for row in rows)
    assert len(ticks) == len(rows)
    row = costs.CostRow("verified", 1, 1, 64, 1.1, [1.0, 9.0, None, 1.0])
    assert row.error == pytest.approx(0.1)


def test_the_probe_program_counts_what_decoding_counts() -> None:
    """Drafts of one half of the prompts under the other's name, acceptance upside down."""
    llm = LLM(from_transformers(near_identity_model(0.6), check=False), None, "tiny")
    prompts = [[5, 9], [60], [130, 7], [200]]
    texts = own_texts(llm, prompts, 48)
    probes = Probe(llm.model, texts), Probe(llm.model, texts[:2])
    way = probe.decoded(
        llm, candidates.exiting(llm.model, probe.FREE, 2), probes, prompts, [2, 4], 48
    )
    assert [each.tokens for each in way.lengths] == [2, 4]
    for each in way.lengths:
        assert 0 < each.accepted < each.drafted
        assert each.probed == pytest.approx(each.real, abs=0.08)
        first = sum(
            llm.generate(ids, max_new_tokens=48, eos=[], draft="early-exit",
                         draft_options={"layer": 2}, control="fixed",
                         control_options={"tokens": each.tokens}).stats.accepted
            for ids in prompts[:2]
        )  # fmt: skip
        assert 0 < first < each.accepted


def test_a_stopped_probe_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ways that are counted twice, left out, or taken from a run with other prompts."""
    llm = LLM.from_pretrained(near_identity_model(0.6), tokenizer=tiny_tokenizer(), profile=None)
    ways = [candidates.exiting(llm.model, probe.FREE, layer) for layer in (1, 2)]
    monkeypatch.setattr(LLM, "from_pretrained", lambda *_, **__: llm)
    monkeypatch.setattr(probe, "folder_of", lambda model: model)
    monkeypatch.setattr(probe, "candidates_of", lambda llm: ways)
    own, counted, out = probe.decoded, list[str](), tmp_path / "p.json"

    def decoded(llm: LLM, candidate: candidates.Candidate, *how: Any) -> probe.WayProbed:
        counted.append(probe.named(candidate))
        return own(llm, candidate, *how)

    monkeypatch.setattr(probe, "decoded", decoded)
    for only, prompts, done, complete in (
        ("layer=2", 2, ["early-exit(layer=2)"], False),
        ("", 2, ["early-exit(layer=1)"], True),
        ("layer=1", 3, ["early-exit(layer=1)"], False),
        ("", 2, ["early-exit(layer=1)", "early-exit(layer=2)"], True),
    ):
        counted.clear()
        probe.probe("tiny", 24, prompts, "2", only, 1, out)
        assert counted == done
        run = read(probe.ProbeRun, out)
        assert run.complete == complete
        assert [way.way for way in run.ways] == sorted(way.way for way in run.ways)


def test_verdicts_are_judged_by_their_intervals() -> None:
    """Cases that are there twice, an undecided one that counts as right or wrong."""
    cases = list(verdicts.all_cases())
    assert len(cases) == len(set(cases)) >= 24
    tuned, judging = verdicts.asked_of("task")
    assert len(tuned) > 20 and len(judging) == 8 and not {*tuned} & {*judging}
    assert verdicts.asked_of("demo") == ([], [*verdicts.UNSEEN, *verdicts.MORE])
    case = cases[0]

    def judged(said: str, low: float, high: float) -> bool | None:
        return verdicts.Judged(case, said, "", None, "x", (low + high) / 2, low, high).right

    assert judged("helps", 1.2, 1.4) is True
    assert judged("does not", 1.2, 1.4) is False
    assert judged("helps", 0.8, 1.0) is False
    assert judged("does not", 0.8, 1.0) is True
    assert judged("helps", 1.0, 1.4) is None and judged("undecided", 1.2, 1.4) is None


def test_a_verdict_is_held_against_more_than_what_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tuner that finds nothing and is right because nothing is measured, the slowest of all ways
    as the truth, ways that the case leaves out."""
    llm, case = tiny_llm(), verdicts.Case("tiny", "float32", 1, 0, 0.0, "exits,text")
    ways = verdicts.ways_of(llm, case, Found())
    assert {way.draft for way in ways} == {"early-exit", "hybrid", "ngram"}
    speeds = {"early-exit": 0.5, "hybrid": 1.2, "ngram": 0.9}
    monkeypatch.setattr(
        Trials, "_answer", lambda self, ids, way: ([[1]], 1 / speeds[way.draft] if way else 1.0)
    )
    best = verdicts.longer(llm, case, [[5, 6]] * 8, ways, 0.0)
    assert best.draft == "hybrid" and best.measured == pytest.approx(1.2)
    assert best.low == pytest.approx(best.high) == pytest.approx(1.2)


def test_speeds_are_ratios_of_mean_times() -> None:
    """A mean of ratios, or one upside down; the best way of one task where another is asked."""
    answers = [
        with_profile.Answered(
            task, str(number), {"plain": plain, "auto": own, "b": by, "c": 3.0}, True
        )
        for number, (task, plain, own, by) in enumerate(
            [("a", 4.0, 1.0, 2.0), ("a", 2.0, 2.0, 2.0), ("b", 1.0, 1.0, 9.0)]
        )
    ]
    of_a = answers[:2]
    assert with_profile.said(with_profile.speed(of_a, "auto", "plain")).startswith("2.00 (")
    assert with_profile.speed(answers[:1], "auto", "plain").value == 4
    assert with_profile.best_fixed(of_a) == "b" and with_profile.best_fixed(answers) == "c"
    run = with_profile.ProfileRun(made_by("with_profile", 1), "tiny", "abc", 8, answers)
    assert {task: len(of) for task, of in with_profile.by_task(run).items()} == {
        "a": 2, "b": 1, "all": 3,
    }  # fmt: skip


def test_questions_that_made_a_profile_are_no_test_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A profile that is praised on the questions that it was made with."""
    llm = LLM.from_pretrained(tiny_model(), tokenizer=tiny_tokenizer(), profile=None)
    options = TuneOptions(minutes=0.1, max_new_tokens=16, search="none")
    asked = ["hello", "you"]
    profile = Tuning(llm, options, asked, setting=Setting(drafters="text")).run()
    items = [Item("qa", str(n), text, False) for n, text in enumerate([*asked, "another"])]
    assert [item.text for item in with_profile.unseen(items, profile)] == ["another"]
    with pytest.raises(OptionError, match="all of these"):
        with_profile.unseen(items[:2], profile)
    with pytest.raises(OptionError, match="does not say which"):
        with_profile.unseen(items, replace(profile, questions=()))
    file, out = tmp_path / "q.jsonl", tmp_path / "run.json"
    rows = [{"question_id": n, "category": "qa", "turns": [i.text]} for n, i in enumerate(items)]
    file.write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.setattr(LLM, "from_pretrained", lambda *_, **__: llm)
    monkeypatch.setattr(with_profile, "folder_of", lambda model: model)
    for ways in ((), (Way("ngram", {}, "fixed", {"tokens": 2}, measured=1.2),)):
        replace(profile, ways=ways).write(tmp_path / "p.json")
        with_profile.with_profile(file, str(tmp_path / "p.json"), "tiny", 4, 8, 0.0, 1, out)
        run = read(with_profile.ProfileRun, out)
        (only,) = run.answers
        assert only.question == "qa/2" and only.same and run.complete
        assert len(only.seconds) == 3 + len(ways), "answers of other contestants were kept"


def test_a_set_stands_beside_others_of_its_size() -> None:
    """Places that run over the last layer, sizes that no search saw, a count that pruned sets
    fill."""
    best = skipsets.Searched("grown", 9, skipsets.left_out([2, 3, 5], [4]))
    assert best.left_out == 4
    found = list(skipsets.of_places(8, best))
    assert [each.search for each in found] == list(skipsets.PLACES)
    assert {each.left_out for each in found} == {4}
    for each in found:
        assert all(
            0 <= layer < 8
            for kind in ("attention", "mlp")
            for layer in each.way.draft_options[kind]
        )
    tried = [Tried(frozenset(range(size)), value) for size, value in ((4, 1.0), (4, 2.0), (5, 3.0))]
    (of_four,) = skipsets.of_sizes(tried, 8, "grown")
    assert of_four.sets == 2 and of_four.left_out == 4
    many = [Tried(frozenset({at % 16}), float(at)) for at in range(60)]
    (after,) = skipsets.of_counts(many, 8, "gp-timed")
    assert after.sets == 50 and after.way == skipsets.left_out([1], [])


def test_the_deep_models_best_set_is_what_was_damped() -> None:
    """A known best that is not the best: a damped half that matters, or another that does not."""
    llm = skipsets.loaded(skipsets.DEEP, 1)

    def kept(attention: Sequence[int], mlp: Sequence[int]) -> float:
        way = skipsets.left_out(attention, mlp, 8)
        stats = llm.generate([70, 81], max_new_tokens=40, eos=[], **way.options).stats
        return stats.accepted / stats.drafted

    assert kept(skipsets.ATTENTION, skipsets.MLP) == 1
    assert kept([*skipsets.ATTENTION, 20], skipsets.MLP) < 0.9
    assert kept(skipsets.ATTENTION, [5, *skipsets.MLP]) < 0.9


def test_a_second_search_adds_to_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that forgets what an earlier one found, or times them in different runs."""
    llm = tiny_llm()
    monkeypatch.setattr(skipsets, "loaded", lambda model, threads: llm)
    sets = {"grown": skipsets.left_out([1], [2]), "tpe": skipsets.left_out([2], [1])}
    monkeypatch.setattr(
        skipsets, "searched", lambda llm, name, *_: [skipsets.Searched(name, 3, sets[name])]
    )
    out = tmp_path / "s.json"
    for search in sets:
        skipsets.skipsets("tiny", search, 0.1, 6, "", 1, 1, 1, out)
    run = read(skipsets.SkipsetsRun, out)
    assert {each.search for each in run.found} == {"grown", "tpe", *skipsets.PLACES}
    assert all(each.way.measured for each in run.found) and not run.compared
    assert "| tpe " in capsys.readouterr().out


def test_searches_are_compared_in_the_same_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slower of two called the faster, a search that found nothing counted as the slow set it
    named, its own or the other's, or one that is praised for a set that it did not choose."""
    speeds = {"known": 2.0, "grown": 1.9, "gp-timed": 0.8, "gp-timed after 50": 0.9, "x": 0.5}
    llm, found = (
        tiny_llm(),
        [
            skipsets.Searched(name, 1, skipsets.left_out([number], []))
            for number, name in enumerate(speeds)
        ],
    )
    seconds = {str(each.way): 1 / speeds[each.search] for each in found}
    monkeypatch.setattr(
        Trials, "_answer", lambda self, ids, way: ([[1]], seconds[str(way)] if way else 1.0)
    )
    taken: list[int] = []
    own = Trials.turn
    monkeypatch.setattr(
        Trials, "turn", lambda self, ways: taken.append(len(ways)) or own(self, ways)
    )
    timed, compared = skipsets.timed(Trials(llm, [[5], [6]], 64), found, 1, 2)
    assert [each.way.measured for each in timed] == pytest.approx(list(speeds.values()))
    ratios = {(each.first, each.second): each.ratio for each in compared}
    assert ratios == pytest.approx({("grown", "gp-timed"): 1.9, ("grown", "known"): 0.95})
    assert taken == [5, 3, 3]
    seconds[str(found[1].way)] = 2.0
    _, compared = skipsets.timed(Trials(llm, [[5], [6]], 64), found, 1, 0)
    assert compared[1].ratio == pytest.approx(0.5), "none of its ways pays: it is plain decoding"
    assert compared[0].ratio == pytest.approx(1.0), "both found plain decoding"


def test_every_drafter_stands_beside_the_profile_at_its_defaults() -> None:
    """Drafters that have nothing to draft with, timed as if that said anything."""
    found = list(skipsets.at_their_defaults(tiny_llm()))
    names = {each.way.draft for each in found}
    assert {"auto", "hybrid", "ngram", "early-exit", "layer-skip"} <= names
    assert not names & {"scripted", "draft-model"}
    assert all(each.search == f"default {each.way.draft}" for each in found)
