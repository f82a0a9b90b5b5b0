"""Measures of quality against figures known by heart."""

from __future__ import annotations

import sys
from decimal import Decimal
from pathlib import Path

import pytest

from benchmarks.paper import quality
from benchmarks.paper.quality import (
    check_answers,
    code,
    exact_match,
    judge,
    number_in,
    pass_at_k,
    program_of,
    reference_of,
    rouge,
    summaries,
    sums,
)
from benchmarks.task.data import examples
from benchmarks.task.result import TaskOptions
from benchmarks.task.run import make_data
from selfspec.bench.tasks import read_task
from selfspec.errors import OptionError, Unavailable

PROBLEM = {
    "entry_point": "twice",
    "prompt": 'from typing import List\n\ndef twice(x: int) -> int:\n    """Double it."""\n',
    "test": "def check(candidate):\n    assert candidate(3) == 6\n",
}


def test_pass_at_k_is_the_estimator_of_the_paper() -> None:
    """1 - (1 - p)^k would be biased: with 3 of 10 right, pass@10 is 1 and not 0.97."""
    assert pass_at_k(10, 3, 1) == pytest.approx(0.3) and pass_at_k(10, 3, 10) == 1
    assert pass_at_k(4, 1, 2) == pytest.approx(1 - (3 / 4) * (2 / 3)) and pass_at_k(5, 0, 5) == 0
    with pytest.raises(OptionError, match="draw at least 10"):
        pass_at_k(4, 1, 10)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("First 3+4 = 7.\n#### 1,234", "1234"),
        ("It costs $5, and 2 of them $10. The answer is $18.", "18"),
        ("So she has -3.50 dollars left.", "-3.50"),
        ("The answer is 7. Check: 7 * 2 = 14", "7"),
        ("about 1,000,000 people", "1000000"),
        ("none at all", None),
    ],
)
def test_the_number_at_the_end(text: str, number: str | None) -> None:
    """Thousands, money, a full stop, what comes after the answer."""
    assert number_in(text) == (None if number is None else Decimal(number))


def test_accuracy_of_sums() -> None:
    """18 and 18.00 are equal numbers; a text without a number is wrong, not an error."""
    golds = {"a": {"answer": "9 * 2\n#### 18"}, "b": {"answer": "#### 3"}}
    assert sums({"a": ["it is 18.00"], "b": ["who knows"]}, golds) == {"accuracy": 0.5}


@pytest.mark.parametrize(
    "answer",
    [
        "    return 2 * x\n\ndef other():\n    raise ValueError\n",
        "    return 2 * x\nprint(twice('not a number'.missing))",
        "Sure:\n```python\ndef twice(x):\n    return x + x\n```\nThat doubles it.",
        "```\n    return 2 * x\n```",
        "def twice(x: int, seen: List[int] | None = None) -> int:\n    return sum([x, x])",
    ],
)
def test_right_answers_pass_however_they_are_written(answer: str) -> None:
    """A completion, a completion that goes on, a chat's code block, the body alone in one, the
    whole function."""
    assert code({"a": [answer]}, {"a": PROBLEM}) == {"pass@1": 1.0}


def test_wrong_answers_fail_and_samples_count() -> None:
    """pass@1 of several samples is their share; pass@10 appears only where there are ten of
    each."""
    right, wrong = "    return 2 * x", "    return x"
    assert code({"a": [wrong]}, {"a": PROBLEM}) == {"pass@1": 0.0}
    found = code({"a": [right, wrong, wrong, wrong]}, {"a": PROBLEM})
    assert found == {"pass@1": 0.25}
    ran: list[str] = []
    many = code(
        {"a": [right] + [wrong] * 9},
        {"a": PROBLEM},
        run=lambda source: ran.append(source) or _ran("return 2" in source),
    )
    assert many == {"pass@1": pytest.approx(0.1), "pass@10": 1.0} and len(ran) == 10


def _ran(passed: bool) -> quality.Ran:
    return quality.Ran(passed)


def test_the_other_kind_of_problem() -> None:
    """MBPP brings its tests as lines."""
    gold = {"test_list": ["assert add(1, 2) == 3"], "test_setup_code": "import math"}
    assert program_of("def add(a, b):\n    return a + b", gold).splitlines()[0] == "import math"
    assert code({"a": ["```python\ndef add(a, b):\n    return a + b\n```"]}, {"a": gold}) == {
        "pass@1": 1.0
    }


def test_rouge_is_without_stemming() -> None:
    """Figures by hand: 5 of 6 words, 3 of 5 pairs; `cats` is not `cat`, as in torchmetrics."""
    pytest.importorskip("rouge_score")
    found = rouge([("the cat sat on the mat", "the cat was on the mat")])
    assert found == {
        "rouge1": pytest.approx(5 / 6),
        "rouge2": pytest.approx(3 / 5),
        "rougeL": pytest.approx(5 / 6),
    }
    assert rouge([("cats", "cat")])["rouge1"] == 0
    assert summaries({"a": ["a b"]}, {"a": {"summary": "a b"}})["rouge2"] == 1


def test_rouge_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """An import error in the middle of a run says nothing about what to do."""
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    with pytest.raises(Unavailable, match="pip install rouge-score"):
        rouge([("a", "b")])


def test_only_measures_that_the_questions_allow() -> None:
    """A program judged by exact match scores 0 for ever; a measure that cannot be taken must be
    absent, not 0."""
    wanted = ("pass@1", "accuracy", "exact match")
    assert judge({"a": ["    return 2 * x"]}, {"a": {**PROBLEM, "answer": "x"}}, wanted) == {
        "pass@1": 1.0
    }
    assert judge({"a": ["so 4"]}, {"a": {"answer": "#### 4"}}, wanted) == {
        "accuracy": 1.0,
        "exact match": 0.0,
    }
    assert judge({"a": ["text"]}, {"a": {"reference": None}}, wanted) == {}
    assert judge({"a": ["so 4"]}, {"a": {"answer": "#### 4"}}, ("accuracy", "speedup")) == {
        "accuracy": 1.0
    }


def test_exact_match_forgives_blanks_only() -> None:
    """TOPv2's parses are compared whole."""
    assert exact_match(" [IN:GET  x]\n", "[IN:GET x]") and not exact_match("a", "A")


def test_held_out_utterances_are_questions_with_their_structures(tmp_path: Path) -> None:
    """What `scripts/bench task` writes is what the papers' tables of TOPv2 ask and compare with."""
    make_data(tmp_path, TaskOptions(examples=5, held_out=3), "<end>")
    (asked,) = read_task(f"jsonl={tmp_path / 'held_out.jsonl'}")
    made = examples("held_out", 3)
    assert [item.text for item in asked.items] == [each.prompt for each in made]
    answers = {item.id: [each.structure] for item, each in zip(asked.items, made, strict=True)}
    golds = {item.id: item.gold for item in asked.items}
    check_answers("held_out", golds, ["exact match"])
    assert judge(answers, golds, ["exact match"]) == {"exact match": 1.0}


def test_the_reference_of_each_kind_of_task() -> None:
    """CNN/DM calls it highlights; a missing one is an error that says what was looked for."""
    assert (
        reference_of({"article": "x", "highlights": "h"}) == "h"
        and reference_of({"answer": "a"}) == "a"
    )
    assert reference_of(PROBLEM | {"canonical_solution": "    return 2 * x"}) == "    return 2 * x"
    with pytest.raises(OptionError, match="highlights"):
        reference_of({"prompt": "x"})
