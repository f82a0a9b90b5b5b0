"""SpecEE's Table 4 and Figures 15 and 17: each row decodes as it says, and is counted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import exp
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.paper.leaving import Leaving
from benchmarks.paper.result import PaperResult, key_of
from benchmarks.paper.run import Measuring
from benchmarks.paper.table import PaperRow, PaperTable, find_table
from selfspec import LLM
from selfspec.bench.suite_run import Wishes
from selfspec.testing import near_identity_model, tiny_predictors, tiny_tokenizer

LAYERS, NEW = 8, 12
QUESTIONS = ("once upon a time", "aXb aXb aXb a")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model, predictors for it, and two questions."""
    made = tmp_path_factory.mktemp("leaving")
    near_identity_model(0.6, seed=2).save_pretrained(made / "tiny")
    tiny_tokenizer().save_pretrained(made / "tiny")
    tiny_predictors(loaded(made).model, candidates=7, seed=3).save(made / "tiny" / "exits")
    rows = "".join(json.dumps({"prompt": text}) + "\n" for text in QUESTIONS)
    (made / "q.jsonl").write_text(rows, encoding="utf-8")
    return made


def loaded(folder: Path) -> LLM:
    return LLM.from_pretrained(str(folder / "tiny"), threads=1)


def measured(
    folder: Path, name: str, timed: bool = True, tasks: Sequence[str] = ()
) -> tuple[PaperTable, PaperResult]:
    """A table of the model, with the predictors that come with it."""
    table = find_table(name)
    if not tasks and "jsonl" in table.tasks:
        tasks = [f"jsonl={folder / 'q.jsonl'}"]
    wishes = Wishes(str(folder / "tiny"), tasks, sample=2, new_tokens=NEW, threads=1, chat=False)
    out = folder / f"{name}.json"
    work = Measuring(table, wishes, None, "scripts/bench paper", out, lambda _: None, timed)
    return table, work.measure(lambda _: pytest.fail("nothing here is for the harness"))


def test_table_4_asks_the_whole_model_about_every_answer(folder: Path) -> None:
    """A row that decodes as another one, layers that are not counted, a perplexity of the wrong
    tokens."""
    table, result = measured(folder, "specee-table4")
    rows = {row.name: result.values[key_of(row)] for row in table.rows if row.task == "jsonl"}
    dense = rows["Dense"]
    assert dense["layers"] == LAYERS and dense["agreement"] == 1
    for name in ("AdaInfer", "SpecEE"):
        assert rows[name]["layers"] < LAYERS and rows[name]["agreement"] < 1
        assert rows[name]["perplexity"] > dense["perplexity"]
    assert rows["AdaInfer"] != rows["SpecEE"]
    llm, reference, chances = loaded(folder), near_identity_model(0.6, seed=2), []
    for text in QUESTIONS:
        ids = list(tiny_tokenizer()(text)["input_ids"])
        begin = len(ids)
        ids += llm.generate(ids, draft=None, max_new_tokens=NEW, eos=[]).tokens
        said = reference(torch.tensor([ids])).logits[0].log_softmax(-1)
        chances += [said[at - 1, ids[at]] for at in range(begin, len(ids))]
    assert dense["perplexity"] == pytest.approx(exp(-torch.stack(chances).mean()), rel=1e-4)


def test_table_4_asks_questions_with_choices(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A task whose rows are another's, a measure of letters that is left out, or one row's answers
    judged for all."""
    question = {"question": "q", "choices": ["u", "v"]}
    rows = {
        "mmlu": [{**question, "answer": 0}, {**question, "answer": 1}],
        "sst2": [{"sentence": "s", "label": 1}],
    }
    for name, lines in rows.items():
        text = "\n".join(map(json.dumps, lines))
        (tmp_path / f"{name}.jsonl").write_text(text, encoding="utf-8")
    said = {"Dense": "The answer is A.", "AdaInfer": "", "SpecEE": "B. v"}
    made = Leaving._made

    def answered(self: Leaving, row: PaperRow, ids: Sequence[int], most: int) -> Any:
        result = made(self, row, ids, most)
        text = said[row.name]
        monkeypatch.setattr(self._inside.words.tokenizer, "decode", lambda *a, **k: text)
        return result

    monkeypatch.setattr(Leaving, "_made", answered)
    tasks = [f"{name}={tmp_path / name}.jsonl" for name in rows]
    table, result = measured(folder, "specee-table4", tasks=tasks)
    found = {name: values["accuracy"] for name, values in result.values.items()}
    assert found == {
        "mmlu: Dense": 0.5, "mmlu: AdaInfer": 0, "mmlu: SpecEE": 0.5,
        "sst2: Dense": 0, "sst2: AdaInfer": 0, "sst2: SpecEE": 1,
    }  # fmt: skip
    assert {row.task for row in table.rows} >= {"mmlu", "commonsense-qa", "sst2"}
    assert all("exact match" not in values for values in result.values.values())


def test_figure_15_has_trees_that_leave_early(folder: Path) -> None:
    """Trees without exits in both rows, or times on a machine with other work."""
    table, result = measured(folder, "specee-figure15", timed=False)
    plain, trees, leaving_early = (result.values[key_of(row)] for row in table.rows)
    assert plain["kept a pass"] == 1 < trees["kept a pass"]
    assert leaving_early["kept a pass"] > 1
    assert plain["layers"] == trees["layers"] == LAYERS > leaving_early["layers"]
    assert trees["agreement"] == 1 > leaving_early["agreement"]
    assert not any("tokens/s" in values for values in (plain, trees, leaving_early))


def test_figure_17_counts_what_is_held(folder: Path) -> None:
    """Keys and values of other tokens, or predictors where none are."""
    table, result = measured(folder, "specee-figure17")
    held = {
        (row.method, row.tokens): result.values[key_of(row)]["memory, MB"] for row in table.rows
    }
    model = loaded(folder).model
    token = (model.new_cache(1, 513).bytes - model.new_cache(1, 1).bytes) / 512 / 1e6
    dense, specee = sorted({row.method for row in table.rows}, key="plain".__ne__)
    for method in (dense, specee):
        assert held[method, 512] - held[method, 1] == pytest.approx(511 * token, rel=0.3)
    tensors = tiny_predictors(model, candidates=7, seed=3).tensors
    predictors = sum(each.nbytes for name, each in tensors.items() if "svm" not in name) / 1e6
    assert held[specee, 1] - held[dense, 1] == pytest.approx(predictors, rel=0.2)
