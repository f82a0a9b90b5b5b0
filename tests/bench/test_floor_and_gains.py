"""The benchmarks of the floor and of gains on recurrent models: their figures by known numbers."""

from __future__ import annotations

import pytest
from suite_world import PROVENANCE

from benchmarks import floor, gains
from benchmarks.floor import FloorRow, FloorRun, PromptRow, Writers
from benchmarks.gains import GainsRow, GainsRun, WayRow
from benchmarks.shrunken import tiny
from selfspec import LLM
from selfspec.testing import tiny_tokenizer


def cells(table: str, begin: str) -> list[str]:
    [line] = [line for line in table.splitlines() if line.startswith(begin)]
    return [cell.strip() for cell in line.strip("|").split("|")]


def prompt(generate: float, plain: float, auto: float) -> PromptRow:
    seconds = {"generate": [generate] * 2, "plain": [plain] * 2, "auto": [auto / 2, auto * 1.5]}
    return PromptRow(10, False, seconds)


def test_the_floors_table_has_ratios_of_means_and_the_slowest_prompt() -> None:
    """A mean of ratios, or a worst prompt that is the best one."""
    rows = [prompt(1.0, 1.1, 0.9), prompt(3.0, 2.9, 3.6)]
    run = FloorRun(PROVENANCE, 100, [FloorRow("bloom", 2_000_000, "none", rows)], complete=True)
    found = cells(floor.markdown(run), "| bloom")
    assert found == ["bloom (2.0 M)", "1.000", "1.100", "1.125", "1.200", "20.00", "equal"]
    rows[0].differences["auto"] = 3
    assert cells(floor.markdown(run), "| bloom")[-1] == "differ"


@pytest.mark.parametrize("drawn", [False, True])
def test_the_floors_ways_write_the_same_and_a_difference_is_noted(drawn: bool) -> None:
    """Drawn text compared with `generate`'s, whose numbers are drawn otherwise; or nothing compared
    with anything."""
    model = tiny("ctrl")
    with pytest.warns(UserWarning, match="floor"):
        llm = LLM.from_pretrained(model, tokenizer=tiny_tokenizer())
    row = PromptRow(9, drawn)
    writers = Writers(model, llm, list(range(3, 12)), 8, row)
    for contestant in writers.contestants.values():
        assert contestant() > 0
    writers.compare()
    assert row.differences == {} and {len(text) for text in writers.texts.values()} == {8}
    writers.texts["auto"][5] += 1
    writers.compare()
    assert row.differences == {"auto": 5}


def test_what_to_expect_is_tokens_over_costs_in_steps() -> None:
    """A gain the other way round, or an expectation that forgets the drafting."""
    plain = WayRow("plain", 0, [0.010], [0.0], [0.008], decoded=100, rounds=100)
    exits = WayRow("early-exit", 4, [0.005], [0.006], [0.010], 100, drafted=120, rounds=40)
    run = GainsRun(PROVENANCE, 100, [GainsRow("lfm2", 5_000_000, [plain, exits])], complete=True)
    found = cells(gains.markdown(run), "| lfm2")
    assert found == [
        "lfm2 (5 M)", "early-exit, 4", "3.00", "2.50", "2.00", "1.25", "1.60", "equal"
    ]  # fmt: skip
