"""`scripts/bench spec`: drafters next to plain decoding of the same engine, prompt by prompt, on Spec-Bench or a file like it.

For each prompt the methods take turns (their order rotates), are given the same ids and limits, and what they wrote is compared
token for token. Only decode time counts. A task's speed is the ratio of its medians per token; the interval is a bootstrap over
prompts, paired. Raw seconds go into the JSON; tables and plots are made from it (`spec_report.py`).
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ..errors import OptionError
from ..llm import LLM, Result
from .plain import run_command
from .provenance import CHECKOUT, cpu_name, gather, package_versions, slug
from .schema import write_json
from .spec_report import SPEC_SCHEMA, markdown

CONVERSATION = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
PLAIN = "plain"


@dataclass(frozen=True)
class Method:
    """One contestant: `name`, or `name:option=value,...@controller:option=value,...`."""

    text: str

    def options(self) -> dict[str, Any]:
        """What `LLM.generate` is told."""
        if self.text == PLAIN:
            return {"draft": None}
        draft, _, control = self.text.partition("@")
        name, settings = _named(draft)
        found: dict[str, Any] = {"draft": name, "draft_options": settings}
        if control:
            found["control"], found["control_options"] = _named(control)
        return found


def _named(text: str) -> tuple[str, dict[str, Any]]:
    name, _, rest = text.partition(":")
    pairs = (item.partition("=") for item in rest.split(",") if item)
    return name, {key: _value(value) for key, _, value in pairs}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


@dataclass(frozen=True)
class Question:
    """One prompt of a task."""

    task: str
    number: int
    text: str


@dataclass
class Turn:
    """One generation. `decoded` tokens took `seconds`; the first token belongs to the prefill and is not among them."""

    method: str
    task: str
    question: int
    round: int
    prompt_tokens: int
    decoded: int
    seconds: float
    draft_seconds: float
    verify_seconds: float
    prefill_seconds: float
    verifications: int
    drafted: int
    accepted: int
    drafted_at: list[int]
    accepted_at: list[int]
    identical: bool


@dataclass
class SpecRun:
    """Everything that was measured."""

    provenance: dict[str, Any]
    model: str
    kernel: str
    dtype: str
    new_tokens: int
    sample: int
    rounds: int
    methods: list[str]
    turns: list[Turn] = field(default_factory=list)
    complete: bool = False
    kind: str = "spec"
    schema_version: int = SPEC_SCHEMA


def questions(path: Path, sample: int) -> list[Question]:
    """The first `sample` questions of each task, by their order in the file; first turns only."""
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


def turn(method: Method, question: Question, number: int, ids: list[int], result: Result, expected: list[int]) -> Turn:
    stats = result.stats
    return Turn(
        method.text,
        question.task,
        question.number,
        number,
        len(ids),
        stats.decoded,
        stats.decode_seconds,
        stats.draft_seconds,
        stats.verify_seconds,
        stats.prefill_seconds,
        stats.verifications,
        stats.drafted,
        stats.accepted,
        stats.drafted_at,
        stats.accepted_at,
        result.tokens == expected,
    )


def measure(llm: LLM, run: SpecRun, asked: Sequence[Question], out: Path) -> None:
    """Every question, every round, every method; saved after every question, so that a kill loses one."""
    methods = [Method(text) for text in run.methods]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    llm.generate([1, 2, 3], max_new_tokens=8, eos=[])  # the first pass of a process pays for its pages
    with Progress(*columns, transient=True, refresh_per_second=1) as bar:
        task = bar.add_task("", total=len(asked) * run.rounds * len(methods))
        for index, question in enumerate(asked):
            ids = llm.encode_chat([{"role": "user", "content": question.text}])[-(llm.info.context - run.new_tokens) :]
            expected: list[int] = []
            for number in range(run.rounds):
                shift = (index + number) % len(methods)
                order = [*methods[shift:], *methods[:shift]]
                if not expected:  # plain decoding says what is right
                    order.sort(key=lambda method: method.text != PLAIN)
                for method in order:
                    bar.update(task, description=f"{question.task} {question.number}: {method.text}", advance=1)
                    result = llm.generate(ids, max_new_tokens=run.new_tokens, **method.options())
                    expected = expected or result.tokens
                    run.turns.append(turn(method, question, number, ids, result, expected))
            write_json(asdict(run), out)


def spec(
    data: Annotated[
        Path, typer.Argument(help="Questions as JSONL with question_id, category, turns: Spec-Bench's question.jsonl.")
    ],
    model: Annotated[str, typer.Option(help="'demo', a folder or a hub name.")] = "demo",
    methods: Annotated[
        str, typer.Option(help="Contestants, separated by spaces, e.g. 'auto ngram:longest=3@fixed:tokens=6'.")
    ] = "auto ngram recycle hybrid",
    sample: Annotated[int, typer.Option(help="Questions a task.")] = 5,
    new_tokens: Annotated[int, typer.Option(help="Tokens to generate, less where the model ends by itself.")] = 128,
    rounds: Annotated[int, typer.Option(help="How often each question is asked.")] = 1,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 2,
    out: Annotated[Path | None, typer.Option(help="The JSON to write.")] = None,
    show: Annotated[bool, typer.Option("--show", help="Measure nothing: DATA is a result, print its tables.")] = False,
) -> None:
    """Drafters next to plain decoding on the same questions, with acceptance, identity and confidence intervals.

    Example: scripts/bench spec question.jsonl --sample 1 --methods "ngram auto"
    """
    if show:
        typer.echo(markdown(json.loads(data.read_text(encoding="utf-8"))))
        return
    if not data.is_file():
        raise OptionError(f"There is no file {data.name!r}; give Spec-Bench's question.jsonl or a file like it.")
    asked = questions(data, sample)
    llm = LLM.from_pretrained(model, threads=threads)
    command = shlex.join(["scripts/bench", "spec", data.name, *[word for word in sys.argv[1:] if word != str(data)]])
    versions = package_versions(["selfspec", "torch", "transformers"])
    names = [PLAIN, *(name for name in methods.split() if name != PLAIN)]
    run = SpecRun(
        asdict(gather(command, threads, versions)),
        Path(model).name,
        llm.info.kernel,
        llm.info.dtype,
        new_tokens,
        sample,
        rounds,
        names,
    )
    target = out or CHECKOUT / "benchmarks" / "results" / f"spec-{slug(cpu_name())}.json"
    with torch.inference_mode():
        measure(llm, run, asked, target)
    run.complete = True
    write_json(asdict(run), target)
    typer.echo(markdown(asdict(run)))
    typer.echo(json.dumps({"file": target.name, "turns": len(run.turns)}))


if __name__ == "__main__":
    run_command(spec)
