"""The reuse benchmark: what its rounds and passes do to a tiny model, and its table from numbers
known by heart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from suite_world import PROVENANCE

from benchmarks.near_identity import near_identity_folder
from benchmarks.reuse import Passes, Rounds, measure_cell
from benchmarks.reuse_report import (
    Cell,
    ReuseRun,
    allowed,
    exact,
    markdown,
    rows,
    saved,
    share,
    summary,
    verdict,
)
from selfspec import LLM
from selfspec.bench.schema import read, write
from selfspec.bench.timing import Ratio
from selfspec.errors import OptionError
from selfspec.model.compute.plan import LayerPlan
from selfspec.testing import near_identity_model, tiny_llm, tiny_model

CELL = {
    "batch": 2,
    "tokens": 3,
    "with_reuse": [0.090, 0.091, 0.089, 0.090],
    "without_reuse": [0.100, 0.101, 0.099, 0.100],
    "verify": [0.050, 0.050, 0.052, 0.050],
    "decode": [0.010, 0.010, 0.012, 0.010],
    "early_block": [0.013, 0.013, 0.013, 0.013],
    "early_one": [0.003, 0.003, 0.003, 0.003],
    "drafted": 40,
    "accepted": 30,
    "identical": True,
}


def a_run(**changes: Any) -> ReuseRun:
    cells = [Cell(**{**CELL, **changes})]
    return ReuseRun(PROVENANCE, "m", 0.5, "native", "float32", 8, 2, cells, complete=True)


def test_the_arithmetic_of_a_round() -> None:
    """Catches a saving with the wrong sign, and an allowance that forgets E/L or the minus 1 of (v
    - 1)."""
    cell = a_run().cells[0]
    assert saved(cell) == pytest.approx([0.010] * 4)
    assert allowed(cell, 2 / 8) == pytest.approx([0.010] * 4), (
        "2/8 of 40 ms: (E/L) (v - 1) steps of 10 ms with v = 5"
    )
    assert exact(cell) == pytest.approx([0.010] * 4)
    (row,) = rows(a_run())
    assert (row.formula_share.value, row.exact_share.value) == pytest.approx((1.0, 1.0))
    assert row.v == pytest.approx(5.0) and row.acceptance == 0.75


def test_reuse_that_saves_nothing_is_called_missed() -> None:
    """Catches a report that cannot say no: variants of the same speed where a tenth of a round
    could be saved."""
    (row,) = rows(a_run(with_reuse=CELL["without_reuse"]))
    assert row.exact_share.value == 0
    assert verdict(row.exact_share, row.exact / row.round) == "missed"
    assert "missed" in markdown(
        a_run(with_reuse=CELL["without_reuse"])
    ) and "reached" not in markdown(a_run(with_reuse=CELL["without_reuse"]))
    assert "reached" in markdown(a_run())


def test_a_saving_nobody_could_see_gets_no_verdict() -> None:
    """Catches quoting 300% or -200% of next to nothing as a success or a failure."""
    assert verdict(Ratio(3.0, 2.0, 4.0), 0.002) == "too little to tell"
    assert verdict(Ratio(-2.0, -3.0, -1.0), 0.002) == "too little to tell"
    assert verdict(Ratio(0.95, 0.7, 1.2), 0.1) == "within noise"


def test_a_share_is_of_medians() -> None:
    """Catches a mean of quotients, which one round with an allowance near 0 carries off to
    anywhere."""
    pairs = [(0.01, 0.01)] * 9 + [(0.01, 1e-9)]
    assert share(pairs).value == pytest.approx(1.0)
    assert share(pairs).high < 1.1


def test_different_tokens_are_shouted() -> None:
    """Catches a comparison of two variants that did not do the same work."""
    assert markdown(a_run(identical=False)).splitlines()[2].endswith("NO |")
    assert (
        summary(a_run(identical=False))["identical"] is False
        and summary(a_run())["identical"] is True
    )


def test_another_file_is_refused(tmp_path: Path) -> None:
    """Catches tables made of another benchmark's numbers, or of an older format's."""
    file = tmp_path / "r.json"
    for text in (
        "{}",
        '{"kind": "spec", "schema_version": 1}',
        '{"kind": "reuse", "schema_version": 0}',
        "[]",
        "{",
    ):
        file.write_text(text)
        with pytest.raises(OptionError, match="reuse"):
            read(ReuseRun, file)
    with pytest.raises(OptionError, match="no result file"):
        read(ReuseRun, tmp_path / "none.json")
    write(a_run(), file)
    assert read(ReuseRun, file).model == "m"


def test_a_cell_does_the_same_work_in_both_variants() -> None:
    """Catches variants that drift apart (other tokens, or reuse switched off in both), and lists
    out of step."""
    llm = LLM.from_pretrained(near_identity_model(0.8, exit_layer=2, seed=3))
    cell = measure_cell(
        llm.model, [[5, 6, 7, 8], [50, 51, 52, 53]], 2, 3, iter([True, True, False])
    )
    assert cell.identical and cell.drafted >= cell.accepted > 0
    lists = [
        cell.with_reuse,
        cell.without_reuse,
        cell.verify,
        cell.decode,
        cell.early_block,
        cell.early_one,
    ]
    assert {len(seconds) for seconds in lists} == {10}, (
        "the fewest rounds, and as many more as there was time for"
    )
    assert all(second > 0 for seconds in lists for second in seconds)
    computed = {}
    for reuse in (True, False):
        rounds = Rounds(llm.model, [[5, 6, 7, 8]], 2, 3, reuse)
        before = rounds.generation.cache.computed.copy()
        rounds.round()
        [computed[reuse]] = (rounds.generation.cache.computed - before).tolist()  # of one row
    assert computed[True] == [4] * 8, (
        "every layer once for each of 3 drafts and the token before them"
    )
    assert computed[False] == [3 + 4] * 2 + [4] * 6


def test_isolated_passes_leave_the_generation_as_it_was() -> None:
    """Catches a pass whose entries stay in the cache: the generation would go on from a text that
    was never written."""
    model = tiny_llm().model
    disturbed, quiet = (Rounds(model, [[5, 6, 7, 8], [9, 8, 7, 6]], 1, 2, True) for _ in range(2))
    for _ in range(4):
        passes = Passes(model, disturbed.generation)
        before = disturbed.generation.cache.lengths.copy()
        assert (
            passes.seconds(3, model.full_plan, True) > 0
            and passes.seconds(1, LayerPlan(0, 1), False) > 0
        )
        assert (disturbed.generation.cache.lengths == before).all()
        disturbed.round()
        quiet.round()
    assert disturbed.written == quiet.written


def test_a_damped_model_is_the_model_with_late_halves_scaled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches damping of the wrong layers or matrices, by which the exit would change too; and a
    factor that is lost."""
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    tiny_model().save_pretrained(folder)
    damped = near_identity_folder(folder, 2, 0.25)
    old, new = load_file(folder / "model.safetensors"), load_file(damped / "model.safetensors")
    changed = {name for name in old if not torch.equal(old[name], new[name])}
    assert changed == {
        f"model.layers.{layer}.{half}.weight"
        for layer in (2, 3)
        for half in ("self_attn.o_proj", "mlp.down_proj")
    }
    assert all(torch.equal(new[name], old[name] * 0.25) for name in changed)
    assert near_identity_folder(folder, 2, 0.25) == damped != near_identity_folder(folder, 2, 0.5)
    stats = (
        LLM.from_pretrained(near_identity_folder(folder, 2, 0.0))
        .generate(
            [5, 6, 7],
            draft="early-exit",
            draft_options={"layer": 2},
            control="fixed",
            max_new_tokens=12,
            eos=[],
        )
        .stats
    )
    assert stats.acceptance == 1.0, (
        "with nothing left of the late layers the exit is the whole model"
    )


@pytest.mark.parametrize(("layer", "factor"), [(0, 0.5), (4, 0.5), (2, 1.5), (2, -0.1)])
def test_a_damping_outside_the_model_is_refused(tmp_path: Path, layer: int, factor: float) -> None:
    """Catches a copy of the whole model under the name of a damped one, and a model that was
    amplified."""
    tiny_model().save_pretrained(tmp_path)
    with pytest.raises(OptionError, match=str(layer) if factor == 0.5 else "factor"):
        near_identity_folder(tmp_path, layer, factor)
