"""`selfspec chat`: what the model is shown of a conversation, and that nothing but the user ends
it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from selfspec import LLM, Stream
from selfspec.cli import common
from selfspec.testing import tiny_tokenizer

N = ["-n", "6"]
Shown = list[list[dict[str, str]]]


@pytest.fixture
def shown(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Shown:
    """The messages of every turn, as the model was given them."""
    turns: Shown = []
    original: Callable[..., Stream] = llm.stream_chat

    def remembered(messages: list[dict[str, str]], **options: Any) -> Stream:
        turns.append([dict(message) for message in messages])
        return original(messages, **options)

    monkeypatch.setattr(llm, "stream_chat", remembered)
    return turns


def contents(messages: list[dict[str, str]], role: str) -> list[str]:
    return [message["content"] for message in messages if message["role"] == role]


def test_a_turn_builds_on_the_ones_before(run: Any, shown: Shown, llm: LLM) -> None:
    """Catches a forgotten answer: without it the model is asked to answer a conversation that never
    was."""
    result = run("chat", "demo", *N, stdin="one\ntwo\n")
    answer = llm.chat([{"role": "user", "content": "one"}], max_new_tokens=6).text
    assert result.exit_code == 0, "the end of the input (Ctrl-D) is no error"
    assert contents(shown[1], "user") == ["one", "two"]
    assert contents(shown[1], "assistant") == [answer]
    assert answer in result.stdout


def test_reset_forgets_all_but_the_system_message(run: Any, shown: Shown) -> None:
    """Who resets wants a new conversation with the same instructions."""
    run("chat", "demo", "--system", "be brief", *N, stdin="one\n/reset\ntwo\n/quit\nthree\n")
    assert [contents(turn, "user") for turn in shown] == [["one"], ["two"]], (
        "/reset kept a turn, or /quit did not leave"
    )
    assert [contents(turn, "system") for turn in shown] == [["be brief"], ["be brief"]]


def test_ctrl_c_stops_the_answer_and_not_the_program(
    run: Any, shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next turn must come, and know what was said until then."""
    written: list[str] = []

    def write(text: str) -> None:
        written.append(text)
        if len(written) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(common, "write", write)
    result = run("chat", "demo", *N, stdin="one\ntwo\n")
    assert result.exit_code == 0
    assert contents(shown[1], "user") == ["one", "two"]
    assert contents(shown[1], "assistant") == ["".join(written[:2])]


def test_ctrl_c_at_the_prompt_does_not_leave(
    run: Any, shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second Ctrl-C, pressed when the answer had just ended, must not throw the conversation
    away."""
    lines = iter([KeyboardInterrupt(), "one", EOFError()])

    def ask(_: str) -> str:
        line = next(lines)
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr("builtins.input", ask)
    result = run("chat", "demo", *N)
    assert result.exit_code == 0 and len(shown) == 1


def test_a_turn_that_cannot_be_answered_is_not_kept(run: Any, shown: Shown) -> None:
    """A message beyond the context is refused; were it kept, every turn after it would be refused
    too."""
    result = run("chat", "demo", *N, stdin=f"{'x' * 600}\ntwo\n")
    assert result.exit_code == 0 and "512" in result.stderr
    assert contents(shown[-1], "user") == ["two"]


def test_unknown_commands_are_named(run: Any, shown: Shown) -> None:
    """`/rest` is a typing mistake and not something to ask the model; empty lines are nothing at
    all."""
    result = run("chat", "demo", *N, stdin="/rest\n\n/help\n")
    assert "did you mean '/reset'?" in result.stderr
    assert result.stdout.count("forgets the conversation") == 2, (
        "once at the start and once for /help"
    )
    assert shown == []


def test_stats_after_each_answer(run: Any, shown: Shown) -> None:
    """The second turn must find the first one in the cache; the line of figures says so."""
    result = run("chat", "demo", "--stats", *N, stdin="one\ntwo\n")
    lines = [line for line in result.stderr.splitlines() if "new tokens" in line]
    assert len(lines) == 2 and "cached" in lines[1]


def test_a_model_without_a_template_is_refused(
    run: Any, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A base model would be asked to continue raw text and babble; say which model to take
    instead."""
    bare = tiny_tokenizer()
    bare.chat_template = None
    monkeypatch.setattr(llm, "tokenizer", bare)
    result = run("chat", "demo", stdin="one\n")
    assert result.exit_code == 1 and "chat template" in result.stderr
