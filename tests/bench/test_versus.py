"""The contest of the same drafts by other libraries: its table from numbers known by heart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from selfspec.bench.versus import contestants
from selfspec.bench.versus_report import faster, load_versus
from selfspec.bench.versus_report import markdown as versus_markdown
from selfspec.errors import OptionError

PROVENANCE = {"threads": 2, "cpu": "a processor", "versions": {"torch": "1"}}


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "[]",
        "{",
        '{"kind": "versus", "schema_version": 9}',
        '{"kind": "plain", "schema_version": 2}',
    ],
)
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    """Catches tables made of another benchmark's numbers, or of an older format's."""
    file = tmp_path / "r.json"
    file.write_text(text)
    with pytest.raises(OptionError, match=r"Measure again"):
        load_versus(file)


def an_answer(peer: str, method: str, question: int, full: float, **changes: Any) -> dict[str, Any]:
    made = {
        "peer": peer,
        "method": method,
        "question": question,
        "prompt_tokens": 9,
        "first": 0.1,
        "full": full,
        "made": 11,
    }
    return {**made, "difference": None, "drafted": None, "accepted": None, **changes}


def a_contest() -> dict[str, Any]:
    """Theirs 20 ms a token, ours 10, plain 15; one failed."""
    pairs = contestants(["transformers", "selfspec", "flashspec"], ["plain", "lookup"])
    full = {
        ("transformers", "plain"): 0.25,
        ("transformers", "lookup"): 0.3,
        ("selfspec", "lookup"): 0.2,
        ("selfspec", "plain"): 0.25,
    }
    answers = [
        an_answer(*pair, question, seconds)
        for question in range(3)
        for pair, seconds in full.items()
    ]
    run = {
        "kind": "versus",
        "schema_version": 1,
        "model": "m",
        "factor": 1.0,
        "layer": 2,
        "tokens": 4,
        "new_tokens": 11,
    }
    failures = {"flashspec lookup": "no answer | in time"}
    return {
        **run,
        "contestants": pairs,
        "answers": answers,
        "failures": failures,
        "complete": True,
        "provenance": PROVENANCE,
    }


def test_peers_are_compared_by_method() -> None:
    """Catches ratios upside down, prefill in the decode time, and peers that fail or differ left
    out."""
    run = a_contest()
    run["answers"][-3]["difference"] = 4  # transformers' lookup, third question
    text = [" ".join(line.split()) for line in versus_markdown(run).splitlines()]
    assert (
        "| transformers | 20.0 | 0.75 (0.75-0.75) | 2.00 (2.00-2.00) | 27.3 | - | NO, 1 of 3 "
        "differ |" in text
    )
    assert "| selfspec | 10.0 | 1.50 (1.50-1.50) | 1 | 18.2 | - | yes |" in text
    assert "| flashspec | - | - | - | - | - | failed: no answer / in time |" in text


def test_contestants_begin_with_the_reference() -> None:
    """Catches a contest in which nothing says what is right, and peers that cannot decode plainly
    counted as failures."""
    assert contestants(["selfspec", "flashspec"], ["lookup"]) == [
        ("transformers", "plain"), ("selfspec", "lookup"), ("flashspec", "lookup")
    ]  # fmt: skip
    assert ("flashspec", "plain") not in contestants(
        ["transformers", "flashspec"], ["plain", "lookup"]
    )
    assert faster({1: (0.2, 10)}, {2: (0.1, 10)}) is None, "no question that both answered"
