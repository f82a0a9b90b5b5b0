"""`scripts/bench exits` and `exit_figures` on tiny models: a run that was stopped goes on to the
same counts, and tables say what the numbers say."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from suite_world import PROVENANCE

from benchmarks import exit_figures
from benchmarks.exit_figures import FiguresRun, near, shuffled
from benchmarks.exit_figures import markdown as figures_markdown
from benchmarks.exits import Settings, earliest, fresh_run, measure, plan_of
from benchmarks.exits_report import (
    EVERYWHERE,
    PLAIN,
    DraftRow,
    ExitsRun,
    LossyRow,
    Oracle,
    allowed,
    markdown,
    saved_looks,
    saved_of_oracle,
)
from selfspec import LLM
from selfspec.bench.meters import Counter, EnergyMeter
from selfspec.bench.schema import continued, read, write
from selfspec.errors import OptionError
from selfspec.exits.part import find_predictors
from selfspec.testing import near_identity_model, tiny_predictors, tiny_tokenizer
from selfspec.train.exit_fitting import FitOptions, fit, split

PROMPTS = [list(b"once upon a time"), list(b"aXb aXb aXb")]


def counts(run: ExitsRun) -> list[Any]:
    """Everything but seconds."""
    return [
        *([row.name, row.tokens, row.agreed, row.exits, row.looks] for row in run.lossy),
        *([row.name, row.decoded, row.drafted, row.accepted, row.same, row.readings]
          for row in run.drafting),
    ]  # fmt: skip


def test_a_stopped_run_goes_on(tmp_path: Path) -> None:
    """A question that is counted twice or left out after an interruption, or a half-answered one
    that is kept."""
    llm = LLM.from_pretrained(near_identity_model(0.6, seed=2), tokenizer=tiny_tokenizer())
    tiny_predictors(llm.model, candidates=7, seed=3).save(tmp_path / "part")
    found = find_predictors(tmp_path / "part", llm.model)
    settings = Settings(part=tmp_path / "part", questions=2, new_tokens=24, short=True)

    def fresh() -> ExitsRun:
        return fresh_run("tiny", llm, settings, PROMPTS, found, 1)

    whole, target = fresh(), tmp_path / "run.json"
    assert list(measure(llm, PROMPTS, settings, whole, found)) == [0, 1]
    first = fresh()
    next(iter(measure(llm, PROMPTS, settings, first, found)))
    write(first, target)
    second = continued(fresh(), target, plan_of)
    assert second.answered == 1 and counts(second) != counts(whole)
    assert list(measure(llm, PROMPTS, settings, second, found)) == [1]
    assert counts(second) == counts(whole) and len(second.plain_seconds) == 2
    assert all(row.same == row.questions == 2 for row in second.drafting)
    assert any(row.exits and min(row.exits) < 8 for row in second.lossy), "nobody left"
    write(second, target)
    assert counts(read(ExitsRun, target)) == counts(whole)
    other = Settings(part=tmp_path / "part", questions=2, new_tokens=23, short=True)
    with pytest.raises(OptionError, match="new_tokens"):
        continued(fresh_run("tiny", llm, other, PROMPTS, found, 1), target, plan_of)
    best = earliest(llm, PROMPTS, 24, found)
    assert best.layers_of_any <= best.layers <= 8 and best.tokens == 46


def test_energy_is_counted_by_who_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Joules of one way that another is charged with, tokens that are not those of the joules, or
    a run that lost what an earlier sitting counted. The counter here goes up by 3 J a look."""
    llm = LLM.from_pretrained(near_identity_model(0.6, seed=2), tokenizer=tiny_tokenizer())
    tiny_predictors(llm.model, candidates=7, seed=3).save(tmp_path / "part")
    found = find_predictors(tmp_path / "part", llm.model)
    settings = Settings(part=tmp_path / "part", questions=2, new_tokens=24, short=True)
    joules = itertools.count(0, 3_000_000)
    meter = EnergyMeter([Counter("wall", lambda: next(joules), 1e15)], "counted by a wall")
    monkeypatch.setattr(EnergyMeter, "find", lambda *given, **more: meter)
    run = fresh_run("tiny", llm, settings, PROMPTS, found, 1)
    assert list(measure(llm, PROMPTS, settings, run, found)) == [0, 1]
    write(run, tmp_path / "run.json")
    run = read(ExitsRun, tmp_path / "run.json")
    names = [PLAIN, *(row.name for row in run.lossy), *(row.name for row in run.drafting)]
    assert {name: spent.joules for name, spent in run.spent.items()} == dict.fromkeys(names, 6.0)
    said = markdown(run)
    assert "counted by a wall" in said
    rows = [line for line in said.splitlines() if line.startswith("| plain decoding")]
    assert len(rows) == 1 and f"{6 / 48:.3f}" in rows[0], "two answers of 24 tokens"
    none = EnergyMeter([], "not measured: no counter")
    monkeypatch.setattr(EnergyMeter, "find", lambda *given, **more: none)
    run = fresh_run("tiny", llm, settings, PROMPTS, found, 1)
    next(iter(measure(llm, PROMPTS, settings, run, found)))
    assert not run.spent and "Energy: not measured: no counter." in markdown(run)


def a_run() -> ExitsRun:
    run = ExitsRun(PROVENANCE, "m", "native", "float32", 10, 1, 5, 3, {}, "x", 1, [1.0], 4)
    both = LossyRow("SpecEE T1+T2, looks both", 5, 4, -5.0, [9, 9, 9, 9], 8, 4, 4, 0.1, 0.1, [0.8])
    every = LossyRow(EVERYWHERE, 5, 5, -5.0, [8, 8, 8, 8], 32, 4, 4, 0.2, 0.1, [0.5])
    run.lossy = [every, both, LossyRow("confidence 0.9", 5, 5, -5.0, [10, 10, 10, 10], 36, 0, 0)]
    run.lossy[2].decode_seconds = [2.0]
    run.drafting = [DraftRow("dynamic-exit", 1, 1, 4, 6, 3, 28, [0.5])]
    run.oracle = Oracle(7.0, 6.0, 0.9, 4)
    return run


def test_the_table_says_what_was_counted() -> None:
    """Savings turned around, calls compared with the wrong row, a share of all tokens in place of
    the decoded ones."""
    run = a_run()
    assert saved_looks(run, run.lossy[1]) == pytest.approx(0.75)
    assert saved_looks(run, run.lossy[2]) is None
    assert saved_of_oracle(run, run.lossy[1]) == pytest.approx(1 / 3)
    text = markdown(run)
    assert (
        "| SpecEE T1+T2, looks both | 9.00 | 33.3% | 80.0% | 2.72 | 2.0 | 75.0% | 12.5% | 1.25 |  |"
    ) in text
    run.shares = {"layers": 0.2, "head": 0.05}
    assert allowed(run, run.lossy[1]) == pytest.approx(0.25 / (0.18 + 0.05 + 0.025))
    assert "12.5% | 1.25 | 0.98 |" in markdown(run)
    assert "| confidence 0.9 | 10.00 | 0.0% | 100.0% | 2.72 | 9.0 |  |" in text
    assert "| dynamic-exit | 1 of 1 | 50.0% of 6 | 7.0 | 2.00 |" in text
    assert "7.00 layers where" in text and "LOSSY" in text


def test_tokens_near_the_exits_before() -> None:
    """Exits of another text, layers beyond the last one, or a window that holds the token
    itself."""
    exits, texts = torch.tensor([5, 5, 9, 1, 5, 10]), torch.tensor([0, 0, 0, 1, 1, 1])
    (one, two, *_) = near(torch.cat([exits] * 3), torch.cat([texts, texts + 2, texts + 4]), 10)
    assert one["hit"] == pytest.approx(1 / 4)  # 5 after 5; not 9 after 5, 5 after 1, 10 after 5
    assert one["layers"] == pytest.approx((5 + 5 + 3 + 5) / 4)
    assert two["hit"] == 0 and two["layers"] == pytest.approx((5 + 7) / 2)


def test_a_feature_that_tells_all_is_missed() -> None:
    """A shuffle that changes nothing, or that shuffles labels along."""
    dice = torch.Generator().manual_seed(0)
    answer = torch.rand(400, generator=dice) < 0.5
    logits = torch.randn(400, 3, 2, generator=dice)
    logits[..., 0] = torch.where(answer, 4.0, -4.0)[:, None]
    logits[..., 1] = -logits[..., 0]
    samples = {
        "logits": logits, "same": answer[:, None].expand(-1, 3), "text": torch.arange(400),
        "top": torch.zeros(400, 3), "answer": torch.zeros(400),
    }  # fmt: skip
    found = shuffled(fit(samples, FitOptions(hidden=16, epochs=30)), samples)
    assert found["all"]["accuracy"] > 0.95
    lost = [found["all"]["accuracy"] - found[f"without {kind}"]["accuracy"] for kind in
            ("logits", "shares", "change")]  # fmt: skip
    assert max(lost) > 0.05 and abs(lost[2]) < 0.01, "nothing changed from layer to layer"
    run = FiguresRun(PROVENANCE, "m", 4, 400, 40, without=found, near=[])
    assert f"| all | {found['all']['accuracy']:.1%} |" in figures_markdown(run)


def test_widths_without_times_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A time of a busy machine in a table that promises counts only."""
    monkeypatch.setattr(exit_figures, "WIDTHS", (4, 8))
    dice = torch.Generator().manual_seed(0)
    samples = {
        "logits": torch.randn(200, 3, 2, generator=dice), "same": torch.ones(200, 3).bool(),
        "text": torch.arange(200), "top": torch.zeros(200, 3), "answer": torch.zeros(200),
    }  # fmt: skip
    for timed in (True, False):
        rows = exit_figures.widths(split(samples, 0.5), 4, timed)
        assert [row["hidden"] for row in rows] == [4, 8]
        assert all(("microseconds" in row) == timed for row in rows)
        run = FiguresRun(PROVENANCE, "m", 4, 200, 100, widths=rows)
        assert ("not taken" in figures_markdown(run)) != timed
