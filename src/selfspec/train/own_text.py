"""The model writes its own training text: answers to given prompts, or to prompts it makes up.

Drafts are checked against the model's own distribution, so its own text teaches drafting best.
Prompts come from rows (`text_rows.py`), or the model is shown how a user's message begins and
writes one (Magpie, Xu et al. 2024). The result is JSONL: prompt and response as text, which every
recipe reads, and as token ids. A run can be stopped at any time: what was written is not written
again. Does not know what the text is used for.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

from ..core import door
from ..core.files import require_file, require_output, writing
from ..core.json_text import from_json
from ..core.sampling import SamplingParams
from ..core.template import ids_of
from ..core.template import written as written_by
from ..core.text_rows import Row
from ..errors import DataError, OptionError
from ..llm import LLM
from ..results import Result
from .data import names

MADE_UP = "made up"
LONGEST_QUESTION = 300  # tokens of a message the model makes up; longer ones rarely end
# columns that hold a prompt, in the order in which they are looked for
KEYS = ("prompt", "question", "instruction", "text")


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
                f"samples={self.samples} greedy answers would all be the same; set a temperature"
            )
        for name in ("max_new_tokens", "samples", "batch"):
            value = getattr(self, name)
            if value < 1:
                raise OptionError(f"{name}={value} would write nothing; use 1 or more")
        SamplingParams(temperature=self.temperature, top_p=self.top_p)  # says itself what is wrong


@dataclass(frozen=True)
class Question:
    """A prompt to be answered."""

    text: str  # as its author wrote it
    ids: Sequence[int]  # as the model reads it
    source: str
    number: int = 0  # its place in its source

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
    `prompt`, `question`, `instruction` (with its `input`), `text`. Of a conversation the last
    message of the user is answered."""
    for number, (where, row) in enumerate(rows):
        messages = _messages(row, where, column)
        text = messages[-1]["content"]
        if text.strip():
            yield Question(text, _ids(llm, messages), where, number)


def _ids(llm: LLM, messages: list[dict[str, str]]) -> list[int]:
    tokenizer: Any = llm.tokenizer
    if tokenizer is None:
        raise OptionError(f"{llm.info.name} has no tokenizer to read prompts with; add its files")
    if tokenizer.chat_template:
        return llm.encode_chat(messages)
    return list(tokenizer(messages[-1]["content"])["input_ids"])


def _messages(row: Row, where: str, column: str | None) -> list[dict[str, str]]:
    if column is not None:
        if not isinstance(row.get(column), str):
            raise DataError(
                f"{where} has no text in a column {column!r}; its columns are {names(row)}"
            )
        return [_user(row[column])]
    if isinstance(row.get("messages"), list):
        return _until_user(row["messages"], where)
    turns = row.get("turns")
    if isinstance(turns, list) and turns and isinstance(turns[0], str):
        return [_user(turns[0])]
    for name in KEYS:
        if isinstance(row.get(name), str):
            more = row.get("input") if name == "instruction" else None
            return [_user(row[name] + (f"\n\n{more}" if isinstance(more, str) and more else ""))]
    raise DataError(
        f"{where} has the columns {names(row)}, none of which is known to hold a prompt; name the "
        "one that does (column)"
    )


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _until_user(messages: list[Any], where: str) -> list[dict[str, str]]:
    door.messages(messages, where, DataError, parts=False)
    users = [index for index, message in enumerate(messages) if message.get("role") == "user"]
    if not users:
        raise DataError(f"{where}: the conversation has no message of a user to answer")
    until = messages[: users[-1] + 1]
    return [{"role": str(message["role"]), "content": message["content"]} for message in until]


def made_up(
    llm: LLM,
    count: int,
    openings: Sequence[str] = ("",),
    *,
    seed: int = 0,
    batch: int = 32,
    first: int = 0,
) -> Iterator[Question]:
    """Messages that the model writes in its user's place, numbers `first` to `count` - 1, each
    beginning with one of `openings` in turn.

    Number i is a function of the model, the openings and seed + i, so an interrupted run meets the
    same ones again. Left out are messages that do not end within 300 tokens or say next to nothing.
    """
    begins = [_opened(llm, opening) for opening in openings]
    for start in range(first, count, batch):
        numbers = range(start, min(count, start + batch))
        drawn = [SamplingParams(temperature=0.9, top_p=0.97, seed=seed + n) for n in numbers]
        prompts = [begins[number % len(begins)] for number in numbers]
        results = llm.generate(prompts, sampling=drawn, max_new_tokens=LONGEST_QUESTION, draft=None)
        for number, result in zip(numbers, results, strict=True):
            text = (openings[number % len(openings)] + result.text).strip()
            if result.finish_reason == "eos" and len(result.tokens) > 4:
                ids = _ids(llm, [_user(text)])
                yield Question(text, ids, f"{MADE_UP} {seed}:{number}", number)


def made_up_so_far(out: Path, seed: int) -> int:
    """The number of the last made-up prompt that was answered, where a later run begins: a kill
    may have come before its last answer."""
    begin = f"{MADE_UP} {seed}:"
    sources = [str(line["source"]) for _, line in _lines(out)]
    numbers = [int(name.removeprefix(begin)) for name in sources if name.startswith(begin)]
    return max(numbers, default=0)


def mixed(sources: Sequence[tuple[Iterable[Question], int]]) -> Iterator[Question]:
    """Sources, each with its size, spread evenly: a run that is stopped has some of each. A
    question's place follows from its number, so a run that goes on keeps the order."""

    def placed(source: Iterable[Question], size: int) -> Iterator[tuple[float, Question]]:
        return (((question.number + 0.5) / max(1, size), question) for question in source)

    merged = heapq.merge(*(placed(*source) for source in sources), key=itemgetter(0))
    return (question for _, question in merged)


def _opened(llm: LLM, opening: str) -> list[int]:
    """The ids of a conversation up to where the user has written `opening`."""
    tokenizer: Any = llm.tokenizer
    mark = "\N{OBJECT REPLACEMENT CHARACTER}"
    if tokenizer is None or not tokenizer.chat_template:
        raise OptionError(
            f"{llm.info.name} has no chat template to make prompts up with; give prompts in files"
        )
    text = written_by(tokenizer, [_user(mark)], opening=False, what="a made-up prompt")
    if mark not in text:
        raise OptionError(
            f"the chat template of {llm.info.name} leaves out what the user says, so no prompt can "
            "be made up with it; give prompts in files"
        )
    return ids_of(tokenizer, text[: text.index(mark)] + opening)


# ------------------------------------------------------------------------------------------ answers


@dataclass
class _Written:
    """What the file holds."""

    counts: Counter[str] = field(default_factory=Counter)  # answers to each prompt
    answers: set[tuple[str, int]] = field(default_factory=set)  # prompt, hash of the answer

    def add(self, line: dict[str, Any]) -> bool:
        """Book an answer. Returns whether it is new: one that its prompt already has counts, but is
        not written twice."""
        self.counts[line["key"]] += 1
        answer = line["key"], hash(tuple(line["response_ids"]))
        new = answer not in self.answers and bool(line["response_ids"])
        self.answers.add(answer)
        return new


def write(
    llm: LLM,
    questions: Iterable[Question],
    out: Path,
    options: OwnText | None = None,
    *,
    max_seconds: float | None = None,
    tell: Callable[[Report], None] | None = None,
) -> Report:
    """Answer the questions and append the answers to `out`, batch by batch."""
    options = options or OwnText()
    require_output(out)
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
        new = [line for line in lines if written.add(line)]
        _append(out, new)
        report.repeated += len(lines) - len(new)
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
        for sample in range(written.counts[question.key], options.samples):
            yield question, sample


def _sampling(options: OwnText, question: Question, sample: int) -> SamplingParams:
    """Greedy without any penalty, or drawn with a seed of this prompt and sample."""
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


def _append(out: Path, lines: Sequence[dict[str, Any]]) -> None:
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    with writing(out), out.open("a", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _resume(out: Path, options: OwnText) -> _Written:
    """What is there already. A last line that was cut off by a kill is removed."""
    written = _Written()
    if out.exists():
        raw = out.read_bytes()
        os.truncate(out, raw.rfind(b"\n") + 1)
    for number, line in _lines(out):
        if line["temperature"] != options.temperature:
            raise DataError(
                f"{out}:{number} was written at temperature {line['temperature']}, and "
                f"{options.temperature} is asked for; write to another file"
            )
        written.add(line)
    return written


def _lines(out: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The answers that a file holds, without a last line that was cut off by a kill."""
    require_file(out)
    raw = out.read_bytes() if out.exists() else b""
    for number, line in enumerate(raw[: raw.rfind(b"\n") + 1].splitlines(), start=1):
        where = f"{out}:{number} is not an answer that was written here"
        try:
            answer = from_json(line)
            missing = {"key", "source", "response_ids", "temperature"} - set(answer)
        except (ValueError, TypeError) as error:
            raise DataError(f"{where} ({error}); write to another file") from error
        if missing:
            raise DataError(f"{where} (no {min(missing)!r}); write to another file")
        yield number, answer
