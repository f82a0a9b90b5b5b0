"""The host's benchmark: what it counts as the host's share, and its table by known numbers."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from suite_world import PROVENANCE

from benchmarks.host import SHAPES, HostRun, KindRow, Meter, Rounds, markdown, measure
from selfspec import LLM
from selfspec.engine import streak
from selfspec.model.compute.cpu.native import library
from selfspec.testing import tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def llm() -> LLM:
    model = tiny_model(seed=3, max_position_embeddings=2048)
    return LLM.from_pretrained(model, tokenizer=tiny_tokenizer())


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_only_full_rounds_count_and_passes_are_taken_off(
    llm: LLM, shape: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds of shorter drafts among those of seven, or a pass's own time counted as the host's:
    here every pass sleeps, and the host's share must not hold that."""
    if llm.model.ops.kernel != "native":
        pytest.skip("no C++ compiler found (g++ or clang++)")
    native, asleep = library(), 0.05
    own = {name: getattr(native, name) for name in ("run_model", "run_halves")}

    def slow(name: str, *arguments: Any) -> Any:
        time.sleep(asleep)
        return own[name](*arguments)

    run_rounds = streak.run_rounds

    def slow_rounds(*arguments: Any) -> Any:
        rounds = run_rounds(*arguments)
        time.sleep(asleep * len(rounds))
        return [replace(each, passing=each.passing + asleep) for each in rounds]

    for name in own:
        monkeypatch.setattr(native, name, partial(slow, name))
    monkeypatch.setattr(streak, "run_rounds", slow_rounds)
    into = Rounds(shape.name, shape.tokens)
    measure(llm, shape, 150, into)
    assert len(into.host) == len(into.native)
    if shape.name != "chain":  # a lookup may find nothing in a random model's text
        assert into.native, "no round was measured"
    for beside, inside in zip(into.host, into.native, strict=True):
        assert beside is not None and inside is not None and inside >= asleep
    if shape.name == "tree of both":
        assert len(set(into.host)) < len(into.host), "its rounds go together"
    assert native.run_model.func is slow, "the meter leaves what it found"
    assert streak.run_rounds is slow_rounds


def test_the_meter_counts_native_calls_alone(llm: LLM) -> None:
    """A meter that still counts after its end, or never did."""
    meter = Meter()
    with meter.running():
        llm.generate("abc", max_new_tokens=2, eos=[])
    seconds = meter.seconds
    llm.generate("abc", max_new_tokens=2, eos=[])
    assert meter.seconds == seconds
    assert (seconds > 0) == (llm.model.ops.kernel == "native")


def test_the_table_has_medians() -> None:
    """Host and native seconds in the other's column."""
    rounds = [Rounds("plain", 0, [0.001, 0.003, 0.002], [0.008, 0.010, 0.009])]
    run = HostRun(PROVENANCE, "m", [KindRow("int8", 100, [0.006], rounds)], complete=True)
    [line] = [line for line in markdown(run).splitlines() if line.startswith("| int8")]
    assert [cell.strip() for cell in line.strip("|").split("|")] == [
        "int8", "plain", "3", "2.0", "9.0", "6.0", "1.50"
    ]  # fmt: skip
