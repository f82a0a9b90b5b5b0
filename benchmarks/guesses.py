"""`scripts/bench guesses`: under sampling, how many tokens does a verification keep of guesses from
the text, next to what the model's own distributions allow?

A guess that nobody drew is kept with the model's probability of it, p(guess), which is the most
that keeps the distribution. So a verification of a tree of guesses gives one token and, of each
guess, the product of p along its path, on average. Both are summed up over Spec-Bench's questions,
until chance can move their ratio by little. Times are not taken.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import track
from torch import Tensor

from benchmarks.command import Model, Out, Show, Threads, made_by, result_path, run_command
from benchmarks.models import folder_of
from selfspec.bench.html import Table
from selfspec.bench.schema import Result, read, write
from selfspec.bench.tables import markdown as as_text
from selfspec.bench.tasks import read_questions
from selfspec.control.fixed import FixedLength
from selfspec.core.sampling import Sampler, SamplingParams
from selfspec.draft.base import Drafter
from selfspec.draft.registry import make_drafter
from selfspec.engine.generation import Generation
from selfspec.engine.row import Request
from selfspec.llm import LLM
from selfspec.tune.texts import prompts_of

BATCH = 8


@dataclass
class Kept:
    """Of one drafter, over all verifications."""

    verifications: int = 0
    kept: int = 0
    """Guesses."""
    allowed: float = 0.0
    """Guesses that are kept on average."""
    variance: float = 0.0
    """Of what is kept, given the guesses."""
    texts: int = 0

    @property
    def ratio(self) -> float:
        """Tokens a verification over those that are allowed."""
        return (self.verifications + self.kept) / (self.verifications + self.allowed)

    @property
    def error(self) -> float:
        """The ratio's standard error."""
        return float(self.variance**0.5) / (self.verifications + self.allowed)


@dataclass
class GuessesRun(Result):
    """All drafters."""

    kind = "guesses"
    measured_by = "scripts/bench guesses"

    model: str
    temperature: float
    drafts: int
    questions: int
    new_tokens: int
    drafters: dict[str, Kept] = field(default_factory=dict)


class Allowing(Sampler):
    """Puts down what each verification's guesses are worth by the model's own probabilities."""

    def __init__(self, params: SamplingParams, seed: int) -> None:
        super().__init__(params, seed)
        self.found: list[tuple[float, float]] = []  # of each: the mean kept, and its variance

    def choose(
        self, logits: Tensor, contexts: Sequence[Sequence[int]], positions: Sequence[int]
    ) -> Tensor:
        self.found.append(allowed(self.probabilities(logits, contexts), list(contexts)))
        return super().choose(logits, contexts, positions)


def allowed(p: Tensor, contexts: Sequence[Sequence[int]]) -> tuple[float, float]:
    """How many of a tree's guesses are kept on average, and the variance. `p`: (nodes, vocab) of
    what follows each node; `contexts`: the text up to it, the root first."""
    nodes = {tuple(context): node for node, context in enumerate(contexts)}
    reached, depth = [1.0], [0]
    for context in contexts[1:]:
        parent = nodes[tuple(context[:-1])]
        reached.append(reached[parent] * float(p[parent, context[-1]]))
        depth.append(depth[parent] + 1)
    mean = sum(reached[1:])
    squares = sum(chance * (2 * at - 1) for chance, at in zip(reached[1:], depth[1:], strict=True))
    return mean, squares - mean**2


def measure(
    llm: LLM, prompts: Sequence[Sequence[int]], drafter: Drafter, run: GuessesRun, before: Kept
) -> Kept:
    """Each prompt is answered once more by drawing; counts are added to those before."""
    params = SamplingParams(temperature=run.temperature)
    samplers = [Allowing(params, before.texts + at) for at in range(len(prompts))]
    requests = [
        Request(list(prompt), sampler, run.new_tokens, drafter=drafter,
                controller=FixedLength(run.drafts))
        for prompt, sampler in zip(prompts, samplers, strict=True)
    ]  # fmt: skip
    generation = Generation(llm.model, requests)
    rows = list(generation.rows)
    for _ in generation:
        continue
    found = [each for sampler in samplers for each in sampler.found]
    return Kept(
        before.verifications + sum(row.stats.rounds for row in rows),
        before.kept + sum(row.stats.accepted for row in rows),
        before.allowed + sum(mean for mean, _ in found),
        before.variance + sum(variance for _, variance in found),
        before.texts + len(prompts),
    )


def markdown(run: GuessesRun) -> str:
    rows = [
        [
            name, str(each.texts), str(each.verifications),
            f"{1 + each.kept / each.verifications:.3f}",
            f"{1 + each.allowed / each.verifications:.3f}",
            f"{each.ratio:.3f} ± {each.error:.3f}",
        ]
        for name, each in run.drafters.items()
    ]  # fmt: skip
    head = ["drafter", "texts", "verifications", "tokens each", "p(guess) allows", "ratio"]
    said = (
        f"{run.model}, {run.questions} questions, up to {run.new_tokens} new tokens each at "
        f"temperature {run.temperature:g}, up to {run.drafts} guesses. ±: standard error."
    )
    return as_text([said, Table(head, rows)])


def guesses(
    questions: Annotated[Path, typer.Option(help="Spec-Bench's, or a file like it.")] = Path(),
    model: Model = "demo",
    sample: Annotated[int, typer.Option(min=1, help="Questions of each task.")] = 4,
    new_tokens: Annotated[int, typer.Option(min=2, help="Of an answer.")] = 96,
    temperature: Annotated[float, typer.Option(help="How varied the text is.")] = 0.7,
    drafters: Annotated[str, typer.Option(help="Separated by commas.")] = "ngram,recycle,hybrid",
    drafts: Annotated[int, typer.Option(min=1, help="Guesses of a round, at most.")] = 7,
    most_error: Annotated[
        float, typer.Option(help="More texts until the ratio's standard error is below this.")
    ] = 0.005,
    threads: Threads = 2,
    out: Out = None,
    show: Show = None,
) -> None:
    """Compare what is kept of guesses from the text under sampling with what may be kept.

    Example: scripts/bench guesses --questions question.jsonl --sample 1 --most-error 0.05
    """
    if show is not None:
        typer.echo(markdown(read(GuessesRun, show)))
        return
    llm = LLM.from_pretrained(folder_of(model), threads=threads)
    items = read_questions(questions, sample)
    prompts = prompts_of(llm, [item.text for item in items])
    made, path = made_by("guesses", threads), out or result_path("guesses")
    run = GuessesRun(made, Path(model).name, temperature, drafts, len(items), new_tokens)
    for name in track(drafters.split(","), transient=True):
        drafter = make_drafter(name, {})
        assert drafter is not None
        kept = Kept()
        while not kept.texts or kept.error > most_error:
            for at in range(0, len(prompts), BATCH):
                kept = measure(llm, prompts[at : at + BATCH], drafter, run, kept)
        run.drafters[name] = kept
        write(run, path)
    run.complete = True
    write(run, path)
    typer.echo(markdown(run))
    typer.echo(json.dumps({**{k: asdict(v) for k, v in run.drafters.items()}, "file": path.name}))


if __name__ == "__main__":
    run_command(guesses)
