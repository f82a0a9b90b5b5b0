"""Questions with choices, out of the rows of MMLU, CommonsenseQA and SST-2 as the hub has them, and
which choice an answer names.

The question asks for a sentence that ends with a letter. So the letter is a token that was decoded:
an answer's first one comes from the prompt's pass. Does not know models or files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any

_MARK = re.compile(r"answer(?:\s+is|\s*:)\s*", re.IGNORECASE)
_ALONE = re.compile(r"\(([A-Z])\)|\b([A-Z])(?=[.):]|\s*$)", re.MULTILINE)
SENTIMENTS = ("negative", "positive")


@dataclass(frozen=True)
class Choices:
    """A question, its choices and the index of the right one."""

    question: str
    texts: tuple[str, ...]
    right: int

    @property
    def prompt(self) -> str:
        """The question as it is asked."""
        lettered = "\n".join(map("{}. {}".format, ascii_uppercase, self.texts))
        return f"{self.question}\n{lettered}\nReply with 'The answer is' and the letter."

    @property
    def gold(self) -> dict[str, Any]:
        """What an answer is compared with."""
        return {"choices": self.texts, "answer": ascii_uppercase[self.right]}


def mmlu(row: Mapping[str, Any]) -> Choices:
    """`question`, `choices`, `answer` (an index)."""
    texts = tuple(map(str, row["choices"]))
    return _checked(row["question"], texts, index_of(row["answer"], texts))


def commonsense_qa(row: Mapping[str, Any]) -> Choices:
    """`question`, `choices` of `label` and `text`, `answerKey` (a label)."""
    labels, texts = list(row["choices"]["label"]), tuple(map(str, row["choices"]["text"]))
    key = row["answerKey"]
    if key not in labels or len(labels) != len(texts):
        raise ValueError(f"answerKey {key!r} is none of {labels}; a test split has no answers")
    return _checked(row["question"], texts, labels.index(key))


def sst2(row: Mapping[str, Any]) -> Choices:
    """`sentence`, `label` (0 is negative, 1 positive)."""
    label, sentence = row["label"], row["sentence"]
    if isinstance(label, bool) or label not in (0, 1):
        raise ValueError(f"label {label!r} is neither 0 nor 1; a test split has no labels")
    _checked(sentence, SENTIMENTS, label)
    question = f"What is the sentiment of this sentence?\n{sentence.strip()}"
    return Choices(question, SENTIMENTS, label)


def _checked(question: Any, texts: tuple[str, ...], right: int) -> Choices:
    if not isinstance(question, str) or not question.strip():
        raise TypeError(f"the question is {question!r}")
    if not 2 <= len(texts) <= len(ascii_uppercase):
        raise ValueError(f"{len(texts)} choices; a question has 2 to {len(ascii_uppercase)}")
    return Choices(question.strip(), texts, right)


def index_of(answer: Any, choices: Sequence[str]) -> int:
    """The right choice, given as an index from 0, as a letter from A or as its text."""
    if answer in choices:
        return choices.index(answer)
    letters = list(ascii_uppercase[: len(choices)])
    if isinstance(answer, str) and answer.strip().upper() in letters:
        return letters.index(answer.strip().upper())
    if isinstance(answer, bool) or not isinstance(answer, int) or not 0 <= answer < len(choices):
        raise ValueError(f"the answer {answer!r} is none of {len(choices)} choices")
    return answer


def chosen(text: str, choices: Sequence[str]) -> str | None:
    """The letter that an answer names: behind "answer is" or "answer:", else one that stands alone
    as letters of choices do, else that of the only choice whose text is there."""
    letters = ascii_uppercase[: len(choices)]
    for mark in reversed(list(_MARK.finditer(text))):
        named = re.match(rf"\W*([{letters}])\b", text[mark.end() :])
        if named:
            return named[1]
    alone = ("".join(pair) for pair in _ALONE.findall(text))
    letter = next((each for each in alone if each in letters), None)
    if letter is not None:
        return letter
    found = [
        letter
        for letter, choice in zip(letters, choices, strict=True)
        if re.search(rf"\b{re.escape(choice)}\b", text, re.IGNORECASE)
    ]
    return found[0] if len(found) == 1 else None
