"""Draft & Verify's tables 11 and 12: masks are exact, Wanda's criterion is its formula, and a table
of copies counts what drafts by and for copies bring."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.paper.copies import copy_of, input_norms
from benchmarks.paper.copies_run import figures
from benchmarks.paper.masks import Mask, best_half
from benchmarks.paper.report import markdown
from benchmarks.paper.result import CopyTurn, PaperResult, key_of
from benchmarks.paper.run import Measuring, sources_of
from benchmarks.paper.table import PaperTable, find_table
from selfspec import LLM
from selfspec.bench.schema import read, write
from selfspec.bench.suite_run import Wishes
from selfspec.errors import OptionError
from selfspec.testing import tiny_llm, tiny_model, tiny_tokenizer

needs_kernels = pytest.mark.skipif(
    tiny_llm().model.ops.kernel != "native", reason="copies need our kernels"
)
WEIGHT = torch.tensor([[1.0, -8, 2, 0, 3, 3, -3, 3], [1, 2, 3, 4, 90, 80, 70, 60]])


@pytest.mark.parametrize(
    ("mask", "kept"),
    [
        ("magnitude unstructured", "0100110000011111"),
        ("magnitude 4:8", "0100111000001111"),
        ("magnitude 2:4", "0110110000111100"),
        ("wanda unstructured", "1100011010000111"),
        ("wanda 2:4", "1100011010010110"),
    ],
)
def test_masks_keep_the_better_half(mask: str, kept: str) -> None:
    """A mask that keeps the lesser half, compares weights across the wrong neighbours, forgets a
    sign, or keeps more than half of equal ones."""
    norms = torch.tensor([100.0, 1, 1, 1, 0.5, 2, 2, 1])
    masked = Mask.parse(mask)(WEIGHT, norms if mask.startswith("wanda") else None)
    places = torch.tensor([int(each) for each in kept], dtype=torch.bool).view(2, 8)
    assert torch.equal(masked, torch.where(places, WEIGHT, torch.zeros(())))


@pytest.mark.parametrize(("pattern", "group"), [("4:8", 8), ("2:4", 4), ("unstructured", 32)])
def test_exactly_half_of_every_group_stays(pattern: str, group: int) -> None:
    """N:M is a promise about every group; equal weights are no excuse."""
    weight = torch.randint(1, 4, (5, 32), generator=torch.Generator().manual_seed(0)).float()
    masked = Mask.parse(f"wanda {pattern}")(weight, torch.ones(32))
    counts = (masked != 0).view(-1, group).sum(1)
    assert counts.tolist() == [group // 2] * (160 // group)
    kept = torch.where(masked != 0, weight, torch.full((), 9.0)).view(-1, group).amin(1)
    dropped = torch.where(masked == 0, weight, torch.zeros(())).view(-1, group).amax(1)
    assert (kept >= dropped).all()


def test_an_odd_group_keeps_the_larger_half() -> None:
    """Half of three is not one: the paper's ratio is of what is dropped."""
    assert best_half(torch.tensor([[3.0, 1, 2]]), 3).tolist() == [[True, False, True]]


@pytest.mark.parametrize("text", ["size 2:4", "wanda 3:4", "wanda"])
def test_unknown_masks_are_named(text: str) -> None:
    """A typo in a table must not become another mask."""
    with pytest.raises(OptionError, match="there is no mask"):
        Mask.parse(text)


def test_a_width_without_whole_groups_is_refused() -> None:
    """Otherwise the last group would run over the end of the row into the next one."""
    with pytest.raises(OptionError, match="6 inputs has no whole groups of 4"):
        Mask.parse("magnitude 2:4")(torch.ones(2, 6))


@needs_kernels
def test_norms_of_inputs_are_those_of_transformers() -> None:
    """Wanda's criterion with another product's inputs would still give a mask. Compared with what
    the modules of the reference receive, in the order in which copies are made."""
    reference = tiny_model()
    seen: dict[str, torch.Tensor] = {}

    def hook(name: str) -> Callable[..., None]:
        def keep(module: Any, given: Any) -> None:
            seen[name] = given[0].flatten(0, -2).square().sum(0).sqrt()

        return keep

    names = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
    for index, layer in enumerate(reference.model.layers):
        for name in names:
            layer.get_submodule(name).register_forward_pre_hook(hook(f"{index} {name}"))
    ids = list(range(3, 60))
    reference(torch.tensor([ids]))
    norms = input_norms(LLM.from_pretrained(tiny_model()).model, ids)
    assert len(norms) == 4 * len(reference.model.layers) == len(seen)
    for place, norm in norms.items():
        expected = seen[f"{place // 4} {names[place % 4]}"]
        assert torch.allclose(norm, expected, rtol=1e-3), place


@needs_kernels
def test_copies_have_other_products_and_the_models_own_head() -> None:
    """Draft & Verify leaves the head alone; a mask that was computed and not used would accept
    everything."""
    model = tiny_llm().model
    norms = input_norms(model, list(range(3, 40)))
    copy = copy_of(model, "wanda 2:4", norms)
    assert copy.head_product is model.head_product and copy.embedding is model.embedding
    for place, (masked, whole) in enumerate(
        zip(copy.linears[:-1], model.linears[:-1], strict=True)
    ):
        weight = whole.rows(torch.arange(whole.outputs))
        expected = Mask.parse("wanda 2:4")(weight, norms[place])
        assert torch.equal(masked.rows(torch.arange(whole.outputs)), expected)
        assert not torch.equal(expected, weight)
    small = copy_of(model, "int8")
    assert small.head_product is model.head_product
    assert sum(each.bytes for each in small.linears) < sum(each.bytes for each in model.linears)
    with pytest.raises(OptionError, match="there is no copy 'int7'"):
        copy_of(model, "int7")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, questions and a calibration text."""
    folder = tmp_path_factory.mktemp("copies")
    tiny_model(hidden_size=64, intermediate_size=128).save_pretrained(folder / "tiny")
    tiny_tokenizer().save_pretrained(folder / "tiny")
    rows = [
        {"question_id": number, "category": name, "turns": [f"Sum up {number}"]}
        for number, name in enumerate(("summarization", "qa", "summarization"))
    ]
    (folder / "q.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    (folder / "text.txt").write_text("some words in a row\n" * 20, encoding="utf-8")
    return folder


def measuring(files: Path, table: PaperTable, out: Path, **changes: Any) -> Measuring:
    tasks = [f"spec-bench={files / 'q.jsonl'}"]
    tasks += [f"text={files / 'text.txt'}"] if "12" in table.name else []
    wishes = Wishes(str(files / "tiny"), tasks, sample=2, new_tokens=8, threads=1)
    return Measuring(table, wishes, None, "scripts/bench paper", out, lambda _: None, **changes)


def no_suite(_: Any) -> None:
    raise AssertionError("nothing here is for the harness")


@needs_kernels
@pytest.mark.parametrize("name", ["dv-table11", "dv-table12"])
def test_a_table_of_copies_is_counted_and_goes_on(files: Path, tmp_path: Path, name: str) -> None:
    """A row without figures; a row measured with another's copy; questions of other tasks; what was
    counted already counted again."""
    out, table = tmp_path / f"{name}.json", find_table(name)
    timed = name == "dv-table11"
    write(measuring(files, table, out, timed=timed).measure(no_suite), out)
    result = read(PaperResult, out)
    assert set(result.turns) == {key_of(row) for row in table.rows} == set(result.values)
    asked = {turn.question for turns in result.turns.values() for turn in turns}
    assert asked == {"summarization/0", "summarization/2"}
    whole = next(row for row in table.rows if not row.copy and row.method == "plain")
    full = result.values[key_of(whole)]["memory, MB"]
    for row in table.rows:
        values = result.values[key_of(row)]
        drafting_copy = str(row.method).startswith("copy")
        assert (values["memory, MB"] > full) == drafting_copy or row.copy.startswith("wanda")
        assert ("accepted" in values) == (row.method != "plain")
        assert ("speedup" in values) == timed and ("ms/token" in values) == timed
    text = markdown(result)
    assert ("no kernel" in text) == ("No times were taken" in text) == (not timed)
    del result.turns[key_of(table.rows[-1])]
    kept = dict(result.turns)
    result.complete = False
    write(result, out)
    again = measuring(files, table, out, timed=timed).measure(no_suite)
    assert len(again.turns[key_of(table.rows[-1])]) == 2
    assert {key: again.turns[key] for key in kept} == kept


@needs_kernels
def test_a_copy_that_is_the_model_is_always_right(files: Path, tmp_path: Path) -> None:
    """Drafts by the copy of a row, not by the model's own or another's: float32 accepts all, and
    the text stays the model's."""
    table = find_table("dv-table11")
    row = replace(table.rows[-1], copy="float32", name="same")
    out = tmp_path / "t.json"
    result = measuring(files, replace(table, rows=(table.rows[0], row)), out).measure(no_suite)
    assert result.values[key_of(row)]["accepted"] == 1
    counts = [sum(turn.decoded for turn in turns) for turns in result.turns.values()]
    assert counts[0] == counts[1] > 0


def test_figures_of_turns() -> None:
    """A mean of shares instead of the share; a ratio upside down; questions that only one has."""
    drafts = [CopyTurn("a", 10, 9, 2, 11, 1.1), CopyTurn("b", 30, 3, 10, 13, 2.6)]
    plain = [CopyTurn("a", 0, 0, 11, 11, 2.2), CopyTurn("b", 0, 0, 13, 13, 5.2)]
    found = figures(drafts, [*plain, CopyTurn("c", 0, 0, 1, 1, 9.0)])
    assert found["accepted"] == 0.3 and found["tokens a round"] == 2
    assert found["ms/token"] == pytest.approx(150)
    assert found["speedup"] == pytest.approx((0.2 + 0.4) / (0.1 + 0.2))
    untimed = [CopyTurn("a", 10, 9, 2, 11, None)]
    assert set(figures(untimed, plain)) == {"accepted", "tokens a round"}
    assert figures([CopyTurn("a", 0, 0, 0, 0, 0.1)], plain) == {}


def test_what_a_table_of_copies_needs(tmp_path: Path, files: Path) -> None:
    """Rows that would stay empty, and times that would be left out of a table of times."""
    with pytest.raises(OptionError, match="also needs --task text=FILE"):
        sources_of(find_table("dv-table12"), ["spec-bench=q.jsonl"])
    with pytest.raises(OptionError, match="give --task spec-bench=FILE"):
        sources_of(find_table("dv-table11"), [])
    with pytest.raises(OptionError, match="dv-table5 is a table of times"):
        measuring(files, find_table("dv-table5"), tmp_path / "x.json", timed=False)
