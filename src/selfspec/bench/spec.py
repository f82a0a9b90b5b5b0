"""`scripts/bench spec`: drafters next to plain decoding of the same engine, prompt by prompt, on Spec-Bench or a file like it.

For each prompt the methods take turns (their order rotates), are given the same ids and limits, and what they wrote is compared
token for token. Only decode time counts. A task's speed is the ratio of its medians per token; the interval is a bootstrap over
prompts, paired. Step times are measured alone as well, for the cost model (`spec_costs.py`). Raw seconds go into the JSON; tables
and plots are made from it (`spec_report.py`, `spec_plot.py`).
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import OptionError
from ..llm import LLM
from ..results import Result
from .plain import progress_bar, run_command
from .prompts import prompt_ids
from .provenance import CHECKOUT, cpu_name, gather, package_versions, slug
from .questions import Question, read_questions
from .schema import write_json
from .spec_costs import CONTEXTS, StepPoint, StepTimer
from .spec_plot import plot
from .spec_report import SPEC_SCHEMA, load_spec, markdown

LONGEST_BLOCK = 8  # tokens; isolated passes go up to this, further where a method drafts more
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
    verified: list[int]  # how many rounds verified 1, 2, ... tokens
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
    steps: list[StepPoint] = field(default_factory=list)
    complete: bool = False
    kind: str = "spec"
    schema_version: int = SPEC_SCHEMA


def answer(llm: LLM, ids: list[int], new_tokens: int, method: Method) -> tuple[Result, list[int]]:
    """A result, and how many of its rounds verified 1, 2, ... tokens."""
    stream = llm.stream(ids, max_new_tokens=new_tokens, **method.options())
    sizes = [1 + piece.accepted + len(piece.rejected) for piece in stream][1:]  # the first piece is the prefill's
    return stream.result, [sizes.count(size) for size in range(1, max(sizes, default=0) + 1)]


def turn(method: Method, question: Question, number: int, ids: list[int], made: tuple[Result, list[int]], same: bool) -> Turn:
    result, verified = made
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
        verified,
        same,
    )


class Asking:
    """One run: every question, every round, every method, and the isolated steps after each question."""

    def __init__(self, llm: LLM, run: SpecRun, out: Path) -> None:
        self._llm, self._run, self._out = llm, run, out
        self._methods = [Method(text) for text in run.methods]
        llm.generate([1, 2, 3], max_new_tokens=8, eos=[])  # the first pass of a process pays for its pages
        most = max(LONGEST_BLOCK, *(_drafts(method) + 1 for method in self._methods))
        ids = prompt_ids(lambda text: list(llm.encode_chat([{"role": "user", "content": text}])), max(CONTEXTS) + most)
        self._steps = StepTimer(llm.model, ids, {method.text: method.options() for method in self._methods}, most)
        run.steps = self._steps.points

    def ask(self, index: int, question: Question, say: Callable[[str], None]) -> None:
        """All methods in turns; saved after every question, so that a kill loses one."""
        run, methods = self._run, self._methods
        ids = self._llm.encode_chat([{"role": "user", "content": question.text}])[-(self._llm.info.context - run.new_tokens) :]
        expected: list[int] = []
        for number in range(run.rounds):
            shift = (index + number) % len(methods)
            order = [*methods[shift:], *methods[:shift]]
            if not expected:  # plain decoding says what is right
                order.sort(key=lambda method: method.text != PLAIN)
            for method in order:
                say(f"{question.task} {question.number}: {method.text}")
                made = answer(self._llm, ids, run.new_tokens, method)
                expected = expected or made[0].tokens
                run.turns.append(turn(method, question, number, ids, made, made[0].tokens == expected))
        self._steps.measure()
        write_json(asdict(run), self._out)


def _drafts(method: Method) -> int:
    """How much a method with a fixed length drafts."""
    drafts = method.options().get("control_options", {}).get("tokens", 0)
    return drafts if isinstance(drafts, int) else 0


def spec(
    data: Annotated[
        Path | None, typer.Argument(help="Questions as JSONL with question_id, category, turns: Spec-Bench's question.jsonl.")
    ] = None,
    model: Annotated[str, typer.Option(help="'demo', a folder or a hub name.")] = "demo",
    methods: Annotated[
        str, typer.Option(help="Contestants, separated by spaces, e.g. 'auto ngram:longest=3@fixed:tokens=6'.")
    ] = "auto ngram recycle hybrid",
    sample: Annotated[int, typer.Option(help="Questions a task.")] = 5,
    new_tokens: Annotated[int, typer.Option(help="Tokens to generate, less where the model ends by itself.")] = 128,
    rounds: Annotated[int, typer.Option(help="How often each question is asked.")] = 1,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 2,
    out: Annotated[Path | None, typer.Option(help="The JSON to write.")] = None,
    show: Annotated[Path | None, typer.Option(help="Measure nothing: print the tables of this JSON.")] = None,
    draw: Annotated[Path | None, typer.Option("--plot", help="Measure nothing: draw this JSON, beside it as PNG.")] = None,
) -> None:
    """Drafters next to plain decoding on the same questions, with acceptance, identity and confidence intervals.

    Example: scripts/bench spec question.jsonl --sample 1 --methods "ngram auto"
    """
    if show is not None or draw is not None:
        typer.echo(_reread(show, draw))
        return
    if data is None:
        raise OptionError("there are no questions to ask; give Spec-Bench's question.jsonl or a file like it")
    asked = read_questions(data, sample)
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
    asking = Asking(llm, run, target)
    with progress_bar(len(asked) * rounds * len(names)) as (tick, say):
        for index, question in enumerate(asked):
            asking.ask(index, question, lambda text: (say(text), tick(""))[0])
    run.complete = True
    write_json(asdict(run), target)
    typer.echo(markdown(asdict(run)))
    typer.echo(json.dumps({"file": target.name, "turns": len(run.turns)}))


def _reread(show: Path | None, draw: Path | None) -> str:
    """Tables or a drawing of a result that was measured before."""
    said = []
    if draw is not None:
        picture = draw.with_suffix(".png")
        plot(load_spec(draw), picture)
        said.append(f"drew {picture.name}")
    if show is not None:
        said.append(markdown(load_spec(show)))
    return "\n".join(said)


if __name__ == "__main__":
    run_command(spec)
