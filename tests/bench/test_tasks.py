"""What is asked: prompts out of the raw formats of the known tasks, fixed samples, and files with
bad lines."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from selfspec.bench.suite_run import Words, fitted
from selfspec.bench.tasks import CHARACTERS_A_TOKEN, TASKS, Item, known_tasks, read_task
from selfspec.core import text_rows as rows
from selfspec.errors import DataError, OptionError, Unavailable
from selfspec.testing import tiny_tokenizer

RAW: dict[str, list[dict[str, Any]]] = {
    "spec-bench": [
        {"question_id": n, "category": "qa", "turns": [f"question {n}", "second"]} for n in range(6)
    ],
    "humaneval": [
        {
            "task_id": f"HumanEval/{n}",
            "prompt": f"def f{n}():\n",
            "test": "t",
            "entry_point": f"f{n}",
        }
        for n in range(6)
    ],
    "gsm8k": [{"question": f"How many {n}?", "answer": "#### 4"} for n in range(6)],
    "mmlu": [
        {"question": f"Which {n}?", "subject": "s", "choices": ["u", "v", "w", "x"], "answer": 2}
        for n in range(6)
    ],
    "commonsense-qa": [
        {
            "id": str(n),
            "question": f"Where {n}?",
            "choices": {"label": ["A", "B", "C"], "text": ["u", "v", "w"]},
            "answerKey": "B",
        }
        for n in range(6)
    ],
    "sst2": [{"idx": n, "sentence": f"a fine film {n} ", "label": 1} for n in range(6)],
    "mbpp": [
        {"task_id": n, "text": f"Write {n}.", "code": "x", "test_list": ["assert a", "assert b"]}
        for n in range(6)
    ],
    "cnn-dm": [
        {"id": str(n), "article": f"Long {n}", "highlights": f"short\n{n}"} for n in range(6)
    ],
    "xsum": [{"id": str(n), "document": f"Long {n}", "summary": f"short {n}"} for n in range(6)],
    "jsonl": [{"prompt": f"own {n}"} for n in range(6)],
}
REPLY = "Reply with 'The answer is' and the letter."
SENTIMENT = "What is the sentiment of this sentence?"


def write(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text(
        "\n".join(
            row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows
        )
        + "\n"
    )
    return path


@pytest.mark.parametrize("name", TASKS)
def test_raw_rows_become_prompts(tmp_path: Path, name: str) -> None:
    """Catches a task whose published format is not read, an answer that gets into the prompt, and
    gold that is lost."""
    (asked,) = read_task(f"{name}={write(tmp_path / 'q.jsonl', RAW[name])}", 2)
    assert asked.sample.questions == len(asked.items) == 2 and asked.sample.source == "q.jsonl"
    first = asked.items[0]
    row = 1 if name == "cnn-dm" else 0  # the first is the example
    said = {
        "spec-bench": "question 0",
        "humaneval": "def f0():\n",
        "gsm8k": "How many 0?",
        "cnn-dm": "Article: Long 0\nSummary: short 0\n\nArticle: Long 1\nSummary:",
        "xsum": "Article: Long 0\nSummary:",
        "mmlu": f"Which 0?\nA. u\nB. v\nC. w\nD. x\n{REPLY}",
        "commonsense-qa": f"Where 0?\nA. u\nB. v\nC. w\n{REPLY}",
        "sst2": f"{SENTIMENT}\na fine film 0\nA. negative\nB. positive\n{REPLY}",
        "jsonl": "own 0",
    }
    if name == "mbpp":
        assert (
            "Write 0." in first.text
            and "assert a\nassert b" in first.text
            and '"x"' not in first.text
        )
    else:
        assert first.text == said[name]
    choices = {
        "mmlu": (("u", "v", "w", "x"), "C"),
        "commonsense-qa": (("u", "v", "w"), "B"),
        "sst2": (("negative", "positive"), "B"),
    }
    assert first.chat == (name in ("spec-bench", "gsm8k", "jsonl", *choices))
    if name in choices:
        assert (first.gold["choices"], first.gold["answer"]) == choices[name]
    elif name != "spec-bench":
        assert dict(first.gold) == RAW[name][row]


def test_summaries_of_spec_bench_are_those_of_cnn_dm(tmp_path: Path) -> None:
    """Questions of other kinds asked as articles, and an article with its order before it."""
    rows = [
        {
            "question_id": n,
            "category": kind,
            "turns": [f"Summarize: Long {n}"],
            "reference": [f"{n}"],
        }
        for n, kind in enumerate(["qa", "summarization", "math", "summarization"])
    ]
    (asked,) = read_task(f"cnn-dm={write(tmp_path / 'question.jsonl', rows)}", 2)
    (item,) = asked.items
    assert item.text == "Article: Long 1\nSummary: 1\n\nArticle: Long 3\nSummary:"
    assert item.id == "cnn-dm/3" and item.gold["highlights"] == "3" and not item.chat
    del rows[3]["reference"]
    with pytest.raises(OptionError, match="line 4: not a row of cnn-dm"):
        read_task(f"cnn-dm={write(tmp_path / 'question.jsonl', rows)}", 2)


def test_the_sample_is_fixed_spread_and_named(tmp_path: Path) -> None:
    """Catches a sample of the first few, one that changes, and two samples of one name."""
    rows = [{"question_id": n, "category": "qa", "turns": [str(n)]} for n in range(10)]
    rows += [
        {"question_id": 90 + n, "category": kind, "turns": ["x"]}
        for n, kind in enumerate(["writing", "math", "stem"])
    ]
    file = write(tmp_path / "q.jsonl", rows)
    qa, conversation = read_task(f"spec-bench={file}", 2)
    assert [item.id for item in (*qa.items, *conversation.items)] == [
        "qa/0",
        "qa/5",
        "conversation/90",
        "conversation/91",
    ]
    assert qa == read_task(f"spec-bench={file}", 2)[0] and (qa.sample.questions, qa.sample.of) == (
        2,
        10,
    )
    names = {read_task(f"spec-bench={file}", count)[0].sample.name for count in (1, 2, 0)}
    rows[5]["turns"] = ["another"]
    names.add(read_task(f"spec-bench={write(file, rows)}", 2)[0].sample.name)
    assert len(names) == 4 and all(name.startswith("qa-") for name in names)


def test_folders_and_gzipped_files(tmp_path: Path) -> None:
    """Catches data sets that must be unpacked or renamed first."""
    with gzip.open(tmp_path / "HumanEval.jsonl.gz", "wt") as file:
        file.write(json.dumps(RAW["humaneval"][0]))
    assert read_task(f"humaneval={tmp_path}")[0].items[0].id == "HumanEval/0"
    with pytest.raises(OptionError, match=r"no mbpp\.jsonl"):
        read_task(f"mbpp={tmp_path}")


@pytest.mark.parametrize(
    "bad",
    [
        "{",
        "[1]",
        '{"question_id": 1}',
        '{"question_id": 1, "category": "qa", "turns": []}',
        '{"question_id": 1, "category": "qa", "turns": [" "]}',
    ],
)
def test_a_bad_line_is_named_or_left_out_aloud(tmp_path: Path, bad: str) -> None:
    """Catches questions that are left out silently, so that two runs are not of the same sample,
    and a file given up for one."""
    file = write(tmp_path / "q.jsonl", [RAW["spec-bench"][0], bad, RAW["spec-bench"][2]])
    with pytest.raises(OptionError, match=r"q\.jsonl, line 2: .*--skip-bad"):
        read_task(f"spec-bench={file}")
    (asked,) = read_task(f"spec-bench={file}", skip_bad=True)
    assert [item.id for item in asked.items] == ["qa/0", "qa/2"]
    assert len(asked.sample.skipped) == 1 and "line 2" in asked.sample.skipped[0]


def test_line_separators_inside_a_string_are_no_lines(tmp_path: Path) -> None:
    """Catches U+2028 in an ordinary news text taken for the end of a line of JSON."""
    file = write(tmp_path / "q.jsonl", [{"document": f"a{chr(0x2028)}b", "summary": "s"}])
    (asked,) = read_task(f"xsum={file}")
    assert asked.items[0].text == "Article: a\u2028b\nSummary:"


def test_a_file_without_a_question_is_refused(tmp_path: Path) -> None:
    """Catches an empty table where the path was wrong."""
    for text, words in (
        ("xsum=" + str(tmp_path / "none"), "no file 'none'"),
        (f"xsum={write(tmp_path / 'q', [])}", "no question"),
        ("jsonl", "jsonl=PATH"),
        ("long", "long=PATH"),
    ):
        with pytest.raises(OptionError, match=words):
            read_task(text)
    (tmp_path / "b.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="cannot be read as text"):
        read_task(f"xsum={tmp_path / 'b.jsonl'}")
    with pytest.raises(OptionError, match="--sample -1"):
        read_task("xsum=x", -1)


def test_unknown_tasks_name_the_nearest() -> None:
    """Catches a task that is silently another one."""
    with pytest.raises(OptionError, match="no task 'gsm8'; did you mean 'gsm8k'"):
        read_task("gsm8=x")
    assert set(known_tasks()) == {*TASKS, "long"}


def test_long_contexts_are_cut_to_their_length(tmp_path: Path) -> None:
    """Catches prompts that leave no room for the answer, and windows that are all the same."""
    file = tmp_path / "t.txt"
    file.write_text(" ".join(str(n) for n in range(40_000)))
    short, longer = read_task(f"long={file}", 3, contexts=(512, 1024))
    assert (short.sample.task, longer.sample.task) == ("long-512", "long-1024")
    assert len({item.text for item in short.items}) == 3 and all(
        len(i.text) == 512 * CHARACTERS_A_TOKEN for i in short.items
    )
    assert fitted(short.items[0], list(range(2000)), 8192, 100) == (list(range(412)), 0)
    with pytest.raises(OptionError, match="needs 1024 positions and this model has 1000"):
        fitted(longer.items[0], list(range(2000)), 1000, 100)
    with pytest.raises(OptionError, match="only 300 tokens"):
        fitted(short.items[0], list(range(300)), 8192, 100)


def test_questions_that_are_too_long_lose_their_beginning() -> None:
    """Catches a prompt that fills the context, and a cut that nobody is told of."""
    item = Item("qa", "qa/1", "x", True)
    assert fitted(item, list(range(50)), 40, 10) == (list(range(20, 50)), 20)
    assert fitted(item, list(range(30)), 40, 10) == (list(range(30)), 0)


def test_chat_is_for_questions_and_models_with_a_template() -> None:
    """Catches code that is put into a template, and a question that a base model is asked through
    none."""
    tokenizer = tiny_tokenizer()
    words = Words(tokenizer, 64, 4, [2])
    tokenizer.chat_template = "{{ messages[0]['content'] }} answer"
    question, code = (
        Item("qa", "qa/1", "once upon", True),
        Item("humaneval", "h/1", "once upon", False),
    )
    assert (
        len(words.encode(question)) > len(words.encode(code))
        and words.chats(question)
        and not words.chats(code)
    )
    tokenizer.chat_template = None
    assert words.encode(question) == words.encode(code) and not words.chats(question)


def test_the_hub_is_asked_for_the_right_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a wrong split, an example taken from the test split, and an error that leaves out the
    way without a network."""
    asked: list[str] = []

    def read(source: str) -> Iterator[tuple[str, dict[str, Any]]]:
        asked.append(source)
        if "xsum" in source:
            raise DataError("the dataset cannot be opened: no route.")
        yield from ((f"{source}:1", row) for row in RAW["cnn-dm"])

    monkeypatch.setattr(rows, "read_rows", read)
    (part,) = read_task("cnn-dm", 2)
    assert part.items[0].text.startswith("Article: Long 0\nSummary: short 0\n\nArticle: Long 0\n")
    assert asked == [
        "hf:abisee/cnn_dailymail#3.0.0@test",
        "hf:abisee/cnn_dailymail#3.0.0@train[:1]",
    ]
    with pytest.raises(Unavailable, match=r"no route\. Or give a file: xsum=PATH"):
        read_task("xsum")
    with pytest.raises(OptionError, match="Spec-Bench; write spec-bench=PATH"):
        read_task("spec-bench")


def test_the_hub_needs_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a missing optional package that is a traceback."""
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(Unavailable, match=r"pip install .*datasets.*Or give a file: gsm8k=PATH"):
        read_task("gsm8k")
