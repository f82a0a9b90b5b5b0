"""A sweep: what is measured, what is gone on with, and the figures that are made of it."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from suite_world import PROVENANCE

from selfspec import LLM
from selfspec.bench import sweep as sweeping
from selfspec.bench.pictures import draw
from selfspec.bench.prompts import Prompt
from selfspec.bench.schema import continued, read
from selfspec.bench.sweep import Group, Sweeping, estimate, left_out, rank, steps_of
from selfspec.bench.sweep_report import markdown, pictures
from selfspec.bench.sweep_result import (
    Sweep,
    SweepOptions,
    SweepTurn,
    Threshold,
    smoothed,
    speeds,
    unrest,
)
from selfspec.errors import OptionError
from selfspec.testing import tiny_llm, tiny_model, tiny_tokenizer

PROMPTS = [Prompt("first", "first", (5, 6, 7, 8)), Prompt("second", "second", tuple(range(10, 30)))]
OPTIONS = SweepOptions(exits=(1, 3), drafts=(1, 2), skips=(1, 2), new_tokens=6)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return tiny_llm()


def a_sweep(options: SweepOptions = OPTIONS, **changes: Any) -> Sweep:
    values = {
        "provenance": PROVENANCE,
        "model": "tiny",
        "kernel": "native",
        "dtype": "float32",
        "layers": 4,
    }
    values |= {"options": options, "prompts": {prompt.id: len(prompt.ids) for prompt in PROMPTS}}
    return Sweep(**{**values, **changes})


def gone_on_with(run: Sweep, path: Path) -> Sweep:
    return continued(run, path, lambda each: each.plan)


def at_work(llm: LLM, path: Path, options: SweepOptions = OPTIONS) -> Sweeping:
    filled = options.filled(4)
    return Sweeping(llm, gone_on_with(a_sweep(filled), path), PROMPTS, path)


def test_everything_is_measured_next_to_plain_decoding(llm: LLM, tmp_path: Path) -> None:
    """Each cell once a prompt, plain at both ends of each group, all texts identical, and the file
    says that it is complete."""
    work = at_work(llm, tmp_path / "sweep.json")
    for group in work.left:
        work.measure(group, lambda _: None)
    run = read(Sweep, tmp_path / "sweep.json")
    assert run.complete and run.identical
    assert [(cell.first, cell.drafts) for cell in speeds(run, "grid")] == [
        (1, 1),
        (1, 2),
        (3, 1),
        (3, 2),
    ]
    assert [cell.first for cell in speeds(run, "skips")] == [1, 2]
    for key in run.done:
        kinds = [turn.kind for turn in run.turns if turn.group == key]
        assert kinds[0] == kinds[-1] == "plain" and "plain" not in kinds[1:-1] and len(kinds) >= 3
    assert run.gamma and run.gamma[0].threshold == 0.6
    assert {each.prompt for each in run.gamma} == {"first", "second"}
    text = markdown(run)
    assert "Best: exit" in text and "halves left out" in text and "Threshold: from 0.600" in text
    draw("a sweep", pictures(run), tmp_path / "sweep.png")
    assert (tmp_path / "sweep.png").stat().st_size > 10_000


def test_an_interrupted_sweep_goes_on(llm: LLM, tmp_path: Path) -> None:
    """What was done is not measured again, and what the ranking said is not asked again."""
    path = tmp_path / "sweep.json"
    first = at_work(llm, path)
    every = [group.key for group in first.left]
    for group in first.left[:5]:
        first.measure(group, lambda _: None)
    second = at_work(llm, path)
    assert [group.key for group in second.left] == every[5:] and len(set(every)) == len(every)
    assert second.run.ranking == read(Sweep, path).ranking and second.run.ranking
    before = len(second.run.turns)
    second.measure(second.left[0], lambda _: None)
    assert len(read(Sweep, path).turns) > before and not read(Sweep, path).complete


def test_a_file_of_another_sweep_is_left_alone(llm: LLM, tmp_path: Path) -> None:
    """Its numbers would be mixed with ours, or lost."""
    path = tmp_path / "sweep.json"
    work = at_work(llm, path)
    work.measure(work.left[0], lambda _: None)
    before = path.read_text(encoding="utf-8")
    with pytest.raises(OptionError, match="differs in model"):
        gone_on_with(a_sweep(model="other"), path)
    with pytest.raises(OptionError, match="differs in options"):
        gone_on_with(a_sweep(SweepOptions(exits=(2,))), path)
    other = replace(PROVENANCE, cpu="b")
    with pytest.raises(OptionError, match="another machine"):
        gone_on_with(a_sweep(OPTIONS.filled(4), provenance=other), path)
    path.write_text(before.replace('"schema_version": 1', '"schema_version": 9'), encoding="utf-8")
    with pytest.raises(OptionError, match=r"holds \('sweep', 9\)"):
        read(Sweep, path)
    path.write_text("{", encoding="utf-8")
    with pytest.raises(OptionError, match="not a result"):
        read(Sweep, path)


@pytest.mark.parametrize("by", ["cosine", "damage"])
def test_halves_that_do_nothing_are_left_out_first(by: str) -> None:
    """A ranking that is upside down, or mixes up attention and MLP, drafts with the worst choice
    there is."""
    model = tiny_model()
    model.model.layers[2].self_attn.o_proj.weight.data.zero_()
    model.model.layers[1].mlp.down_proj.weight.data.zero_()
    llm = LLM.from_pretrained(model, tokenizer=tiny_tokenizer())
    ranking = rank(llm, [prompt.ids for prompt in PROMPTS], by)
    assert len(ranking) == 8 and {(half.layer, half.attention) for half in ranking[:2]} == {
        (2, True),
        (1, False),
    }
    assert all(abs(half.score) < 1e-5 for half in ranking[:2]) and ranking[2].score > 1e-4
    assert left_out(ranking, 2) == ((2,), (1,))


def test_the_threshold_goes_on_from_prompt_to_prompt(llm: LLM, tmp_path: Path) -> None:
    """Started anew at each prompt, Figure 5 would be a saw."""
    work = at_work(llm, tmp_path / "sweep.json", SweepOptions(parts=("gamma",), new_tokens=12))
    for group in work.left:
        work.measure(group, lambda _: None)
    second = next(index for index, each in enumerate(work.run.gamma) if each.prompt == "second")
    last, first = work.run.gamma[second - 1], work.run.gamma[second]
    assert abs(last.threshold - first.threshold) <= 0.0011 and first.threshold != 0.6


def turn(
    group: str, kind: str, seconds: float, first: int = 0, drafts: int = 0, **more: Any
) -> SweepTurn:
    values = {
        "group": group,
        "part": "grid",
        "prompt": "p",
        "kind": kind,
        "first": first,
        "drafts": drafts,
        "decoded": 10,
    }
    values |= {
        "seconds": seconds,
        "verifications": 5,
        "drafted": 10,
        "accepted": 5,
        "identical": True,
    }
    return SweepTurn(**{**values, **more})


def test_a_cell_is_compared_with_its_own_group() -> None:
    """With the mean of all plain turns instead, a slow minute of the machine would make its cells
    look slow."""
    run = a_sweep()
    run.turns = [
        turn("a", "plain", 1.0),
        turn("a", "grid", 0.5, 1, 2),
        turn("a", "plain", 1.2),
        turn("b", "plain", 4.0),
        turn("b", "grid", 4.0, 3, 2),
        turn("b", "plain", 4.0),
    ]
    found = {cell.first: cell.speedup for cell in speeds(run, "grid")}
    assert found == {1: pytest.approx(2.2), 3: pytest.approx(1.0)}
    assert unrest(run) == pytest.approx((0.2 / 1.1 + 0) / 2)
    assert "NOT" not in markdown(run)
    run.turns[1] = turn("a", "grid", 0.5, 1, 2, identical=False)
    assert "NOT all texts are equal" in markdown(run)


def test_what_gamma_drafts_with_is_the_best_of_the_skips() -> None:
    """And without any measurement a quarter of all halves."""
    run = a_sweep()
    assert sweeping.best_skip(run) == 2
    for count, seconds in ((2, 0.9), (5, 0.5), (7, 2.0)):
        key = f"skips/{count}"
        run.turns += [
            turn(key, "plain", 1.0, part="skips"),
            turn(key, "skips", seconds, count, 12, part="skips"),
            turn(key, "plain", 1.0, part="skips"),
        ]
    assert sweeping.best_skip(run) == 5


def test_the_moving_average_looks_back_only() -> None:
    """A window that looks ahead would show a change before it came."""
    run = a_sweep(gamma=[Threshold("p", value, 1, 1) for value in (0.0, 0.0, 1.0, 1.0)])
    assert [mean for mean, _ in smoothed(run, 2)] == [0.0, 0.0, 0.5, 1.0]


def test_the_estimate_follows_the_arithmetic() -> None:
    """docs/choosing.md: an exit at 8 of 30 whose drafts are all kept, K = 4, costs about 2.7 steps
    for 5 tokens."""
    assert steps_of(0.41, 4, 1.0) == pytest.approx((4 * 0.41 + 1.12) / 5)
    assert estimate([("plain", 0, 0)], 30, 0.02, 50, []) == pytest.approx(1.0)
    slow = estimate([("grid", 8, 8)], 30, 0.02, 50, [0.0] * 31)
    assert slow > estimate([("grid", 8, 8)], 30, 0.02, 50, [0.9] * 31) > 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"parts": ("grids",)}, "did you mean 'grid'"),
        ({"by": "cosines"}, "did you mean 'cosine'"),
        ({"exits": (4,)}, "--exits 4: give numbers from 1 to 3"),
        ({"skips": (8,)}, "--skips 8: give numbers from 1 to 7"),
        ({"drafts": ()}, "--drafts"),
        ({"new_tokens": 1}, "nothing would be timed"),
    ],
)
def test_bad_options(changes: dict[str, Any], said: str) -> None:
    """Found before the model is asked anything."""
    with pytest.raises(OptionError, match=said):
        SweepOptions(**changes).filled(4)


@pytest.mark.parametrize("layers", [2, 3, 4, 12, 30, 80])
def test_every_depth_gets_sensible_defaults(layers: int) -> None:
    """A model of two layers has one exit; 80 layers still have few cells."""
    filled = SweepOptions().filled(layers)
    assert (
        1 <= len(filled.exits) <= 7 and max(filled.exits) < layers and 1 <= len(filled.skips) <= 10
    )
    group = Group("grid", PROMPTS[0], 0, ((filled.exits[0], 1),))
    assert group.key == f"grid/first/0/{filled.exits[0]}" and json.dumps(asdict(filled))
