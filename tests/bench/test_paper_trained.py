"""Draft & Verify's Table 9: halves are chosen by what their absence costs, drafts are trained on
first tokens of the model's own, and a table that was stopped goes on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.paper import trained_run
from benchmarks.paper.aggressive import Surprise, aggressive, counts
from benchmarks.paper.report import markdown
from benchmarks.paper.result import PaperResult, key_of
from benchmarks.paper.run import Measuring, sources_of
from benchmarks.paper.table import find_table
from benchmarks.paper.trained_run import first_tokens, tokens_of
from selfspec.bench.schema import read, write
from selfspec.bench.suite_run import Wishes
from selfspec.errors import OptionError
from selfspec.model.from_transformers import from_transformers
from selfspec.testing import tiny_model, tiny_tokenizer
from selfspec.train.parts import PartOptions
from selfspec.tune.probe import Text
from selfspec.tune.search import Halves

TABLE = find_table("dv-table9")


def test_as_much_is_left_out_as_in_the_paper() -> None:
    """Counts of another model, nothing left of the attention, or nothing left out at all."""
    assert counts(40) == (30, 13)
    assert counts(30) == (22, 10)
    assert counts(2) == (1, 1)


@pytest.mark.parametrize("exchanges", [0, 12])
def test_halves_that_cost_least_are_left_out(
    monkeypatch: pytest.MonkeyPatch, exchanges: int
) -> None:
    """More of one kind than was asked for, a half that costs much, and two that cost little alone
    and much together, whether or not exchanges would mend it."""
    monkeypatch.setattr("benchmarks.paper.aggressive.EXCHANGES", exchanges)
    layers = 8
    cost = {half: 1.0 + half % 5 for half in range(2 * layers)}
    cost |= {3: 0.1, 4: 0.2}

    def surprise(halves: Halves) -> float:
        return sum(cost[half] for half in halves) + 50.0 * ({3, 4} <= halves)

    attention, mlp = aggressive(layers, surprise, lambda _: None)
    assert (len(attention), len(mlp)) == counts(layers) == (6, 3)
    assert 3 in attention and 4 not in attention
    assert sum(cost[layer] for layer in attention) == pytest.approx(0.1 + 1 + 2 + 1 + 2 + 3)
    of_mlp = sorted(cost[layers + layer] for layer in range(layers))
    assert sorted(cost[layers + layer] for layer in mlp) == of_mlp[:3]


def test_surprise_is_the_loss_of_the_models_own_text() -> None:
    """Tokens of the prompt that count, a text that is off by one, a half that is not left out."""
    reference = tiny_model()
    ids, prompt = [5, 9, 30, 31, 32, 60, 61], 3
    model = from_transformers(tiny_model(), check=False)
    surprise = Surprise(model, [Text(ids, prompt)])

    def loss() -> float:
        logs = reference(torch.tensor([ids])).logits[0].log_softmax(-1)
        return -float(logs[torch.arange(prompt - 1, len(ids) - 1), ids[prompt:]].mean())

    assert surprise(frozenset()) == pytest.approx(loss(), abs=1e-4)
    whole = loss()
    reference.model.layers[1].mlp.down_proj.weight.data.zero_()
    assert surprise(frozenset({model.layers + 1})) == pytest.approx(loss(), abs=1e-4)
    assert loss() != pytest.approx(whole, abs=1e-3)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model and questions."""
    folder = tmp_path_factory.mktemp("trained")
    tiny_model(num_hidden_layers=4).save_pretrained(folder / "tiny")
    tiny_tokenizer().save_pretrained(folder / "tiny")
    rows = [
        {"question_id": number, "category": name, "turns": [f"Tell {number}"]}
        for number, name in enumerate(["summarization", "qa"] * 30)
    ]
    (folder / "q.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return folder


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The table with drafts trained on few tokens, for a moment."""
    options = {how: PartOptions(epochs=1, batch_tokens=400) for how in trained_run.OPTIONS}
    monkeypatch.setattr(trained_run, "OPTIONS", options)
    monkeypatch.setattr(trained_run, "LONGEST", 32)
    monkeypatch.setattr(trained_run, "HELD_OUT", 0.4)
    rows = [
        replace(row, copy=f"{row.copy.split()[0]} {tokens_of(row) // 12}" if row.copy else "")
        for row in TABLE.rows
    ]
    return replace(TABLE, rows=tuple(rows))


def _measuring(files: Path, table: Any, out: Path) -> Measuring:
    tasks = [f"spec-bench={files / 'q.jsonl'}"]
    wishes = Wishes(str(files / "tiny"), tasks, sample=2, new_tokens=12, threads=1)
    return Measuring(table, wishes, None, "scripts/bench paper", out, lambda _: None, timed=False)


def _no_suite(_: Any) -> None:
    raise AssertionError("nothing here is for the harness")


def test_the_table_is_measured_and_goes_on(
    files: Path, tmp_path: Path, small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Questions that are trained on and asked, a draft trained on more than its row says or trained
    again, a row that drafts with another's, turns that are counted twice."""
    out = tmp_path / "t9.json"
    write(_measuring(files, small, out).measure(_no_suite), out)
    result, folder = read(PaperResult, out), tmp_path / "t9"
    keys = [key_of(row) for row in small.rows]
    assert set(result.turns) == set(keys) and all(
        len(turns) == 2 for turns in result.turns.values()
    )
    asked = {turn.question for turns in result.turns.values() for turn in turns}
    text = [json.loads(line) for line in (folder / "own.jsonl").read_text().splitlines()]
    prompts = {row["prompt"] for row in text if "prompt" in row}
    assert not {f"Tell {name.partition('/')[2]}" for name in asked} & prompts
    assert [len(result.halves[kind]) for kind in ("attention", "mlp")] == list(counts(4))
    for row in small.rows:
        values = result.values[key_of(row)]
        assert ("first right" in values) == bool(row.copy)
        assert ("accepted" in values) == (row.method != "plain")
        if row.copy:
            said = json.loads((folder / row.copy.replace(" ", "-") / "part.json").read_text())
            assert said["settings"]["rank"] == (0 if row.copy.startswith("whole") else 16)
            assert {k: said["settings"][k] for k in ("attention", "mlp")} == result.halves
            trained = folder / f"own-{tokens_of(row)}.jsonl"
            rows = [json.loads(line) for line in trained.open()]
            sizes = [len(row["response_ids"]) for row in rows if not trained_run._is_held(row)]
            assert tokens_of(row) <= sum(sizes) < tokens_of(row) + 32
    assert "Left out: attention" in markdown(result) and "1.96x" in markdown(result)
    kept = {key: result.turns[key] for key in keys[:-1]}
    result.turns[keys[-1]], result.complete = result.turns[keys[-1]][:1], False
    write(result, out)
    monkeypatch.setattr(trained_run, "train_small_part", _no_suite)
    again = _measuring(files, small, out).measure(_no_suite)
    assert len(again.turns[keys[-1]]) == 2
    assert {key: again.turns[key] for key in keys[:-1]} == kept


def test_too_few_questions_say_so(files: Path, tmp_path: Path, small: Any) -> None:
    """A draft that is trained on less than its row says."""
    rows = [replace(row, copy="whole 90000") if row.copy else row for row in small.rows]
    measuring = _measuring(files, replace(small, rows=tuple(rows)), tmp_path / "t.json")
    with pytest.raises(OptionError, match="90000 are to be trained on"):
        measuring.measure(_no_suite)
    with pytest.raises(OptionError, match="--task spec-bench=FILE"):
        sources_of(TABLE, [])
    wishes = Wishes(str(files / "tiny"), [f"spec-bench={files / 'q.jsonl'}"])
    with pytest.raises(OptionError, match="would draft in no row"):
        Measuring(TABLE, wishes, "ngram", "", tmp_path / "t.json", lambda _: None)


def test_first_tokens_are_those_of_the_first_answers(tmp_path: Path) -> None:
    """Prompts that count as the model's own tokens, an answer in two, and answers that are held out
    of one row and trained on in another, or counted."""
    text = tmp_path / "own.jsonl"
    rows = [{"prompt_ids": [n] * 9, "response_ids": [2] * 5, "n": n} for n in range(60)]
    text.write_text("\n".join(map(json.dumps, rows)) + "\n")
    held = [row["n"] for row in rows if trained_run._is_held(row)]
    trained = [row["n"] for row in rows if row["n"] not in held]
    assert 0 < len(held) < 20
    for count, first in ((10, 2), (11, 3)):
        kept = [json.loads(line)["n"] for line in first_tokens(text, count).open()]
        assert kept == sorted([*held, *trained[:first]])
