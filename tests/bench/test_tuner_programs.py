"""The programs that hold the tuner against the real thing count and judge rightly."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import costs, probe, skipsets, verdicts, with_profile
from selfspec.bench.schema import read
from selfspec.draft.registry import make_drafter
from selfspec.llm import LLM
from selfspec.model.from_transformers import from_transformers
from selfspec.testing import near_identity_model, tiny_llm
from selfspec.tune import candidates
from selfspec.tune.probe import Probe
from selfspec.tune.rounds import Rounds, scripted
from selfspec.tune.search import Tried
from selfspec.tune.texts import own_texts


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
        assert all(44 <= length <= 44 + 4 * tokens for length in lengths), lengths


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


def test_verdicts_are_judged_by_their_intervals() -> None:
    """Cases that are there twice, an undecided one that counts as right or wrong."""
    cases = list(verdicts.all_cases())
    assert len(cases) == len(set(cases)) >= 24
    case = cases[0]

    def judged(said: str, low: float, high: float) -> bool | None:
        return verdicts.Judged(case, said, "", None, "x", (low + high) / 2, low, high).right

    assert judged("helps", 1.2, 1.4) is True
    assert judged("does not", 1.2, 1.4) is False
    assert judged("helps", 0.8, 1.0) is False
    assert judged("does not", 0.8, 1.0) is True
    assert judged("helps", 1.0, 1.4) is None and judged("undecided", 1.2, 1.4) is None


def test_speeds_are_ratios_of_mean_times(tmp_path: Path) -> None:
    """A mean of ratios, or one upside down."""
    answers = [
        with_profile.Answered("a", str(number), {"plain": plain, "auto": own}, True)
        for number, (plain, own) in enumerate([(4.0, 1.0), (2.0, 2.0)])
    ]
    assert with_profile.speeds(answers, "auto", "plain").startswith("2.00 (")
    assert with_profile.speeds(answers[:1], "auto", "plain") == "4.00"


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
        skipsets.skipsets("tiny", search, 0.1, 6, "", 1, 1, out)
    run = read(skipsets.SkipsetsRun, out)
    assert {each.search for each in run.found} == {"grown", "tpe", *skipsets.PLACES}
    assert all(each.way.measured for each in run.found)
    assert "| tpe " in capsys.readouterr().out
