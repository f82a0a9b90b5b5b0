"""Choices that cannot work: each is one error that names the value and the remedy, before work has
begun."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.paper.quality import check_answers
from selfspec import LLM
from selfspec.draft.registry import make_drafter
from selfspec.errors import DataError, OptionError, TrainingError
from selfspec.testing import tiny_llm, tiny_tokenizer
from selfspec.train.data import DataOptions, load_data
from selfspec.train.presets import preset


@pytest.fixture(scope="module")
def llm() -> LLM:
    return tiny_llm()


@pytest.mark.parametrize("name", ["ngram", "recycle", "jacobi", "hybrid", "scripted"])
def test_drawing_without_probabilities(name: str) -> None:
    """An unknown option without a word of which drafters know it."""
    with pytest.raises(
        OptionError, match=r"no probabilities to draw from.*draft with cosine.* early-exit"
    ):
        make_drafter(name, {"sample": True})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"vocabulary": -1}, r"vocabulary=-1 is outside 0 to \d+.*0 scores all"),
        ({"vocabulary": 10**6}, r"vocabulary=1000000 is outside"),
        ({"tokens": (-3,)}, r"tokens: -3 is outside 0 to \d+.*make the list with this model's"),
    ],
)
def test_a_vocabulary_that_leaves_nothing(llm: LLM, options: dict, words: str) -> None:
    """Drafts among no tokens, or of tokens that the model does not have."""
    with pytest.raises(OptionError, match=words):
        llm.generate("once", max_new_tokens=4, draft="early-exit", draft_options=options)


def test_too_little_text_to_train_on(tmp_path: Path) -> None:
    """A run that trains on what it measures on, or on nothing."""
    file = tmp_path / "short.txt"
    for text, words in {"": "nothing to read", "one line": "Give more text"}.items():
        file.write_text(text, encoding="utf-8")
        with pytest.raises((DataError, TrainingError), match=words):
            load_data([str(file)], tiny_tokenizer(), DataOptions(length=64))


def test_an_unknown_preset() -> None:
    """A traceback from a dictionary, or the default recipe in its place."""
    with pytest.raises(
        OptionError, match=r"preset 'task-2b' is not known; did you mean 'task-1.5b'"
    ):
        preset("task-2b")


def test_questions_without_answers_are_refused_before_they_are_asked() -> None:
    """An hour of answers that nothing can be compared with."""
    golds = {"q1": {"answer": "#### 4"}, "q2": {"prompt": "2 + 2?"}}
    check_answers("gsm8k=f", {"q1": golds["q1"]}, ("accuracy", "speedup"))
    check_answers("long=f", golds, ("speedup", "tokens/s"))
    with pytest.raises(
        OptionError, match=r"q2 has no answer.*1 of 2 questions of gsm8k=f.*'answer'"
    ):
        check_answers("gsm8k=f", golds, ("accuracy", "speedup"))
