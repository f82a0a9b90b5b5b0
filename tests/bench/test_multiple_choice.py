"""Questions with choices: files as the hub has them, bad rows, and what an answer says."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.paper.quality import check_answers, judge
from selfspec.bench.multiple_choice import chosen
from selfspec.bench.tasks import read_task
from selfspec.errors import OptionError, Unavailable

ROWS: dict[str, dict[str, Any]] = {
    "mmlu": {"question": "Which?", "choices": ["u", "v", "w", "x"], "answer": 2},
    "commonsense-qa": {
        "question": "Where?",
        "choices": {"label": ["A", "B"], "text": ["u", "v"]},
        "answerKey": "B",
    },
    "sst2": {"sentence": "fine", "label": 0},
}


@pytest.mark.parametrize("name", ROWS)
def test_parquet_is_read_like_jsonl(tmp_path: Path, name: str) -> None:
    """The hub's own files, which are parquet: a list that became another type, a row left out."""
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [ROWS[name], ROWS[name]]
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "q.parquet")
    (ours,) = read_task(f"{name}={tmp_path / 'q.parquet'}")
    (theirs,) = read_task(f"{name}={tmp_path / 'q.jsonl'}")
    assert ours.items == theirs.items and len(ours.items) == 2


def test_parquet_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A traceback of pyarrow's, or of Python's where it is not installed."""
    pytest.importorskip("pyarrow")
    (tmp_path / "q.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(OptionError, match=r"q\.parquet cannot be read as parquet"):
        read_task(f"mmlu={tmp_path / 'q.parquet'}")
    with pytest.raises(OptionError, match=r"there is no file 'r\.parquet'"):
        read_task(f"mmlu={tmp_path / 'r.parquet'}")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(Unavailable, match="pip install pyarrow"):
        read_task(f"mmlu={tmp_path / 'q.parquet'}")


@pytest.mark.parametrize(
    ("name", "wrong", "words"),
    [
        ("mmlu", {"answer": 4}, "the answer 4 is none of 4 choices"),
        ("mmlu", {"answer": True}, "the answer True is none"),
        ("mmlu", {"choices": ["u"], "answer": 0}, "1 choices; a question has 2 to 26"),
        ("mmlu", {"question": " "}, "the question is"),
        ("mmlu", {"choices": 3}, "not a row of mmlu"),
        ("commonsense-qa", {"answerKey": ""}, "a test split has no answers"),
        ("commonsense-qa", {"choices": ["u", "v"]}, "not a row of commonsense-qa"),
        ("sst2", {"label": -1}, "a test split has no labels"),
        ("sst2", {"sentence": None}, "the question is None"),
    ],
)
def test_rows_without_a_right_choice_are_named(
    tmp_path: Path, name: str, wrong: dict[str, Any], words: str
) -> None:
    """An accuracy that counts questions nobody can answer rightly."""
    rows = [ROWS[name], {**ROWS[name], **wrong}]
    file = tmp_path / "q.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    with pytest.raises(OptionError, match=r"line 2: not a row of ") as raised:
        read_task(f"{name}={file}")
    assert words in str(raised.value)
    (asked,) = read_task(f"{name}={file}", skip_bad=True)
    assert len(asked.items) == 1 and len(asked.sample.skipped) == 1


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("The answer is B.", "B"),
        ("The answer is (C), not A.", "C"),
        ("The answer is **D**", "D"),
        ("answer: A", "A"),
        ("Is the answer is A. right? No. The answer is B", "B"),
        ("C. whales", "C"),
        ("I think (B)", "B"),
        ("A fish is what I would say.", "B"),  # the first word is an article
        ("It is a fish", "B"),
        ("A", "A"),
        ("The answer is fish.", "B"),
        ("E. cats", None),
        ("whale or fish", None),
        ("", None),
    ],
)
def test_what_an_answer_names(text: str, letter: str | None) -> None:
    """An article taken for a letter, a letter of no choice, the first of several answers."""
    assert chosen(text, ["whale", "fish", "bird", "dog"]) == letter


def test_accuracy_counts_right_letters() -> None:
    """Letters compared as numbers, or as whole texts."""
    golds = {str(n): {"choices": ("u", "v"), "answer": "B"} for n in range(4)}
    said = ["The answer is B.", "The answer is A.", "B) v", "I do not know"]
    answers = {str(n): [text] for n, text in enumerate(said)}
    assert judge(answers, golds, ("accuracy", "exact match")) == {"accuracy": 0.5}
    check_answers("mmlu", golds, ("accuracy", "exact match"))
