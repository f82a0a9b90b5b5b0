"""`selfspec demo` compares honestly: a wrong token is an error, a near-tie is named, speeds are
paired and by the token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from selfspec import LLM
from selfspec.cli import demo as module
from selfspec.cli.demo import difference, entries, measure, summary, verdict
from selfspec.testing import tiny_model, tiny_tokenizer

WORDS = ["demo", "--prompt", "hello", "-n", "8", "--rounds", "1"]


def pair(monkeypatch: pytest.MonkeyPatch, seed: int) -> LLM:
    """Transformers gets the model of seed 0; we get the one of `seed`."""
    llm = LLM.from_pretrained(tiny_model(seed=seed), tokenizer=tiny_tokenizer())
    monkeypatch.setattr(module, "open_pair", lambda threads: (tiny_model(seed=0), llm))
    return llm


def test_it_writes_the_answer_and_compares(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole command on a tiny model: the text of the answer, a line for each way, equal
    tokens."""
    llm = pair(monkeypatch, seed=0)
    result = run(*WORDS)
    assert result.exit_code == 0
    assert (
        llm.chat([{"role": "user", "content": "hello"}], max_new_tokens=8).text.split()[0]
        in result.stdout
    )
    assert "transformers generate" in result.stdout and "reference" in result.stdout
    assert "selfspec, plain" in result.stdout and "all 8 equal" in result.stdout


def test_wrong_tokens_are_an_error(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo must not print a speed for another model's text and end with 0."""
    pair(monkeypatch, seed=1)
    result = run(*WORDS)
    assert result.exit_code == 1
    assert "NOT a near-tie" in result.stdout, "the table still says what happened"
    assert "wrote another token" in result.stderr and "position 0" in result.stderr


class Logits:
    """A model that gives these logits at every position and notes what it was asked."""

    def __init__(self, *values: float) -> None:
        self.values, self.asked = torch.tensor(values), torch.empty(0)

    def __call__(self, ids: torch.Tensor) -> Any:
        self.asked = ids
        logits = self.values.expand(1, ids.shape[1], -1)
        return type("Output", (), {"logits": logits})


def test_the_difference_is_judged_where_it_is() -> None:
    """The gap belongs to the first differing token: asked with the common beginning, and with
    nothing after it."""
    reference = Logits(1.0, 3.0, 2.5)
    found = difference(reference, [7, 8], [1, 1, 1, 1], [1, 1, 2, 1])
    assert found is not None and (found.index, found.gap) == (2, 0.5) and not found.near_tie
    assert reference.asked.tolist() == [[7, 8, 1, 1]]


def test_a_near_tie_is_named_and_forgiven() -> None:
    """Two logits closer than rounding can tell apart: counted and shown, not an error."""
    found = difference(Logits(2.0, 2.00005), [7], [0, 1], [1, 1])
    assert found is not None and found.near_tie
    assert "a near-tie" in verdict(found, 2) and "NOT" not in verdict(found, 2)


def test_a_shorter_answer_is_a_difference() -> None:
    """zip would stop at the shorter list and call a missing end equal."""
    found = difference(Logits(0.0, 1.0), [7], [1, 1, 1], [1, 1])
    assert found is not None and found.index == 2
    assert difference(Logits(0.0, 1.0), [7], [1, 1], [1, 1]) is None
    assert verdict(None, 2) == "all 2 equal"


def test_speed_is_paired_and_by_the_token() -> None:
    """A machine that slows down halfway must not change the ratio; an answer of half the length is
    not twice as fast."""
    seconds: dict[str, list[float | None]] = {
        "base": [4.0, 40.0, 4.0],
        "ours": [1.0, 10.0, 1.0],
        "short": [2.0, 20.0, 2.0],
    }
    written = {"base": [0] * 4, "ours": [0] * 4, "short": [0] * 2}
    ours, short = (summary(name, "base", written, seconds) for name in ("ours", "short"))
    assert (ours.speed, ours.seconds_per_token) == (4.0, 0.25)
    assert (short.speed, short.seconds_per_token) == (1.0, 1.0)


def test_the_measured_answers_are_the_ones_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches tokens that come from another call than the one that was timed; warm-up plus runs,
    each entry its own."""
    calls: list[str] = []

    def entry(name: str, token: int) -> Callable[[], list[int]]:
        return lambda: calls.append(name) or [token]  # type: ignore[func-returns-value]

    rows = measure({"a": entry("a", 1), "b": entry("b", 2)}, rounds=2)
    assert [(row.name, row.tokens) for row in rows] == [("a", [1]), ("b", [2])]
    assert sorted(calls) == ["a"] * 3 + ["b"] * 3


def test_the_first_entry_is_transformers_own_generate(llm: LLM) -> None:
    """The reference must be the real thing; here it is compared with a generate written out by
    hand."""
    model, ids = tiny_model(), [5, 6, 7]
    text = list(ids)
    for _ in range(5):
        text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
    assert [run() for run in entries(model, llm, ids, 5).values()] == [text[3:]] * 3


@pytest.mark.demo
def test_the_demo_command_on_the_demo_model(
    demo_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one command every newcomer types, with the real model and both engines."""
    from typer.testing import CliRunner

    from selfspec.cli.app import app

    monkeypatch.setenv("COLUMNS", "200")
    result = CliRunner().invoke(app, ["demo", "-n", "6", "--rounds", "1"])
    assert result.exit_code == 0, result.output
    assert "all 6 equal" in result.stdout
