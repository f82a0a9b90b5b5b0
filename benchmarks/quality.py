"""`scripts/bench quality`: what storing a model's weights in fewer bits does to what it says.

Each way reads a text in windows: the loss of every token given those before it, and how often its
likeliest token is the first way's. Then it answers tasks greedily, and what it writes is judged.
Where the right answer is one text, its loss given the question is measured too.
llama.cpp reads the same windows of the file that `--gguf` names. No times are taken, so other work
on the machine disturbs nothing. What was measured is kept: the same command goes on. Does not know
how weights are stored.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.command import Model, Out, Show, Threads, result_path, run_command
from benchmarks.models import located
from benchmarks.paper.quality import judge, reference_of
from benchmarks.paper.sandbox import WARNING
from selfspec import __version__
from selfspec.bench.costs import read_window
from selfspec.bench.html import Table
from selfspec.bench.peer_host import package_versions
from selfspec.bench.peers import Peer, PeerFailed, find_peers
from selfspec.bench.provenance import gather
from selfspec.bench.schema import Provenance, Result, continued, read, write
from selfspec.bench.sources import read_text
from selfspec.bench.suite_run import PACKAGES, fitted
from selfspec.bench.tables import failed, markdown, number, percent
from selfspec.bench.tasks import Item, read_task
from selfspec.cli import common
from selfspec.cli.bench import command_line, progress_bar
from selfspec.errors import OptionError
from selfspec.llm import LLM
from selfspec.model.compute.cpu.kinds import KINDS
from selfspec.model.measuring import weight_bytes

WINDOW = 512  # tokens that are read together
LLAMA_CPP = "llama.cpp"  # how its row is called; it answers no tasks
MEASURES = {"gsm8k": "accuracy", "humaneval": "pass@1", "mbpp": "pass@1"}
EXACT = "exact match"  # of all others
BORN = "The demo's layers were 4-bit blocks before: few-bit figures on it flatter."
LIMIT = 600.0  # seconds that llama.cpp may take for a window
ReadWindow = Callable[[Sequence[int]], tuple[float, list[int]]]
"""Ids -> the summed loss of all but the first, and what was likeliest in their places."""
Open = Callable[[], AbstractContextManager[tuple[ReadWindow, LLM | None, int]]]
"""Loads one way: how it reads, the model that answers (ours only), the bytes of its weights."""


@dataclass(frozen=True)
class Window:
    """What one way made of a piece of the text."""

    tokens: int
    loss: float
    """Summed negative log-likelihood."""
    same: int
    """Places at which its likeliest token is the first way's, or that of an answer."""


@dataclass(frozen=True)
class Judged:
    """An answer and whether it is right, 1 or 0."""

    text: str
    right: float
    expected: Window | None = None
    """What it made of the right answer, given the question; None where a task has none to read."""


@dataclass
class Way:
    """One way to store the weights: a kind of ours, or llama.cpp with a file."""

    name: str
    bytes: int | None = None
    windows: list[Window] = field(default_factory=list)
    answers: dict[str, dict[str, Judged]] = field(default_factory=dict)
    """By task and question."""
    failure: str = ""

    @property
    def loss(self) -> float | None:
        """Mean loss of a token."""
        return self._mean(sum(window.loss for window in self.windows))

    @property
    def agreement(self) -> float | None:
        """Share of places at which it names the first way's token."""
        return self._mean(sum(window.same for window in self.windows))

    def loss_of_answers(self, task: str) -> float | None:
        """Mean loss of a token of a task's right answers; None where they were not read."""
        read = [each.expected for each in self.answers.get(task, {}).values() if each.expected]
        return sum(each.loss for each in read) / sum(each.tokens for each in read) if read else None

    def _mean(self, total: float) -> float | None:
        tokens = sum(window.tokens for window in self.windows)
        return total / tokens if tokens else None


@dataclass
class QualityRun(Result):
    """Everything that was measured."""

    kind = "quality"
    measured_by = "scripts/bench quality"

    model: str
    text: str
    tokens: int
    window: int
    new_tokens: int
    samples: list[str]
    """Which questions were asked, by names that tell them apart."""
    ways: list[Way] = field(default_factory=list)

    def plan(self) -> dict[str, Any]:
        """What makes another run the same."""
        own = ("model", "text", "tokens", "window", "new_tokens", "samples")
        names = [way.name for way in self.ways]
        return {**{name: getattr(self, name) for name in own}, "weights": names}


def own(llm: LLM) -> AbstractContextManager[tuple[ReadWindow, LLM, int]]:
    """A model of ours; it is let go with the last name for it."""
    return nullcontext((partial(read_window, llm.model), llm, weight_bytes(llm.model)))


@contextmanager
def llama_cpp(file: Path, threads: int) -> Iterator[tuple[ReadWindow, None, int]]:
    """llama.cpp with a GGUF file; raises PeerFailed."""
    spec = find_peers()["xllamacpp"]
    spec.install()
    peer = Peer(spec, threads, LIMIT)

    def reads(ids: Sequence[int]) -> tuple[float, list[int]]:
        loss, said = peer.call("read", ids=list(ids))
        return loss, said

    try:
        peer.load(file.resolve(), "float32")
        yield reads, None, file.stat().st_size
    finally:
        peer.close()


class Measuring:
    """One run at work: its ways in turn, each loaded, measured and let go."""

    def __init__(
        self,
        run: QualityRun,
        windows: Sequence[Sequence[int]],
        items: Mapping[str, Sequence[Item]],
        save: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        self._run, self._windows, self._items = run, windows, items
        self._save, self._say = save, say
        self._first: dict[int, list[int]] = {}

    def measure(self, ways: Mapping[str, Open], first: LLM) -> None:
        """All that is missing. A peer that fails has the reason in its row."""
        for way in self._run.ways:
            if not self._lacks(way):
                continue
            try:
                with ways[way.name]() as (reads, llm, size):
                    way.bytes, way.failure = size, ""
                    self._read(way, reads, first)
                    if llm is not None:
                        self._answer(way, llm)
            except PeerFailed as failure:
                way.failure = str(failure)
            self._save()

    def _lacks(self, way: Way) -> bool:
        answered = all(
            len(way.answers.get(task, ())) == len(items) for task, items in self._items.items()
        )
        unread = way.bytes is None or len(way.windows) < len(self._windows)
        return unread or not (answered or way.name.startswith(LLAMA_CPP))

    def _read(self, way: Way, reads: ReadWindow, first: LLM) -> None:
        for index, ids in enumerate(self._windows):
            if index < len(way.windows):
                continue
            self._say(f"{way.name}: window {index + 1} of {len(self._windows)}")
            if index not in self._first:
                self._first[index] = read_window(first.model, ids)[1]
            loss, said = reads(ids)
            same = sum(a == b for a, b in zip(said, self._first[index], strict=True))
            way.windows.append(Window(len(said), loss, same))
            self._save()

    def _answer(self, way: Way, llm: LLM) -> None:
        limit = self._run.new_tokens
        for task, items in self._items.items():
            answers = way.answers.setdefault(task, {})
            for item in items:
                if item.id in answers:
                    continue
                self._say(f"{way.name}: {item.id}")
                ids, _ = fitted(item, encoded(llm, item), llm.info.context, limit)
                text = llm.generate(ids, max_new_tokens=limit).text  # drafts change no token
                expected = expected_of(llm, ids, task, item)
                answers[item.id] = Judged(text, worth(task, item, text), expected)
                self._save()


def encoded(llm: LLM, item: Item) -> list[int]:
    """A question as ids, through the chat template where it is one and the model has one."""
    if item.chat and llm.tokenizer is not None and llm.tokenizer.chat_template:
        return llm.encode_chat([{"role": "user", "content": item.text}])
    return llm.encode(item.text)


def expected_of(llm: LLM, ids: list[int], task: str, item: Item) -> Window | None:
    """What a model makes of a question's right answer, where that is one text."""
    if measure_of(task) != EXACT or llm.tokenizer is None:
        return None
    answer = llm.tokenizer(reference_of(item.gold), add_special_tokens=False)["input_ids"]
    answer = list(answer)[: llm.info.context - len(ids)]
    loss, said = read_window(llm.model, [*ids, *answer], len(answer))
    return Window(len(answer), loss, sum(a == b for a, b in zip(said, answer, strict=True)))


def measure_of(task: str) -> str:
    return MEASURES.get(task, EXACT)


def worth(task: str, item: Item, text: str) -> float:
    """Whether an answer is right, by the task's measure."""
    found = judge({item.id: [text]}, {item.id: item.gold}, [measure_of(task)])
    if not found:
        raise OptionError(
            f"{item.id} has no answer to compare with, so the task {task!r} cannot be judged; "
            "leave it out, or give its lines an 'answer'"
        )
    return found[measure_of(task)]


def tables(run: QualityRun) -> str:
    """What was measured, from the JSON alone."""
    first = run.ways[0]
    tasks = list(dict.fromkeys(task for way in run.ways for task in way.answers))
    head = ["weights", "MB", "perplexity", f"beside {first.name}", "same next token"]
    head += [f"{task}, {measure_of(task)}" for task in tasks]
    known = [task for task in tasks if first.loss_of_answers(task) is not None]
    head += [f"perplexity of {task}'s right answers, beside {first.name}" for task in known]
    rows = [[way.name, *_cells(way, first), *(_right(way, task) for task in tasks),
             *(_of_answers(way, first, task) for task in known)]
            for way in run.ways]  # fmt: skip
    read = sum(window.tokens for window in first.windows)
    said = [f"{run.model}, {read} tokens of {run.text} in windows of {run.window}"] if read else []
    said += [f"answers of at most {run.new_tokens} tokens, greedy"] if tasks else []
    born = BORN if run.model == "demo" else ""
    return markdown([f"{'; '.join(said)}:", Table(head, rows), born])


def _cells(way: Way, first: Way) -> list[str]:
    size = number(None if way.bytes is None else way.bytes / 1e6, 0)
    if way.failure:
        return [size, failed(way.failure, 80), "-", "-"]
    if way.loss is None or first.loss is None:
        return [size, "-", "-", "-"]
    if len(way.windows) < len(first.windows):
        return [size, f"unfinished, {len(way.windows)} windows", "-", "-"]
    beside = f"{math.exp(way.loss - first.loss) - 1:+.2%}"
    return [size, number(math.exp(way.loss), 3), beside, percent(way.agreement, 1)]


def _right(way: Way, task: str) -> str:
    answers = way.answers.get(task, {}).values()
    right = sum(answer.right for answer in answers)
    return f"{right:g} of {len(answers)}" if answers else "-"


def _of_answers(way: Way, first: Way, task: str) -> str:
    own, its = way.loss_of_answers(task), first.loss_of_answers(task)
    if own is None or its is None:
        return "-"
    return f"{math.exp(own):.4f} ({math.exp(own - its) - 1:+.2%})"


def windows_of(llm: LLM, text: Path | None, tokens: int, size: int) -> list[list[int]]:
    """The text's first tokens in pieces that overlap by one: the first of each is only read."""
    if text is None:
        return []
    if llm.tokenizer is None:
        raise OptionError("a text needs the model's tokenizer, and its folder has none; add it")
    ids = list(llm.tokenizer(read_text(text), add_special_tokens=False)["input_ids"])
    ids = ids[: tokens + 1]
    return [ids[begin : begin + size + 1] for begin in range(0, len(ids) - 1, size)]


def questions(task: Sequence[str], sample: int, programs: bool) -> tuple[list[str], dict[str, Any]]:
    """Names of the samples, and the questions of each task."""
    names, items = [], {}
    for part in [part for text in task for part in read_task(text, sample)]:
        if measure_of(part.sample.task) == "pass@1" and not programs:
            raise OptionError(
                f"{part.sample.task} is judged by running what the model writes, as a process with "
                "limits of time and memory that is no security boundary; allow it with "
                "--run-programs, or leave the task out"
            )
        names.append(part.sample.name)
        items[part.sample.task] = part.items
    return names, items


def ways_of(
    model: str, weights: Sequence[str], gguf: Path | None, threads: int
) -> tuple[dict[str, Open], LLM]:
    """How each way is loaded when its turn comes, and the first one, which all need."""

    def load(kind: str) -> LLM:
        return LLM.from_pretrained(located(model), weights=kind, threads=threads)

    first = load(weights[0])
    ways: dict[str, Open] = {weights[0]: lambda: own(first)}
    ways |= {kind: partial(lambda kind: own(load(kind)), kind) for kind in weights[1:]}
    if gguf is not None:
        ways[f"{LLAMA_CPP}, {gguf.name}"] = partial(llama_cpp, gguf, threads)
    return ways, first


def provenance(threads: int, paths: Sequence[str]) -> Provenance:
    """Where a run comes from, paths as their last part."""
    versions = {"selfspec": __version__, **package_versions(PACKAGES)}
    command = command_line(["quality", *sys.argv[1:]], paths, "scripts/bench")
    return gather(command, threads, versions)


def quality(
    model: Model = "demo",
    *,
    text: Annotated[
        Path | None, typer.Option(help="A text to measure perplexity and agreement on.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="How much of the text to read.")] = 6144,
    task: Annotated[
        list[str] | None,
        typer.Option(help="NAME or NAME=PATH, as in `selfspec bench`: gsm8k, humaneval, jsonl."),
    ] = None,
    sample: Annotated[int, typer.Option(help="Questions of each task; 0 is all.")] = 20,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", min=1, help="Longest answer.")
    ] = 256,
    weights: Annotated[
        str, typer.Option(help="Ways to store weights; the others are compared with the first.")
    ] = ",".join(KINDS),
    gguf: Annotated[
        Path | None, typer.Option(help="A GGUF file of the model, for a row of llama.cpp.")
    ] = None,
    run_programs: Annotated[
        bool, typer.Option("--run-programs", help="Run the programs that the model writes.")
    ] = False,
    threads: Threads = 2,
    out: Out = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure over what is there.")] = False,
    show: Show = None,
) -> None:
    """What each way to store weights does to perplexity, to the next token, and to answers.

    Example: scripts/bench quality --text test.txt --task gsm8k=test.jsonl --sample 10
    """
    if show is not None:
        typer.echo(tables(read(QualityRun, show)))
        return
    if text is None and not task:
        raise OptionError("there is nothing to measure; give --text FILE, --task NAME=FILE or both")
    if gguf is not None and not gguf.is_file():
        raise OptionError(f"there is no file {gguf.name!r} for llama.cpp; check --gguf")
    samples, items = questions(task or (), sample, run_programs)
    if run_programs:
        common.stderr().print(WARNING, style="dim", soft_wrap=True)
    ways, first = ways_of(model, weights.split(","), gguf, threads)
    size = min(WINDOW, first.info.context)
    paths = [model, *(task or ()), *(str(path) for path in (text, gguf, out) if path)]
    new = QualityRun(
        provenance(threads, paths), Path(model).name, text.name if text else "", tokens, size,
        max_new_tokens, samples, [Way(name) for name in ways],
    )  # fmt: skip
    windows = windows_of(first, text, tokens, size)
    target = out or result_path("quality")
    run = new if fresh else continued(new, target, QualityRun.plan)
    with progress_bar(1) as (_, say):
        Measuring(run, windows, items, lambda: write(run, target), say).measure(ways, first)
    run.complete = True
    write(run, target)
    typer.echo(tables(run))


if __name__ == "__main__":
    run_command(quality)
