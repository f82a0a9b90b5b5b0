"""Multiple-choice accuracy of every exit: which of the given continuations the first N layers find
likeliest.

A choice's score is the sum of its tokens' log-probabilities after the question, at exit N through
the model's own norm and head; `accuracy` takes the best sum, `accuracy_by_length` the best sum a
byte of text (as lm-eval's acc and acc_norm do). Source: LayerSkip, Table 1 and Figures 6 to 8.
Perplexity by exit is `train/evaluate.py`'s. Knows no tasks by name: questions come as JSONL with
`question`, `choices`, `answer` (an index from 0, a letter from A, or one of the choices).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from selfspec.bench.multiple_choice import index_of
from selfspec.errors import OptionError
from selfspec.model.compute.plan import LayerPlan

if TYPE_CHECKING:
    from selfspec.llm import LLM
    from selfspec.model.layered import LayeredModel


@dataclass(frozen=True)
class Choice:
    """One question with its possible continuations and the index of the right one."""

    question: str
    choices: tuple[str, ...]
    answer: int


@dataclass(frozen=True)
class ExitAccuracy:
    """How often an exit finds the right choice, and how often it would by guessing."""

    layers: int
    accuracy: float
    accuracy_by_length: float
    chance: float
    questions: int


def read_choices(path: Path) -> list[Choice]:
    """The questions of a JSONL file."""
    if not path.is_file():
        raise OptionError(
            f"there is no file {path.name!r}; give JSONL with question, choices and answer on "
            "each line"
        )
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip():
            try:
                row = json.loads(line)
                choices = tuple(map(str, row["choices"]))
                found.append(
                    Choice(str(row["question"]), choices, index_of(row["answer"], choices))
                )
            except (ValueError, KeyError, TypeError, IndexError) as error:
                raise OptionError(
                    f"{path.name}, line {number}: not a question with choices and an answer among "
                    f"them ({error!r}); mend it"
                ) from error
    if not found:
        raise OptionError(
            f"{path.name} holds no question, so nothing could be measured; give one a line"
        )
    return found


def choose_by_exit(
    llm: LLM, questions: Sequence[Choice], exits: Sequence[int] | None = None
) -> list[ExitAccuracy]:
    """Accuracy of the exits (numbers of layers; by default all)."""
    if llm.tokenizer is None:
        raise OptionError(
            "questions are text and this model was loaded without a tokenizer; pass tokenizer=..."
        )
    model = llm.model
    chosen = sorted({*(exits or range(1, model.layers + 1))})
    if not 1 <= chosen[0] <= chosen[-1] <= model.layers:
        raise OptionError(
            f"exits {chosen} are not all inside this model of {model.layers} layers; choose 1 to "
            f"{model.layers}"
        )
    right = dict.fromkeys(chosen, 0)
    right_by_length = dict.fromkeys(chosen, 0)
    for question in questions:
        sums = choice_scores(llm, question, chosen)
        sizes = [max(1, len(choice.encode())) for choice in question.choices]
        for layer in chosen:
            scores = [each[layer] for each in sums]
            right[layer] += scores.index(max(scores)) == question.answer
            shares = [score / size for score, size in zip(scores, sizes, strict=True)]
            right_by_length[layer] += shares.index(max(shares)) == question.answer
    count = len(questions)
    chance = sum(1 / len(question.choices) for question in questions) / count
    return [
        ExitAccuracy(layer, right[layer] / count, right_by_length[layer] / count, chance, count)
        for layer in chosen
    ]


def choice_scores(llm: LLM, question: Choice, exits: Sequence[int]) -> list[dict[int, float]]:
    """Of each choice the log-probability at each exit; exits in rising order."""
    head = _ids(llm, question.question)
    return [
        _scores(llm.model, head, _tail(llm, question, choice), exits) for choice in question.choices
    ]


def _ids(llm: LLM, text: str) -> list[int]:
    assert llm.tokenizer is not None
    return list(llm.tokenizer(text)["input_ids"])


def _tail(llm: LLM, question: Choice, choice: str) -> list[int]:
    """The tokens of a choice: those of question and choice together less the question's, so that
    joints are as in the text."""
    whole, start = _ids(llm, f"{question.question} {choice}"), _ids(llm, question.question)
    if whole[: len(start)] == start and len(whole) > len(start):
        return whole[len(start) :]
    assert llm.tokenizer is not None
    return list(llm.tokenizer(f" {choice}", add_special_tokens=False)["input_ids"])


@torch.inference_mode()
def _scores(
    model: LayeredModel, head: Sequence[int], tail: Sequence[int], exits: Sequence[int]
) -> dict[int, float]:
    """For each exit the log-probability of `tail` after `head`."""
    text = [*head, *tail][:-1]
    model.check_length(len(text))
    cache = model.new_cache(1, len(text))
    place, wanted = cache.layout([len(text)]), torch.tensor(list(tail), device=model.device)
    x, start, found = model.embed(torch.tensor(text, device=model.device)), 0, {}
    for layer in exits:
        x = model.run(x, LayerPlan(start, layer), cache, place)
        start = layer
        logs = model.head(x[-len(tail) :]).float().log_softmax(-1)
        found[layer] = float(logs.gather(1, wanted[:, None]).sum())
    return found
