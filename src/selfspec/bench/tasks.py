"""What is asked: the known tasks, how a row of each becomes a prompt, and which questions a sample
takes.

A task's rows come from a file (`sources.py` reads it) or from the hub. Prompts are the papers':
CNN/DM with one example before, XSum without, both as "Article: ... Summary:", HumanEval's code to
continue; chat tasks go through the model's template where it has one. Does not know a tokenizer, a
model or a clock.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from ..errors import OptionError, nearest
from .multiple_choice import Choices, commonsense_qa, mmlu, sst2
from .schema import Sample
from .sources import Row, read_hub, read_rows, read_text

CONVERSATION = (  # MT-Bench's categories, which Spec-Bench reports as one task
    "writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities",
)  # fmt: skip
CONTEXTS = (2048, 4096, 8192)
# more than any ordinary text has: a window of so many characters holds enough tokens
CHARACTERS_A_TOKEN = 12


@dataclass(frozen=True)
class Item:
    """One question, as text."""

    task: str
    id: str
    text: str
    chat: bool
    gold: Mapping[str, Any] = field(default_factory=dict)
    """What a measure of quality needs: the row's own fields."""
    context: int = 0
    """Above 0: the prompt is cut to what leaves the new tokens room in so many positions."""


@dataclass(frozen=True)
class Task:
    """A kind of question: where it comes from and how a row of it is asked."""

    name: str
    help: str
    item: Callable[[Row], Item]
    hub: str = ""
    """Its test split on the hub, as `hf:NAME#CONFIG@SPLIT`."""
    files: tuple[str, ...] = ()
    """What to look for where a folder is given."""
    example: Callable[[Row], str] | None = None
    """Put before every question: the first row, which is then not asked."""
    part: str = ""
    """The category under which Spec-Bench's file has questions of this task, if it has."""

    def checked(self, row: Row) -> Item:
        """What a row asks; raises TypeError where that is no text."""
        item = self.item(row)
        text: object = item.text  # out of a file: its type is only hoped for
        if not isinstance(text, str) or not text.strip():
            raise TypeError(f"the prompt is {text!r}")
        return item


def _spec_bench(row: Row) -> Item:
    name = "conversation" if row["category"] in CONVERSATION else row["category"]
    gold = {"reference": row.get("reference")}
    return Item(name, f"{name}/{row['question_id']}", row["turns"][0], True, gold)


def _human_eval(row: Row) -> Item:
    return Item("humaneval", row["task_id"], row["prompt"], False, row)


def _gsm8k(row: Row) -> Item:
    return Item("gsm8k", f"gsm8k/{row.number}", row["question"], True, row)


def _choices(name: str, read: Callable[[Row], Choices]) -> Callable[[Row], Item]:
    def item(row: Row) -> Item:
        asked = read(row)
        return Item(name, f"{name}/{row.number}", asked.prompt, True, asked.gold)

    return item


def _mbpp(row: Row) -> Item:
    tests = "\n".join(row["test_list"])
    text = (
        f"You are an expert Python programmer. Your task: {row['text']}\n"
        f"Your code should pass these tests:\n\n{tests}\n\nCode:\n"
    )
    return Item("mbpp", f"mbpp/{row['task_id']}", text, False, row)


def _summary(name: str, article: str) -> Callable[[Row], Item]:
    def item(row: Row) -> Item:
        text = f"Article: {row[article]}\nSummary:"
        return Item(name, f"{name}/{row.get('id', row.number)}", text, False, row)

    return item


def _published(row: Row) -> Row:
    """A row of CNN/DM as it was published. Spec-Bench's summaries are of its articles."""
    if "turns" not in row:
        return row
    article = row["turns"][0].removeprefix("Summarize: ")
    values = {"id": row["question_id"], "article": article, "highlights": row["reference"][0]}
    return Row(values, row.file, row.number)


def _cnn_dm(row: Row) -> Item:
    return _summary("cnn-dm", "article")(_published(row))


def _cnn_dm_example(row: Row) -> str:
    row = _published(row)
    highlights = row["highlights"].replace("\n", " ")
    return f"Article: {row['article']}\nSummary: {highlights}\n\n"


def _own(row: Row) -> Item:
    """A row of the user's: a prompt under one of the usual names."""
    known = ("prompt", "question", "text", "instruction", "turns", "messages")
    named = next((key for key in known if key in row), None)
    if named is None:
        raise KeyError("prompt")
    text = row[named]
    if named == "turns":
        text = text[0]
    elif named == "messages":
        text = next(message["content"] for message in text if message["role"] == "user")
    name = str(row.get("category", row.get("task", row.file.partition(".")[0])))
    number = row.get("question_id", row.get("id", row.number))
    return Item(name, f"{name}/{number}", text, True, row)


SPEC_BENCH_FILE = "data/spec_bench/question.jsonl of github.com/hemingkx/Spec-Bench"
HUMAN_EVAL = ("HumanEval.jsonl.gz", "HumanEval.jsonl")
VALIDATION = ("validation.jsonl", "validation.parquet")
MMLU, CSQA = "hf:cais/mmlu#all@test", "hf:tau/commonsense_qa@validation"
CNN_DM, XSUM, TEST = "hf:abisee/cnn_dailymail#3.0.0@test", "hf:EdinburghNLP/xsum@test", "test.jsonl"
OWN_HELP = "your own: lines with prompt, question, text, turns or messages"
_TASKS = (
    Task("spec-bench", "Spec-Bench's six tasks, first turns", _spec_bench, "", ("question.jsonl",)),
    Task("humaneval", "HumanEval: code to continue", _human_eval,
         "hf:openai/openai_humaneval@test", HUMAN_EVAL),
    Task("gsm8k", "GSM8K: grade-school mathematics", _gsm8k, "hf:openai/gsm8k#main@test", (TEST,)),
    Task("mmlu", "MMLU: questions with four choices", _choices("mmlu", mmlu), MMLU,
         (TEST, "test.parquet")),
    Task("commonsense-qa", "CommonsenseQA: questions with five choices",
         _choices("commonsense-qa", commonsense_qa), CSQA, VALIDATION),
    Task("sst2", "SST-2: is a sentence negative or positive", _choices("sst2", sst2),
         "hf:stanfordnlp/sst2@validation", VALIDATION),
    Task("mbpp", "MBPP: small Python functions with their tests", _mbpp,
         "hf:google-research-datasets/mbpp#full@test", ("mbpp.jsonl",)),
    Task("cnn-dm", "CNN/DailyMail summaries, 1-shot; also out of Spec-Bench's file", _cnn_dm,
         CNN_DM, (TEST,), _cnn_dm_example, "summarization"),
    Task("xsum", "XSum summaries, 0-shot", _summary("xsum", "document"), XSUM, (TEST,)),
    Task("jsonl", OWN_HELP, _own),
)  # fmt: skip
TASKS = {task.name: task for task in _TASKS}
LONG = "long"  # a text file continued from 2k to 8k: no rows, so not in the table
LONG_HELP = "a text to continue, behind 2048, 4096 and 8192 tokens (--contexts)"
LONG_FILES = ("test.txt", "input.txt", "valid.txt")


def known_tasks() -> dict[str, str]:
    """Every task with a line about it."""
    return {**{name: task.help for name, task in TASKS.items()}, LONG: LONG_HELP}


@dataclass(frozen=True)
class Asked:
    """Some questions and what they are a sample of."""

    sample: Sample
    items: Sequence[Item]


def read_task(
    text: str,
    count: int = 0,
    skip_bad: bool = False,
    contexts: Sequence[int] = (),
    chat: bool | None = None,
) -> list[Asked]:
    """The samples of `NAME` or `NAME=PATH`: one, or one for each part (Spec-Bench's tasks, the
    lengths of a long context).

    `count` 0 takes every question. `chat` says whether to ask through a template, for tasks that
    would otherwise decide it.
    """
    name, _, given = text.partition("=")
    if name not in known_tasks():
        raise OptionError(f"there is no task {name!r}; {nearest(name, known_tasks())}")
    if count < 0:
        raise OptionError(
            f"--sample {count} asks nothing; give at least 1 question a task, or 0 for all of them"
        )
    path = Path(given).expanduser() if given else None
    if name == LONG:
        return _long(path, count or 4, contexts or CONTEXTS)
    items, source, skipped = _items(TASKS[name], path, skip_bad)
    parts: dict[str, list[Item]] = {}
    for item in items:
        item = item if chat is None else replace(item, chat=chat)
        parts.setdefault(item.task, []).append(item)
    return [
        _asked(task, spread(part, count), len(part), source, skipped)
        for task, part in parts.items()
    ]


def read_questions(path: Path, sample: int) -> list[Item]:
    """Spec-Bench's questions, or those of a file like it: a fixed sample of each task."""
    return [item for asked in read_task(f"spec-bench={path}", sample) for item in asked.items]


def _items(task: Task, path: Path | None, skip_bad: bool) -> tuple[list[Item], str, list[str]]:
    """All questions of a source, its name, and what was left out."""
    skipped: list[str] = []
    before = ""
    if path is not None:
        file = _in_folder(path, task.files, task.name)
        rows, source = read_rows(file, skip_bad, skipped), file.name
        if task.part:
            rows = [row for row in rows if "turns" not in row or row.get("category") == task.part]
        while task.example and rows and not before:
            before = _made(task.example, rows.pop(0), task.name, skip_bad, skipped) or ""
    elif not task.hub:
        where = SPEC_BENCH_FILE if task.name == "spec-bench" else "a file of yours"
        raise OptionError(
            f"the task {task.name!r} is not on the hub but in {where}; write {task.name}=PATH"
        )
    else:
        rows, source = read_hub(task.hub, task.name), task.hub
        if task.example:
            first = task.hub.partition("@")[0] + "@train[:1]"
            before = task.example(read_hub(first, task.name)[0])
    made = [_made(task.checked, row, task.name, skip_bad, skipped) for row in rows]
    items = [replace(item, text=before + item.text) for item in made if item is not None]
    if not items:
        raise OptionError(
            f"{source} has no question of the task {task.name!r}, so there is nothing to ask; "
            "check the file"
        )
    return items, source, skipped


T = TypeVar("T")


def _made(
    make: Callable[[Row], T], row: Row, task: str, skip_bad: bool, skipped: list[str]
) -> T | None:
    """What a row becomes; one that is no row of the task is an error that names its line, or left
    out with a remark."""
    try:
        return make(row)
    except (LookupError, TypeError, ValueError, AttributeError, StopIteration) as error:
        reason = f"{row.file}, line {row.number}: not a row of {task} ({error!r})"
        if not skip_bad:
            raise OptionError(
                f"{reason}; mend or remove it, or use the rest with --skip-bad"
            ) from error
        skipped.append(reason)
        return None


def _in_folder(path: Path, files: Sequence[str], task: str) -> Path:
    """The file, or the one of a folder that this task would be in."""
    candidates = (
        [path / name for name in files if (path / name).is_file()] if path.is_dir() else [path]
    )
    if not candidates:
        raise OptionError(
            f"the folder {path.name!r} has no {' or '.join(files) or 'file'} for the task "
            f"{task!r}; name the file itself"
        )
    return candidates[0]


def spread(items: Sequence[Any], count: int) -> Sequence[Any]:
    """A fixed sample, evenly spread; 0 is everything."""
    count = min(count or len(items), len(items))
    return [items[index * len(items) // count] for index in range(count)]


def _asked(
    task: str, chosen: Sequence[Item], of: int, source: str, skipped: Sequence[str]
) -> Asked:
    if len({item.id for item in chosen}) != len(chosen):
        chosen = [replace(item, id=f"{item.id}#{number}") for number, item in enumerate(chosen)]
    texts = "\0".join(f"{item.id}\0{item.text}\0{item.context}" for item in chosen)
    name = f"{task}-{len(chosen)}-{hashlib.sha256(texts.encode()).hexdigest()[:8]}"
    sample = Sample(task, name, source, len(chosen), of, chosen[0].chat, list(skipped))
    return Asked(sample, chosen)


def _long(path: Path | None, count: int, contexts: Sequence[int]) -> list[Asked]:
    """Windows of a text, evenly spread, for each length."""
    if path is None:
        raise OptionError(
            f"the task {LONG!r} continues a text of yours; write {LONG}=PATH with a text file of a "
            "few hundred kB"
        )
    file = _in_folder(path, LONG_FILES, LONG)
    text = read_text(file)
    asked = []
    for context in contexts:
        name, width = f"{LONG}-{context}", context * CHARACTERS_A_TOKEN
        windows = max(1, len(text) // width)
        taken, room = min(count, windows), max(0, len(text) - width)
        starts = [index * room // max(1, taken) for index in range(taken)]
        items = [
            Item(name, f"{name}/{start}", text[start : start + width], False, {}, context)
            for start in starts
        ]
        asked.append(_asked(name, items, windows, file.name, []))
    return asked
