"""The model's own text: what is written is what it answers, and a run that was stopped goes on with
nothing lost or doubled."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from selfspec import LLM, DataError, OptionError
from selfspec.testing import tiny_llm
from selfspec.train.own_text import (
    OwnText,
    Question,
    Report,
    made_up,
    made_up_so_far,
    mixed,
    questions_from,
    write,
)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return tiny_llm()


def rows(*found: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    return ((f"file:{number}", row) for number, row in enumerate(found, start=1))


def asked(llm: LLM, *texts: str) -> list[Question]:
    return list(questions_from(llm, rows(*({"prompt": text} for text in texts))))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_answers_are_the_models_own(llm: LLM, tmp_path: Path) -> None:
    """Text made with drafts, batches or a penalty that the model would not have written greedily by
    itself."""
    questions = asked(llm, "one", "and another one")
    report = write(llm, questions, tmp_path / "own.jsonl", OwnText(max_new_tokens=12))
    found = lines(tmp_path / "own.jsonl")
    assert report.answers == len(found) == 2 and report.tokens == sum(
        len(line["response_ids"]) for line in found
    )
    for question, line in zip(questions, found, strict=True):
        alone = llm.generate(list(question.ids), max_new_tokens=12, draft=None)
        assert line["prompt_ids"] == list(question.ids) and line["response_ids"] == alone.tokens
        assert (line["prompt"], line["response"], line["source"]) == (
            question.text,
            alone.text,
            question.source,
        )


def test_prompts_of_every_shape(llm: LLM) -> None:
    """A column that is passed over, an instruction without its input, or a conversation answered in
    the middle."""
    talk = [
        {"role": r, "content": c}
        for r, c in [("user", "hi"), ("assistant", "ho"), ("user", "more"), ("assistant", "no")]
    ]
    found = questions_from(
        llm,
        rows(
            {"prompt": "a", "text": "x"},
            {"question": "b"},
            {"instruction": "c", "input": "d"},
            {"text": "e"},
            {"turns": ["f", "g"]},
            {"messages": talk},
            {"prompt": " "},
        ),
    )
    questions = list(found)
    assert [question.text for question in questions] == ["a", "b", "c\n\nd", "e", "f", "more"]
    assert list(questions[-1].ids) == llm.encode_chat(talk[:3]), (
        "all that came before the last question"
    )
    assert [
        question.text
        for question in questions_from(llm, rows({"prompt": "a", "body": "b"}), "body")
    ] == ["b"]
    for row, column, words in [
        ({"body": "b"}, None, "file:1 has the columns 'body', none of which"),
        ({"body": "b"}, "head", "no text in a column 'head'; its columns are 'body'"),
        ({"messages": [{"role": "system", "content": "a"}]}, None, "no message of a user"),
        ({"messages": [{"role": "user"}]}, None, "message 0: content=None is no text"),
    ]:
        with pytest.raises(DataError, match=words):
            list(questions_from(llm, rows(row), column))


def test_a_stopped_run_goes_on(llm: LLM, tmp_path: Path) -> None:
    """Answers lost or made twice after a kill, at any byte of the file."""
    questions = asked(llm, "one", "two", "three", "four", "five")
    options = OwnText(max_new_tokens=6, batch=2)
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    write(llm, questions, whole, options)
    content = whole.read_bytes()
    for size in (0, 10, len(content) // 2, content.index(b"\n") + 1, len(content) - 1):
        cut.write_bytes(content[:size])
        kept = content[:size].count(b"\n")
        report = write(llm, questions, cut, options)
        assert cut.read_bytes() == content and (report.found, report.answers) == (kept, 5 - kept)
    again = write(llm, questions, cut, options)
    assert again.answers == 0 and again.found == 5 and cut.read_bytes() == content


def test_time_that_is_up_ends_at_a_whole_batch(llm: LLM, tmp_path: Path) -> None:
    """A limit that is not obeyed, or one that throws the batch away which was under way."""
    heard: list[Report] = []
    questions = asked(llm, "one", "two", "three")
    report = write(
        llm,
        questions,
        tmp_path / "own.jsonl",
        OwnText(max_new_tokens=4, batch=2),
        max_seconds=0.0,
        tell=heard.append,
    )
    assert (
        report.stopped
        and report.answers == 2 == len(lines(tmp_path / "own.jsonl"))
        and len(heard) == 1
    )
    assert not write(
        llm, questions, tmp_path / "own.jsonl", OwnText(max_new_tokens=4, batch=2)
    ).stopped


def test_drawn_answers_differ_and_repeat_with_the_seed(llm: LLM, tmp_path: Path) -> None:
    """Samples that share a seed, or depend on the batch they were made in: a resumed run would
    write other text."""
    questions = asked(llm, "one", "two")
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    write(llm, questions, first, OwnText(max_new_tokens=8, temperature=1.0, samples=3, batch=4))
    write(llm, questions, second, OwnText(max_new_tokens=8, temperature=1.0, samples=3, batch=1))
    found = lines(first)
    assert found == lines(second)
    assert len({tuple(line["response_ids"]) for line in found}) == len(found) == 6
    write(
        llm,
        questions,
        tmp_path / "c.jsonl",
        OwnText(max_new_tokens=8, temperature=1.0, samples=3, seed=7),
    )
    assert lines(tmp_path / "c.jsonl") != found


def test_nothing_is_written_twice(llm: LLM, tmp_path: Path) -> None:
    """The same prompt from two files, or samples that came out alike, as if they were more text."""
    report = write(
        llm, asked(llm, "one", "two", "one"), tmp_path / "own.jsonl", OwnText(max_new_tokens=4)
    )
    assert report.answers == 2 and report.repeated == 1
    nearly_greedy = OwnText(max_new_tokens=4, temperature=1e-4, samples=3)
    report = write(llm, asked(llm, "one"), tmp_path / "alike.jsonl", nearly_greedy)
    assert len(lines(tmp_path / "alike.jsonl")) == 1 and report.repeated == 2


def test_prompts_without_room_are_counted(llm: LLM, tmp_path: Path) -> None:
    """One long prompt that ends a run of hours."""
    long = "word " * llm.info.context
    report = write(
        llm, asked(llm, long, "short"), tmp_path / "own.jsonl", OwnText(max_new_tokens=4)
    )
    assert report.too_long == 1 and report.answers == 1


def test_made_up_prompts_are_a_function_of_their_number(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A resumed run that makes up other prompts, or the same again; prompts that never ended;
    openings that are lost."""
    real = llm.generate

    ending = "length"

    def ends(prompts: Any, **options: Any) -> Any:  # a random model ends a message at random
        results = real(prompts, **{**options, "max_new_tokens": 9})
        return [type(result)(**{**vars(result), "finish_reason": ending}) for result in results]

    monkeypatch.setattr(llm, "generate", ends)
    assert list(made_up(llm, 4, batch=4)) == [], "none of them ended"
    ending = "eos"
    whole = list(made_up(llm, 6, ("Write ", "Why "), batch=4))
    assert [question.text[:4] for question in whole] == ["Writ", "Why "] * 3
    assert len({question.text for question in whole}) == 6
    assert list(made_up(llm, 6, ("Write ", "Why "), batch=3, first=2)) == whole[2:]
    assert list(made_up(llm, 2, ("Write ", "Why "), seed=2)) == [
        Question(question.text, question.ids, f"made up 2:{number}", number)
        for number, question in enumerate(whole[2:4])
    ]
    monkeypatch.undo()
    out = tmp_path / "own.jsonl"
    assert made_up_so_far(out, 0) == 0
    write(llm, whole[:5], out, OwnText(max_new_tokens=4))
    assert made_up_so_far(out, 0) == 4 and made_up_so_far(out, 1) == 0


def test_sources_are_mixed_in_proportion() -> None:
    """A run that is stopped early and has text of the first file only."""
    many = [Question(f"a{number}", [number], "a", number) for number in range(8)]
    few = [Question(f"b{number}", [number], "b", number) for number in range(2)]
    order = [question.text for question in mixed([(many, 8), (few, 2)])]
    assert sorted(order) == sorted(question.text for question in [*many, *few])
    assert [text[0] for text in order[:5]].count("b") == 1 and [
        text[0] for text in order[5:]
    ].count("b") == 1
    later = [question.text for question in mixed([(many, 8), (few[1:], 2)])]
    assert later == [text for text in order if text != "b0"], "a run that goes on has another order"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"text": "a"}\n', "own.jsonl:1 is not an answer that was written here"),
        ("[]\n", "own.jsonl:1 is not an answer"),
        ("{\n", "own.jsonl:1 is not an answer"),
    ],
)
def test_other_peoples_files_are_left_alone(
    llm: LLM, tmp_path: Path, content: str, words: str
) -> None:
    """A user's data file that is appended to because its name was given as the output."""
    out = tmp_path / "own.jsonl"
    out.write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=words):
        write(llm, asked(llm, "one"), out)
    assert out.read_text(encoding="utf-8") == content


def test_options_that_make_no_sense(llm: LLM, tmp_path: Path) -> None:
    """Hours spent on three equal answers to each prompt, or greedy and drawn answers mixed in one
    file."""
    with pytest.raises(OptionError, match="samples=3 greedy"):
        OwnText(samples=3)
    with pytest.raises(OptionError, match="batch=0"):
        OwnText(batch=0)
    write(llm, asked(llm, "one"), tmp_path / "own.jsonl", OwnText(max_new_tokens=4))
    with pytest.raises(DataError, match=r"temperature 0\.0, and 1\.0 is asked for"):
        write(
            llm,
            asked(llm, "two"),
            tmp_path / "own.jsonl",
            OwnText(max_new_tokens=4, temperature=1.0),
        )
