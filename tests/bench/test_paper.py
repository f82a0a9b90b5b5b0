"""The papers' tables: their specifications hold together, are measured, and stand beside ours."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from suite_world import a_suite

from benchmarks.paper import run as paper_run
from benchmarks.paper.__main__ import tables_known
from benchmarks.paper.inside import STEPS
from benchmarks.paper.quality import MEASURES as QUALITY
from benchmarks.paper.report import cells, markdown, paper_page
from benchmarks.paper.result import PaperResult, key_of
from benchmarks.paper.run import Measuring, sources_of
from benchmarks.paper.table import (
    ELSEWHERE,
    EXITS,
    LOSSY,
    OWN,
    PLAIN,
    SPEED,
    PaperRow,
    PaperTable,
    exit_of,
    find_table,
    tables,
)
from selfspec import LLM
from selfspec.bench.contestants import contestants
from selfspec.bench.layers import Similarities
from selfspec.bench.schema import Answer, Difference, Score, read, write
from selfspec.bench.suite_run import Wishes
from selfspec.bench.tasks import known_tasks
from selfspec.errors import OptionError
from selfspec.testing import tiny_model, tiny_tokenizer
from selfspec.train.data import DataOptions, load_data
from selfspec.train.evaluate import evaluate_exits

SPEEDS = [table for table in tables().values() if table.kind == SPEED]
WANTED = [f"layerskip-table{number}" for number in (1, 2, 4, 5, 6, 10)]
WANTED += [f"dv-table{number}" for number in (1, 2, 3, 4, 5, 7, 10, 11, 12, 13, 15)] + [
    f"asd-table{number}" for number in (1, 3, 4, 5)
]


def test_all_tables_are_there() -> None:
    """A table that was promised and has no specification."""
    assert set(WANTED) <= set(tables())


@pytest.mark.parametrize("table", SPEEDS, ids=lambda table: table.name)
@pytest.mark.parametrize("layers", [4, 30])
def test_every_method_exists_and_fits_any_depth(table: PaperTable, layers: int) -> None:
    """A typo in a drafter's or an option's name, or an exit beyond a shallow model, would end a run
    of an hour."""
    methods = [table.method_of(row, layers) for row in table.rows]
    ours = [method for method in methods if method not in (None, PLAIN, LOSSY)]
    assert ours and not any("{" in str(method) for method in ours)
    assert len(contestants([str(method) for method in ours], [], {}, layers)) == len(set(ours)) + 1
    assert all(1 <= exit_of(row, layers) < layers for row in table.rows if row.exit is not None)


@pytest.mark.parametrize("table", SPEEDS, ids=lambda table: table.name)
def test_every_row_asks_a_known_task_and_every_column_can_be_filled(table: PaperTable) -> None:
    """A column that nothing ever fills, a task that nothing reads, two rows with one name."""
    harness = {"tokens/s", "ms/token", "speedup", "accepted", "draft share", "verify share"}
    assert set(table.measures) <= harness | set(QUALITY)
    assert {row.task for row in table.rows} <= set(known_tasks()) | {OWN, "conversation"}
    assert len({key_of(row) for row in table.rows}) == len(table.rows)
    assert all(row.why for row in table.rows if row.method is None)


@pytest.mark.parametrize(
    ("name", "row", "column", "figure"),
    [
        ("layerskip-table1", "Wikipedia", "7B middle, recipe", "8.12"),
        ("layerskip-table1", "MMLU", "13B last", "55.2"),
        ("layerskip-table2", "self-speculative, d=12", "7B speedup", "1.86x"),
        ("layerskip-table2", "self-speculative, d=6 (13B: E=7, d=4)", "13B accepted", "57.0%"),
        ("layerskip-table5", "self-speculative, E=6 of 24", "1.5B ms/token", "18"),
        ("layerskip-table6", "CNN/DM, E=12 of 24, no reuse", "1.5B ms/token", "185"),
        ("layerskip-table10", "early exit, E=6 of 24", "1.5B exact match", "29.8%"),
        ("dv-table3", "fixed K=2", "13B accepted", "92.4%"),
        ("dv-table4", "adaptive gamma", "13B speedup", "1.57x"),
        ("asd-table3", "ASD", "13B speedup", "1.443x"),
        ("asd-table5", "rules 1 and 2", "13B speedup", "1.179x"),
    ],
)
def test_figures_are_the_papers(name: str, row: str, column: str, figure: str) -> None:
    """A sample of what was copied by hand: a column shifted by one is a wrong claim about
    somebody's work."""
    assert (
        next(each for each in find_table(name).rows if each.name == row).figures[column] == figure
    )


def test_drafts_can_be_replaced_but_not_the_controller() -> None:
    """--methods names halves that a search found; the table's rows go on saying how much to
    draft."""
    table = find_table("dv-table3")
    assert (
        table.method_of(table.rows[0], 30, "layer-skip:profile=x.json")
        == "layer-skip:profile=x.json@fixed:tokens=2"
    )
    reuse = find_table("layerskip-table6")
    assert reuse.method_of(reuse.rows[1], 24) == "early-exit:layer=18,reuse=false@fixed:tokens=7"


@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_other_commands_make_is_named(name: str) -> None:
    """A figure that nobody finds, or a command that is none."""
    title, command = ELSEWHERE[name]
    assert name not in tables() and any(name in line for line in tables_known())
    with pytest.raises(OptionError, match=re.escape(command)):
        find_table(name)
    if command.startswith("scripts/bench "):
        program = Path(paper_run.__file__).parents[1] / command.split()[1]
        files = [program.with_suffix(".py")] if not program.is_dir() else program.glob("*.py")
        text = " ".join(file.read_text().lower() for file in files)
        kind, number = re.findall(r"(table|figure)(\d+)", name)[0]
        said = rf"{kind}s? (\d+ (to|and) )?{number}(?!\d)"
        assert re.search(said, text), title


def test_unknown_tables_and_tasks() -> None:
    """The nearest is named; a task that the table does not ask is no silent extra."""
    with pytest.raises(OptionError, match="did you mean 'layerskip-table2'"):
        find_table("layerskip-tabel2")
    table = find_table("layerskip-table2")
    with pytest.raises(OptionError, match="does not ask the task 'gsm8k'"):
        sources_of(table, ["gsm8k=x"])
    assert sources_of(table, ["xsum=x.jsonl"]) == {"xsum": "xsum=x.jsonl"}
    assert sources_of(table, []) == {task: task for task in ("cnn-dm", "xsum", "humaneval")}
    for name in ("layerskip-table5", "layerskip-table1", "asd-table1"):
        with pytest.raises(OptionError, match="needs files of yours; give --task"):
            sources_of(find_table(name), [])
    assert sources_of(find_table("dv-table13"), ["spec-bench=q"]) == {
        "conversation": "spec-bench=q"
    }


ROWS = (
    PaperRow("qa", "autoregressive", PLAIN, {"7B speedup": "1.00x"}),
    PaperRow(
        "qa",
        "self-speculative",
        "{draft}@fixed:tokens=4",
        {"7B speedup": "1.86x", "7B accepted": "69%"},
    ),
    PaperRow("qa", "early exit", LOSSY, {}, 0.5),
    PaperRow("qa", "another", None, {"7B speedup": "1.5x"}, why="nobody built it"),
)
TABLE = PaperTable(
    "made-up",
    "A paper",
    "A title",
    ROWS,
    ("exact match", "accepted", "speedup", "tokens/s"),
    draft="ngram",
    missing="half of it",
    apart=("everything else",),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny model as the harness finds it."""
    tiny_model().save_pretrained(tmp_path / "tiny")
    tiny_tokenizer().save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "qa.jsonl"
    rows = [
        {"prompt": f"question {number}", "answer": "a text", "id": number} for number in range(4)
    ]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def pretended(prepared: Any) -> None:
    """The harness at work, without peers: made-up seconds; the second question's text differs."""
    speeds = {"selfspec/plain": 1.0, "selfspec/ngram@fixed:tokens=4": 1.5}
    made = a_suite(speeds, tasks=("qa",))
    prepared.run.turns, prepared.run.engines, prepared.run.complete = made.turns, made.engines, True
    prepared.run.answers = [
        Answer("qa", f"qa/{number}", [1], "a  text\n" if number else "wrong") for number in range(4)
    ]
    differing = next(
        t for t in made.turns if t.contestant.endswith("tokens=4") and t.questions == ["qa/3"]
    )
    differing.differences = [Difference("qa/3", 0, text="another")]


def test_a_table_is_measured_and_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: Path, questions: Path
) -> None:
    """Figures of a row under another's name; the lossy row left out; scores counted twice when the
    same command goes on; times of a busy machine in a table that counts."""
    monkeypatch.setattr(
        "benchmarks.paper.table.tables", lambda: {"made-up": replace(TABLE, rows=rows)}
    )
    rows = tuple(replace(row, task=OWN) for row in ROWS)
    wishes = Wishes(str(folder), [f"{OWN}={questions}"], sample=4, new_tokens=6, threads=1)
    out = tmp_path / "made-up.json"
    for _ in range(2):
        work = Measuring(
            find_table("made-up"), wishes, None, "scripts/bench paper", out, lambda _: None
        )
        result = work.measure(pretended)
    ours = result.values[f"{OWN}: self-speculative"]
    assert result.values[f"{OWN}: autoregressive"]["exact match"] == 0.75
    assert (
        ours["exact match"] == 0.5
        and ours["accepted"] == 0.5
        and ours["speedup"] == pytest.approx(1.5)
    )
    early = result.values[f"{OWN}: early exit"]
    assert early["exact match"] == 0 and early["tokens/s"] > 0 and "speedup" not in early
    assert result.runs == ["made-up-jsonl.json"]
    scores = json.loads((tmp_path / result.runs[0]).read_text(encoding="utf-8"))["scores"]
    assert len({(each["contestant"], each["metric"]) for each in scores}) == len(scores) == 4
    write(result, out)
    text = markdown(read(PaperResult, out))
    line = next(line for line in text.splitlines() if "self-speculative" in line)
    assert re.findall(r"[\d.]+[x%]", line)[:5] == ["1.86x", "69%", "50.0%", "50.0%", "1.50x"]
    assert (
        "early exit (ours: E=2 of 4)" in text and "nobody built it" in text and "half of it" in text
    )
    assert "everything else" in paper_page(read(PaperResult, out))
    work = Measuring(find_table("made-up"), wishes, None, "again", out, lambda _: None, timed=False)
    counts = work.measure(pretended)
    assert counts.values[f"{OWN}: self-speculative"] == {"exact match": 0.5, "accepted": 0.5}
    assert counts.values[f"{OWN}: early exit"] == {"exact match": 0} and not counts.runs


def test_sampled_answers_count_for_both(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: Path
) -> None:
    """pass@10 needs ten samples of each question, drawn with different seeds, and pass@1 is of them
    too."""
    drawn: list[dict[str, list[str]]] = []

    def judged(answers: Any, golds: Any, wanted: Any) -> dict[str, float]:
        drawn.append(dict(answers))
        samples = min(map(len, answers.values()))
        return {f"pass@{k}": 0.5 for k in (1, 10) if k <= samples and f"pass@{k}" in wanted}

    monkeypatch.setattr(paper_run, "judge", judged)
    rows = tuple(replace(row, task="humaneval") for row in ROWS[:2])
    table = replace(TABLE, rows=rows, measures=("pass@1", "pass@10"), samples=10, temperature=0.6)
    problems = tmp_path / "HumanEval.jsonl"
    problem = {
        "task_id": "humaneval/0",
        "prompt": "def f(x):\n",
        "entry_point": "f",
        "test": "",
        "canonical_solution": "",
    }
    problems.write_text(json.dumps(problem), encoding="utf-8")

    def sat(prepared: Any) -> None:
        made = a_suite(
            {"selfspec/plain": 1.0, "selfspec/ngram@fixed:tokens=4": 1.5},
            tasks=("humaneval",),
            questions=1,
        )
        prepared.run.turns, prepared.run.engines, prepared.run.complete = (
            made.turns,
            made.engines,
            True,
        )
        prepared.run.answers = [Answer("humaneval", "humaneval/0", [1], "greedy")]

    wishes = Wishes(str(folder), [f"humaneval={problems}"], new_tokens=6, threads=1)
    result = Measuring(table, wishes, None, "", tmp_path / "t.json", lambda _: None).measure(sat)
    assert result.values["humaneval: self-speculative"]["pass@10"] == 0.5
    (texts,) = [found["humaneval/0"] for found in drawn if len(found["humaneval/0"]) == 10][:1]
    assert len(set(texts)) > 1, "all samples were drawn with one seed"


def test_exits_and_halves_of_a_model(tmp_path: Path, folder: Path) -> None:
    """Last and middle exchanged, or attention's figures under MLP; what the paper has no row for is
    added below."""
    text = tmp_path / "wiki.txt"
    text.write_text("some words in a row and more of them\n" * 200, encoding="utf-8")
    choices = tmp_path / "boolq.jsonl"
    choices.write_text(
        json.dumps({"question": "q", "choices": ["a", "b"], "answer": 0}), encoding="utf-8"
    )
    wishes = Wishes(str(folder), [f"text={text}", f"choices={choices}"], threads=1)
    table = find_table("layerskip-table1")
    assert table.kind == EXITS
    result = Measuring(table, wishes, None, "", tmp_path / "t.json", lambda _: None).measure(
        pretended
    )
    found = result.values["perplexity of wiki.txt"]
    llm = LLM.from_pretrained(folder)
    blocks = load_data([text], llm.tokenizer, DataOptions(length=512, held_out=0.5)).held_out
    half, whole = (each.perplexity for each in evaluate_exits(llm.model, blocks, [2, 4]))
    assert found == {
        "last": pytest.approx(whole),
        "middle": pytest.approx(half),
    } and whole != pytest.approx(half)
    assert result.values["choices: BoolQ"]["last"] in (0, 100)
    shown = cells(table, result)
    header, lines = shown.header, shown.rows
    assert lines[-1][0] == "perplexity of wiki.txt" and header[-2:] == ["ours last", "ours middle"]
    assert next(line for line in lines if "BoolQ" in line[0])[-2] in ("0", "100")

    wishes = Wishes(str(folder), [f"text={text}"], threads=1)
    halves = Measuring(
        find_table("asd-table1"), wishes, None, "", tmp_path / "t.json", lambda _: None
    ).measure(pretended)
    ids, similar = (
        llm.tokenizer(text.read_text(encoding="utf-8"))["input_ids"][: 512 - STEPS],
        Similarities(4),
    )
    llm.model.prefill([ids], llm.model.new_cache(1, len(ids)), similar)
    for column, half in (("attention", True), ("MLP", False)):
        assert halves.values["text: mean ACS"][column] == pytest.approx(fmean(similar.means(half)))
        least, most = (
            halves.values[f"text: {name} ACS"][column] for name in ("minimum", "maximum")
        )
        assert -1 <= least < halves.values["text: mean ACS"][column] < most <= 1
        assert halves.values["text: mean time, ms"][column] > 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "no result file"),
        ("{", "not a result"),
        ('{"kind": "paper", "schema_version": 7}', r"holds \('paper', 7\)"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str | None, said: str) -> None:
    """A result of another version would fill other columns."""
    path = tmp_path / "x.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(OptionError, match=said):
        read(PaperResult, path)
    assert Score("a", "b", "c", 1.0, 2).value == 1.0
