"""`selfspec generate` writes what the library returns, as it comes, and nothing else on standard
output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from selfspec import LLM, SamplingParams, Stream
from selfspec.cli import common
from selfspec.cli.options import ModelOptions
from selfspec.testing import tiny_tokenizer

N = ["-n", "12"]


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_one_word_is_a_prompt_for_the_demo_model(
    run: Any, opened: list[tuple[str, ModelOptions]], llm: LLM
) -> None:
    """The shortest command of all; catches MODEL and PROMPT being taken for each other."""
    result = run("generate", "hello", *N)
    assert opened[0][0] == "demo"
    assert result.stdout == llm.chat(user("hello"), max_new_tokens=12).text + "\n"


def test_of_several_words_the_first_is_the_model(
    run: Any, opened: list[tuple[str, ModelOptions]]
) -> None:
    """See above, from the other side."""
    run("generate", "some/model", "hello", *N)
    assert opened[0][0] == "some/model"


def test_raw_is_not_chat(run: Any, llm: LLM) -> None:
    """Catches a --raw that is ignored; the template changes the text, so the two must differ."""
    raw = run("generate", "demo", "hello", "--raw", *N).stdout
    assert raw == llm.generate("hello", max_new_tokens=12).text + "\n"
    assert raw != run("generate", "demo", "hello", "--chat", *N).stdout


def test_a_model_without_a_template_gets_the_bare_prompt(
    run: Any, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Base models have no template; insisting on chat is an error, the default is not."""
    bare = tiny_tokenizer()
    bare.chat_template = None
    monkeypatch.setattr(llm, "tokenizer", bare)
    assert (
        run("generate", "demo", "hello", *N).stdout
        == llm.generate("hello", max_new_tokens=12).text + "\n"
    )
    insisted = run("generate", "demo", "hello", "--chat", *N)
    assert insisted.exit_code == 1 and "template" in insisted.stderr


def test_text_comes_in_pieces(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a stream that is gathered first and written at the end: the same text, but nobody
    sees it grow."""
    pieces: list[str] = []
    monkeypatch.setattr(common, "write", pieces.append)
    run("generate", "demo", "hello", *N)
    assert len([piece for piece in pieces if piece.strip()]) > 2
    assert "".join(pieces) == run("generate", "demo", "hello", "--no-stream", *N).stdout


def test_dash_reads_standard_input(run: Any, llm: LLM) -> None:
    """`echo hello | selfspec generate -` must mean the prompt 'hello', without the line end that
    echo adds."""
    piped = run("generate", "demo", "-", "--raw", *N, stdin="hello\n")
    assert piped.stdout == llm.generate("hello", max_new_tokens=12).text + "\n"


def test_several_prompts_are_answered_in_order(run: Any, llm: LLM) -> None:
    """A batch must give each prompt its own answer, the one that it gets alone."""
    result = run("generate", "demo", "one", "number two", *N)
    alone = [llm.chat(user(text), max_new_tokens=12).text for text in ("one", "number two")]
    assert result.stdout == f"[1] one\n{alone[0]}\n\n[2] number two\n{alone[1]}\n"


def test_json_holds_everything(run: Any, llm: LLM) -> None:
    """One object a line, with tokens and cost, and no text beside it that would break a parser."""
    lines = run("generate", "demo", "one", "zwei €", "--raw", "--json", *N).stdout.splitlines()
    records = [json.loads(line) for line in lines]
    expected = llm.generate(["one", "zwei €"], max_new_tokens=12)
    assert [record["tokens"] for record in records] == [result.tokens for result in expected]
    assert [record["text"] for record in records] == [result.text for result in expected]
    assert [record["prompt"] for record in records] == ["one", "zwei €"]
    assert all(
        record["finish_reason"] == "length" and record["stats"]["new_tokens"] == 12
        for record in records
    )


def test_sampling_arrives(run: Any, llm: LLM) -> None:
    """Catches options that are parsed and not passed: the seed decides the tokens, so they must be
    the library's own."""
    words = ["--temperature", "0.9", "--top-k", "40", "--seed", "7"]
    record = json.loads(run("generate", "demo", "hi", "--raw", "--json", *words, *N).stdout)
    expected = llm.generate(
        "hi", sampling=SamplingParams(temperature=0.9, top_k=40, seed=7), max_new_tokens=12
    )
    assert record["tokens"] == expected.tokens and record["seed"] == 7
    assert record["tokens"] != llm.generate("hi", max_new_tokens=12).tokens, (
        "sampling chose the greedy tokens: nothing was tested"
    )


def test_stop_strings_arrive(run: Any, llm: LLM) -> None:
    """Both of two --stop options count, and the text ends before the first that comes."""
    text = llm.generate("hello", max_new_tokens=12).text
    stops = ["--stop", text[6:8], "--stop", text[3:5]]
    cut = min(text.index(text[6:8]), text.index(text[3:5]))
    assert run("generate", "demo", "hello", "--raw", *stops, *N).stdout == text[:cut] + "\n"


def test_stats_stay_out_of_the_pipe(run: Any) -> None:
    """`selfspec generate ... --stats > file` must put the text, and only the text, into the
    file."""
    with_stats, without = (
        run("generate", "demo", "hello", "--stats", *N),
        run("generate", "demo", "hello", *N),
    )
    assert with_stats.stdout == without.stdout
    assert "12 new tokens" in with_stats.stderr and "tokens/s" in with_stats.stderr
    assert without.stderr == ""


def test_ctrl_c_stops_the_work(run: Any, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupted command must exit with 130 and leave no generation behind that goes on or
    blocks the next."""
    made: list[Stream] = []
    original = llm.stream_chat

    def remembered(*args: Any, **options: Any) -> Stream:
        made.append(original(*args, **options))
        return made[0]

    def interrupted(text: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(llm, "stream_chat", remembered)
    monkeypatch.setattr(common, "write", interrupted)
    assert run("generate", "demo", "hello", *N).exit_code == 130
    with pytest.raises(StopIteration):
        next(made[0])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["demo"], "there is no prompt for it"),
        ([""], "the prompt is empty"),
        (["-"], "on standard input is empty"),
        (["Why is the", "sky blue?"], "is not a model"),
        (["demo", "x" * 600, "--raw"], "512"),
    ],
)
def test_what_cannot_work_is_said(run: Any, words: list[str], message: str) -> None:
    """Each of these once looked like a working command; none may print a text or end with 0."""
    result = run("generate", *words, *N)
    assert (result.exit_code, result.stdout) == (1, "")
    assert message in result.stderr


def test_a_lone_folder_is_a_model(
    run: Any, tmp_path: Any, opened: list[tuple[str, ModelOptions]]
) -> None:
    """`selfspec generate ./model` forgot its prompt; the folder's name must not become one for the
    demo model."""
    result = run("generate", str(tmp_path), *N)
    assert result.exit_code == 1 and "no prompt" in result.stderr and opened == []


def test_a_schema_and_a_pattern_say_what_the_text_may_be(run: Any, tmp_path: Path) -> None:
    """Flags that are read and then forgotten: a tiny random model writes nonsense without them."""
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "array", "items": {"enum": [7]}, "minItems": 1, "maxItems": 2}')
    answer = json.loads(run("generate", "demo", "x", "--json-schema", str(schema)).stdout)
    assert answer in ([7], [7, 7])
    assert run("generate", "demo", "x", "--regex", "a{3}b").stdout == "aaab\n"


@pytest.mark.parametrize(
    ("held", "words"), [("{", "is not JSON"), ("3", "holds no object"), ('{"type": "x"}', "schema")]
)
def test_a_schema_that_is_none_says_so(run: Any, tmp_path: Path, held: str, words: str) -> None:
    """A file that is no schema: a traceback, or a text that fits nothing."""
    schema = tmp_path / "schema.json"
    schema.write_text(held)
    found = run("generate", "demo", "x", "--json-schema", str(schema))
    assert found.exit_code == 1 and words in found.stderr
    both = run("generate", "demo", "x", "--json-schema", str(schema), "--regex", "a")
    assert both.exit_code == 1 and "leave one of them out" in both.stderr
