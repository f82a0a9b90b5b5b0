"""The model writes its own training text: answers to prompts that people have, or that it makes up
itself.

Drafts are checked against the model's own distribution, so its own text is the best text to train a
drafting part on. Prompts come from rows (`rows.py`), or the model is shown how a user's message
begins and writes one (Magpie, Xu et al. 2024). What comes out is JSONL: prompt and response as
text, which every recipe reads, and as the exact token ids. A run can be stopped at any time and
goes on where it was: a line that is there is not made again. Does not know what the text is used
for.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

from ..core.sampling import SamplingParams
from ..core.text_rows import Row
from ..errors import DataError, OptionError
from ..llm import LLM
from ..results import Result

MADE_UP = "made up"
LONGEST_QUESTION = 300  # tokens of a message the model makes up; longer ones rarely end
# columns that hold a prompt, in the order in which they are looked for
KEYS = (
    "prompt",
    "question",
    "instruction",
    "text",
)


@dataclass(frozen=True)
class OwnText:
    """How the model answers."""

    max_new_tokens: int = 256
    """Write at most this many new tokens for an answer."""
    temperature: float = 0.0
    """How varied answers are: 0 is greedy, above it they are drawn, each with a seed of its own."""
    top_p: float = 1.0
    """Draw answers only from the likeliest tokens that together have this probability; 1 is off."""
    samples: int = 1
    """How many answers to write to each prompt; more than one needs a temperature."""
    batch: int = 32
    """How many prompts are answered together."""
    seed: int = 0
    """Seed of the drawn answers and of the made-up prompts."""

    def __post_init__(self) -> None:
        if self.samples > 1 and not self.temperature:
            raise OptionError(
                f"samples={self.samples} greedy answers to a prompt would all be the same; set a "
                f"temperature, e.g. 0.8"
            )
        for name in ("max_new_tokens", "samples", "batch"):
            if getattr(self, name) < 1:
                raise OptionError(
                    f"{name}={getattr(self, name)} would write nothing; use 1 or more"
                )
        SamplingParams(temperature=self.temperature, top_p=self.top_p)  # says itself what is wrong


@dataclass(frozen=True)
class Question:
    """A prompt to be answered: the text as its author wrote it, the ids that the model reads, and
    where it comes from."""

    text: str
    ids: Sequence[int]
    source: str

    @property
    def key(self) -> str:
        """The same for the same ids."""
        return hashlib.sha256(json.dumps(list(self.ids)).encode()).hexdigest()[:32]


@dataclass
class Report:
    """What a run did, and what it found done."""

    answers: int = 0
    tokens: int = 0
    found: int = 0  # answers that an earlier run had written
    repeated: int = 0  # prompts, or answers to the same prompt, that were there already
    too_long: int = 0  # prompts that leave no room for an answer
    seconds: float = 0.0
    stopped: bool = False  # the time was up before the prompts were

    def as_dict(self) -> dict[str, Any]:
        return dict(vars(self))


# ------------------------------------------------------------------------------------------ prompts


def questions_from(
    llm: LLM, rows: Iterable[tuple[str, Row]], column: str | None = None
) -> Iterator[Question]:
    """Prompts of rows: a column by name, or the first that is there of `messages`, `turns`,
    `prompt`, `question`, `instruction` (with its `input`), `text`. A conversation is answered after
    its last message of the user."""
    for where, row in rows:
        messages = _messages(row, where, column)
        text = messages[-1]["content"]
        if text.strip():
            yield Question(text, _ids(llm, messages), where)


def _ids(llm: LLM, messages: list[dict[str, str]]) -> list[int]:
    tokenizer: Any = llm.tokenizer
    if tokenizer is None:
        raise OptionError(
            f"{llm.info.name} has no tokenizer, so prompts cannot be read; add its files to the "
            f"folder"
        )
    return (
        llm.encode_chat(messages)
        if tokenizer.chat_template
        else list(tokenizer(messages[-1]["content"])["input_ids"])
    )


def _messages(row: Row, where: str, column: str | None) -> list[dict[str, str]]:
    if column is not None:
        return [{"role": "user", "content": _text(row, column, where)}]
    if isinstance(row.get("messages"), list):
        return _until_user(row["messages"], where)
    if isinstance(row.get("turns"), list) and row["turns"] and isinstance(row["turns"][0], str):
        return [{"role": "user", "content": row["turns"][0]}]
    for name in KEYS:
        if isinstance(row.get(name), str):
            more = row.get("input") if name == "instruction" else None
            return [
                {
                    "role": "user",
                    "content": row[name]
                    + (f"\n\n{more}" if isinstance(more, str) and more else ""),
                }
            ]
    raise DataError(
        f"{where} has the columns {', '.join(map(repr, row)) or '(none)'}, none of which is known "
        f"to hold a prompt; name the one "
        "that does (column)"
    )


def _text(row: Row, column: str, where: str) -> str:
    if not isinstance(row.get(column), str):
        raise DataError(
            f"{where} has no text in a column {column!r}; its columns are "
            f"{', '.join(map(repr, row)) or '(none)'}"
        )
    return str(row[column])


def _until_user(messages: list[Any], where: str) -> list[dict[str, str]]:
    if not all(
        isinstance(each, dict) and isinstance(each.get("content"), str) for each in messages
    ):
        raise DataError(
            f"{where}: every message has to be an object with 'role' and 'content' as text"
        )
    users = [index for index, each in enumerate(messages) if each.get("role") == "user"]
    if not users:
        raise DataError(
            f"{where}: the conversation has no message of a user, so there is nothing to answer"
        )
    return [
        {"role": str(each["role"]), "content": each["content"]}
        for each in messages[: users[-1] + 1]
    ]


def made_up(
    llm: LLM,
    count: int,
    openings: Sequence[str] = ("",),
    *,
    seed: int = 0,
    batch: int = 32,
    first: int = 0,
) -> Iterator[Question]:
    """Messages that the model writes in its user's place, each beginning with one of `openings` in
    turn; numbers `first` to `count` - 1.

    Number i is a function of the model, the openings and seed + i, so that an interrupted run meets
    the same ones again. Messages that do not end within 300 tokens, or say next to nothing, are
    left out.
    """
    begins = [_opened(llm, opening) for opening in openings]
    for start in range(first, count, batch):
        numbers = range(start, min(count, start + batch))
        sampling = [
            SamplingParams(temperature=0.9, top_p=0.97, seed=seed + number) for number in numbers
        ]
        prompts = [begins[number % len(begins)] for number in numbers]
        results = llm.generate(
            prompts, sampling=sampling, max_new_tokens=LONGEST_QUESTION, draft=None
        )
        for number, result in zip(numbers, results, strict=True):
            text = (openings[number % len(openings)] + result.text).strip()
            if result.finish_reason == "eos" and len(result.tokens) > 4:
                yield Question(
                    text,
                    _ids(llm, [{"role": "user", "content": text}]),
                    f"{MADE_UP} {seed}:{number}",
                )


def made_up_so_far(out: Path, seed: int) -> int:
    """The number after the last made-up prompt that was answered: those before it need not be made
    up again."""
    begin = f"{MADE_UP} {seed}:"
    sources = (str(line["source"]) for _, line in _lines(out))
    return max(
        (1 + int(source.removeprefix(begin)) for source in sources if source.startswith(begin)),
        default=0,
    )


def mixed(sources: Sequence[tuple[Iterable[Question], int]]) -> Iterator[Question]:
    """Sources, each with its size, spread evenly over one another: wherever a run is stopped, it
    has some of each."""

    def placed(source: Iterable[Question], size: int) -> Iterator[tuple[float, Question]]:
        return (((index + 0.5) / max(1, size), question) for index, question in enumerate(source))

    return (
        question
        for _, question in heapq.merge(*(placed(*each) for each in sources), key=itemgetter(0))
    )


def _opened(llm: LLM, opening: str) -> list[int]:
    """The ids of a conversation up to where the user has written `opening`."""
    tokenizer: Any = llm.tokenizer
    mark = "\N{OBJECT REPLACEMENT CHARACTER}"
    if tokenizer is None or not tokenizer.chat_template:
        raise OptionError(
            f"{llm.info.name} has no chat template, so it cannot write in its user's place; give "
            f"prompts in files"
        )
    text = tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False)
    return list(
        tokenizer(text[: text.index(mark)] + opening, add_special_tokens=False)["input_ids"]
    )


# ------------------------------------------------------------------------------------------ answers


@dataclass
class _Written:
    """What the file holds: how many answers to each prompt, and digests of all."""

    counts: dict[str, int] = field(default_factory=dict)
    answers: set[str] = field(default_factory=set)


def write(
    llm: LLM,
    questions: Iterable[Question],
    out: Path,
    options: OwnText | None = None,
    *,
    max_seconds: float | None = None,
    tell: Callable[[Report], None] | None = None,
) -> Report:
    """Answer the questions and append the answers to `out`, batch by batch. `tell` hears of every
    batch."""
    options = options or OwnText()
    start = time.perf_counter()
    written = _resume(out, options)
    report = Report(found=sum(written.counts.values()))
    jobs = _jobs(llm, questions, written, report, options)
    while batch := list(itertools.islice(jobs, options.batch)):
        results = llm.generate(
            [list(question.ids) for question, _ in batch],
            sampling=[_sampling(options, question, sample) for question, sample in batch],
            max_new_tokens=options.max_new_tokens,
        )
        lines = [_record(*job, result, options) for job, result in zip(batch, results, strict=True)]
        _append(out, [line for line in lines if _is_new(line, written, report)])
        report.answers = sum(written.counts.values()) - report.found
        report.tokens += sum(len(result.tokens) for result in results)
        report.seconds = time.perf_counter() - start
        if tell:
            tell(report)
        if max_seconds is not None and report.seconds > max_seconds:
            report.stopped = True
            break
    return report


def _jobs(
    llm: LLM, questions: Iterable[Question], written: _Written, report: Report, options: OwnText
) -> Iterator[tuple[Question, int]]:
    """Each prompt once, with the numbers of the answers it still lacks."""
    seen: set[str] = set()
    for question in questions:
        if question.key in seen:
            report.repeated += 1
            continue
        seen.add(question.key)
        if len(question.ids) + 1 >= llm.info.context:
            report.too_long += 1
            continue
        for sample in range(written.counts.get(question.key, 0), options.samples):
            yield question, sample


def _sampling(options: OwnText, question: Question, sample: int) -> SamplingParams:
    """Greedy without any penalty, or drawn with a seed that belongs to this prompt and sample."""
    if not options.temperature:
        return SamplingParams()
    seed = (options.seed + int(question.key[:8], 16) + sample) % 2**31
    return SamplingParams(temperature=options.temperature, top_p=options.top_p, seed=seed)


def _record(question: Question, sample: int, result: Result, options: OwnText) -> dict[str, Any]:
    return {
        "prompt": question.text,
        "response": result.text,
        "prompt_ids": list(question.ids),
        "response_ids": result.tokens,
        "source": question.source,
        "temperature": options.temperature,
        "sample": sample,
        "finish": result.finish_reason,
        "key": question.key,
    }


def _is_new(line: dict[str, Any], written: _Written, report: Report) -> bool:
    """Books an answer; one that the same prompt already has counts as made, and is not written
    twice."""
    written.counts[line["key"]] = written.counts.get(line["key"], 0) + 1
    digest = f"{line['key']}:{hash(tuple(line['response_ids']))}"
    if digest in written.answers or not line["response_ids"]:
        report.repeated += 1
        return False
    written.answers.add(digest)
    return True


def _append(out: Path, lines: Sequence[dict[str, Any]]) -> None:
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _resume(out: Path, options: OwnText) -> _Written:
    """What is there already. A last line that was cut off by a kill is removed; anything else that
    is no answer is an error."""
    written = _Written()
    if out.exists():
        raw = out.read_bytes()
        os.truncate(out, raw.rfind(b"\n") + 1)
    for number, line in _lines(out):
        key, temperature = line["key"], line["temperature"]
        if temperature != options.temperature:
            raise DataError(
                f"{out}:{number} was written at temperature {temperature}, and "
                f"{options.temperature} is asked for; a file holds "
                "answers of one kind, so write to another one"
            )
        written.counts[key] = written.counts.get(key, 0) + 1
        written.answers.add(f"{key}:{hash(tuple(line['response_ids']))}")
    return written


def _lines(out: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The answers that a file holds; what follows its last end of line was cut off by a kill."""
    raw = out.read_bytes() if out.exists() else b""
    for number, line in enumerate(raw[: raw.rfind(b"\n") + 1].splitlines(), start=1):
        try:
            found = json.loads(line)
            missing = {"key", "source", "response_ids", "temperature"} - set(found)
        except (ValueError, TypeError) as error:
            raise DataError(
                f"{out}:{number} is not an answer that was written here ({error}); write to "
                f"another file"
            ) from error
        if missing:
            raise DataError(
                f"{out}:{number} is not an answer that was written here (no {min(missing)!r}); "
                f"write to another file"
            )
        yield number, found
