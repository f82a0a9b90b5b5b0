"""Questions by task out of a JSONL file: Spec-Bench's question.jsonl or one like it. Knows no model and no drafter."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import OptionError

CONVERSATION = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")


@dataclass(frozen=True)
class Question:
    """One prompt of a task."""

    task: str
    number: int
    text: str


def read_questions(path: Path, sample: int) -> list[Question]:
    """A fixed sample of each task, evenly spread over the file; first turns only."""
    if not path.is_file():
        raise OptionError(f"There is no file {path.name!r}; give Spec-Bench's question.jsonl or a file like it.")
    if sample < 1:
        raise OptionError(f"--sample {sample} asks nothing; give at least 1 question a task")
    found: dict[str, list[Question]] = {}
    for line, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(text)
            task = "conversation" if row["category"] in CONVERSATION else row["category"]
            question = Question(task, row["question_id"], row["turns"][0])
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise OptionError(
                f"{path.name}, line {line}: not a question with category, question_id and turns ({error!r}); mend or remove it"
            ) from error
        found.setdefault(task, []).append(question)
    return [question for task in found.values() for question in spread(task, sample)]


def spread(task: Sequence[Question], sample: int) -> Sequence[Question]:
    """A fixed sample, evenly spread over the task."""
    count = min(sample, len(task))
    return [task[index * len(task) // count] for index in range(count)]
