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
from .sources import Row, read_hub, read_rows, read_text
from .suite_schema import Sample

CONVERSATION = (
    "writing",
    "roleplay",
    "reasoning",
    "math",
    "coding",
    "extraction",
    "stem",
    "humanities",
)
CONTEXTS = (2048, 4096, 8192)
CHARACTERS_A_TOKEN = (
    12  # more than any ordinary text has: a window of so many characters holds enough tokens
)


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


def _spec_bench(row: Row) -> Item:
    name = "conversation" if row["category"] in CONVERSATION else row["category"]
    return Item(
        name,
        f"{name}/{row['question_id']}",
        row["turns"][0],
        True,
        {"reference": row.get("reference")},
    )


def _human_eval(row: Row) -> Item:
    return Item("humaneval", row["task_id"], row["prompt"], False, row)


def _gsm8k(row: Row) -> Item:
    return Item("gsm8k", f"gsm8k/{row.number}", row["question"], True, row)


def _mbpp(row: Row) -> Item:
    tests = "\n".join(row["test_list"])
    text = f"You are an expert Python programmer. Your task: {row['text']}\nYour code should pass these tests:\n\n{tests}\n\nCode:\n"
    return Item("mbpp", f"mbpp/{row['task_id']}", text, False, row)


def _cnn_dm(row: Row) -> Item:
    return Item(
        "cnn-dm",
        f"cnn-dm/{row.get('id', row.number)}",
        f"Article: {row['article']}\nSummary:",
        False,
        row,
    )


def _cnn_dm_example(row: Row) -> str:
    return f"Article: {row['article']}\nSummary: {row['highlights'].replace(chr(10), ' ')}\n\n"


def _xsum(row: Row) -> Item:
    return Item(
        "xsum",
        f"xsum/{row.get('id', row.number)}",
        f"Article: {row['document']}\nSummary:",
        False,
        row,
    )


def _own(row: Row) -> Item:
    """A row of the user's: a prompt under one of the usual names."""
    named = next(
        (
            key
            for key in ("prompt", "question", "text", "instruction", "turns", "messages")
            if key in row
        ),
        None,
    )
    if named is None:
        raise KeyError("prompt")
    text = row[named]
    if named == "turns":
        text = text[0]
    elif named == "messages":
        text = next(message["content"] for message in text if message["role"] == "user")
    name = str(row.get("category", row.get("task", row.file.partition(".")[0])))
    return Item(
        name, f"{name}/{row.get('question_id', row.get('id', row.number))}", text, True, row
    )


SPEC_BENCH_FILE = "data/spec_bench/question.jsonl of github.com/hemingkx/Spec-Bench"
_TASKS = (
    Task(
        "spec-bench", "Spec-Bench's six tasks, first turns", _spec_bench, files=("question.jsonl",)
    ),
    Task(
        "humaneval",
        "HumanEval: code to continue",
        _human_eval,
        "hf:openai/openai_humaneval@test",
        ("HumanEval.jsonl.gz", "HumanEval.jsonl"),
    ),
    Task(
        "gsm8k",
        "GSM8K: grade-school mathematics",
        _gsm8k,
        "hf:openai/gsm8k#main@test",
        ("test.jsonl",),
    ),
    Task(
        "mbpp",
        "MBPP: small Python functions with their tests",
        _mbpp,
        "hf:google-research-datasets/mbpp#full@test",
        ("mbpp.jsonl",),
    ),
    Task(
        "cnn-dm",
        "CNN/DailyMail summaries, 1-shot",
        _cnn_dm,
        "hf:abisee/cnn_dailymail#3.0.0@test",
        ("test.jsonl",),
        _cnn_dm_example,
    ),
    Task("xsum", "XSum summaries, 0-shot", _xsum, "hf:EdinburghNLP/xsum@test", ("test.jsonl",)),
    Task("jsonl", "your own: lines with prompt, question, text, turns or messages", _own),
)
TASKS = {task.name: task for task in _TASKS}
LONG = "long"  # a text file continued from 2k to 8k: no rows, so not in the table
LONG_FILES = ("test.txt", "input.txt", "valid.txt")


def known_tasks() -> dict[str, str]:
    """Every task with a line about it."""
    return {
        **{name: task.help for name, task in TASKS.items()},
        LONG: "a text to continue, behind 2048, 4096 and 8192 tokens (--contexts)",
    }


@dataclass(frozen=True)
class Asked:
    """Some questions and what they are a sample of."""

    sample: Sample
    items: Sequence[Item]


def read_task(
    text: str,
    count: int = 0,
    skip_bad: bool = False,
    contexts: Sequence[int] = CONTEXTS,
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
        return _long(path, count or 4, contexts)
    items, source, skipped = _items(TASKS[name], path, skip_bad)
    if chat is not None:
        items = [replace(item, chat=chat) for item in items]
    parts = {
        task: [item for item in items if item.task == task]
        for task in dict.fromkeys(item.task for item in items)
    }
    return [_asked(task, part, count, source, skipped) for task, part in parts.items()]


def _items(task: Task, path: Path | None, skip_bad: bool) -> tuple[list[Item], str, list[str]]:
    """All questions of a source, its name, and what was left out."""
    skipped: list[str] = []
    before = ""
    if path is not None:
        found = _in_folder(path, task.files, task.name)
        rows, source = read_rows(found, skip_bad, skipped), found.name
        while task.example and rows and not before:
            shown = _made(task.example, rows.pop(0), task.name, skip_bad, skipped)
            before = "" if shown is None else shown
    elif not task.hub:
        where = SPEC_BENCH_FILE if task.name == "spec-bench" else "a file of yours"
        raise OptionError(
            f"the task {task.name!r} is not on the hub but in {where}; write {task.name}=PATH"
        )
    else:
        rows, source = read_hub(task.hub, task.name), task.hub
        if task.example:
            before = task.example(read_hub(task.hub.partition("@")[0] + "@train[:1]", task.name)[0])
    made = [
        _made(lambda row: _checked(task.item(row)), row, task.name, skip_bad, skipped)
        for row in rows
    ]
    items = [replace(item, text=before + item.text) for item in made if item is not None]
    if not items:
        raise OptionError(
            f"{source} has no question of the task {task.name!r}, so there is nothing to ask; "
            f"check the file"
        )
    return items, source, skipped


T = TypeVar("T")


def _made(
    make: Callable[[Row], T], row: Row, task: str, skip_bad: bool, skipped: list[str]
) -> T | None:
    """What a row becomes; one that is no row of the task is an error that names its line, or left
    out aloud."""
    try:
        return make(row)
    except (KeyError, TypeError, IndexError, AttributeError, StopIteration) as error:
        reason = f"{row.file}, line {row.number}: not a row of {task} ({error!r})"
        if not skip_bad:
            raise OptionError(
                f"{reason}; mend or remove it, or use the rest with --skip-bad"
            ) from error
        skipped.append(reason)
        return None


def _checked(item: Item) -> Item:
    text: object = item.text  # out of a file: its type is only hoped for
    if not isinstance(text, str) or not text.strip():
        raise TypeError(f"the prompt is {text!r}")
    return item


def _in_folder(path: Path, files: Sequence[str], task: str) -> Path:
    """The file, or the one of a folder that this task would be in."""
    if not path.is_dir():
        return path
    found = next((path / name for name in files if (path / name).is_file()), None)
    if found is None:
        raise OptionError(
            f"the folder {path.name!r} has no {' or '.join(files) or 'file'} for the task "
            f"{task!r}; name the file itself"
        )
    return found


def spread(items: Sequence[Any], count: int) -> Sequence[Any]:
    """A fixed sample, evenly spread; 0 is everything."""
    count = min(count or len(items), len(items))
    return [items[index * len(items) // count] for index in range(count)]


def _asked(
    task: str, items: Sequence[Item], count: int, source: str, skipped: Sequence[str]
) -> Asked:
    chosen = spread(items, count)
    if len({item.id for item in chosen}) != len(chosen):
        chosen = [replace(item, id=f"{item.id}#{number}") for number, item in enumerate(chosen)]
    seen = hashlib.sha256(
        "\0".join(f"{item.id}\0{item.text}\0{item.context}" for item in chosen).encode()
    )
    name = f"{task}-{len(chosen)}-{seen.hexdigest()[:8]}"
    return Asked(
        Sample(task, name, source, len(chosen), len(items), chosen[0].chat, list(skipped)), chosen
    )


def _long(path: Path | None, count: int, contexts: Sequence[int]) -> list[Asked]:
    """Windows of a text, evenly spread, for each length."""
    if path is None:
        raise OptionError(
            f"the task {LONG!r} continues a text of yours; write {LONG}=PATH with a text file of "
            f"a few hundred kB"
        )
    found = _in_folder(path, LONG_FILES, LONG)
    text = read_text(found)
    asked = []
    for context in contexts:
        width = context * CHARACTERS_A_TOKEN
        windows = max(1, len(text) // width)
        starts = [
            index * max(0, len(text) - width) // max(1, min(count, windows))
            for index in range(min(count, windows))
        ]
        name = f"{LONG}-{context}"
        items = [
            Item(name, f"{name}/{start}", text[start : start + width], False, {}, context)
            for start in starts
        ]
        part = _asked(name, items, 0, found.name, [])
        asked.append(replace(part, sample=replace(part.sample, of=windows)))
    return asked
