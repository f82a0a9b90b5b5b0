"""`scripts/bench served`: is each answer of a busy server the one that its request gets alone?

Requests come at random times, with drafters, samplings, lengths and shared beginnings drawn at
random. Some leave before their end. Every token and every log-probability is compared with those of
the request by itself, without drafts. The model is a tiny random one whose exits agree with it
often, in float32 and in 8 bits: exactness does not depend on what a model has learned.
"""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.command import Out, Show, Threads, made_by, result_path, run_command
from selfspec import LLM, SamplingParams
from selfspec.bench.html import Table
from selfspec.bench.schema import Result, read, write
from selfspec.bench.tables import markdown as paragraphs
from selfspec.bench.tables import threads as said_threads
from selfspec.core.sampling import Sampler
from selfspec.core.text_stream import RowText
from selfspec.draft.registry import resolve
from selfspec.engine.generation import Generation
from selfspec.engine.row import Request
from selfspec.serve.job import Event, Job
from selfspec.serve.settings import Limits
from selfspec.serve.worker import Worker
from selfspec.testing import near_identity_model, tiny_tokenizer

SAMPLINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8, "top_k": 40},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.7, "min_p": 0.02, "presence_penalty": 0.3},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"min_new_tokens": 6},
)
DRAFTS = ("auto", "none", "cosine", "early-exit", "hybrid", "jacobi", "kv-subset", "layer-skip",
          "ngram", "quantised", "recycle")  # fmt: skip
WEIGHTS = ("float32", "int8")


@dataclass(frozen=True)
class Tally:
    """What became of the requests on one kind of weights."""

    weights: str
    requests: int
    finished: int
    left: int
    """Those whose caller left; what they had got was compared."""
    tokens: int
    differing: int
    """Requests of which a token or a log-probability differed."""
    drafts_kept: int
    prompt_tokens: int
    cached_tokens: int
    """Of the prompts' tokens, those that another request had left in the cache."""
    most_at_once: int
    seconds: float


@dataclass
class ServedRun(Result):
    """Everything that this counts."""

    kind = "served"
    measured_by = "scripts/bench served"

    seed: int
    tallies: list[Tally] = field(default_factory=list)


class Caller:
    """Waits for one request."""

    def __init__(self, request: Request) -> None:
        self.events: list[Event] = []
        self.ended = threading.Event()
        self.job = Job(request, RowText(None, ()), self._hear)

    def _hear(self, event: Event) -> None:
        self.events.append(event)
        if event.last:
            self.ended.set()

    @property
    def got(self) -> list[tuple[int, float]]:
        """Tokens and log-probabilities."""
        return [(each.token, each.logprob) for event in self.events for each in event.logprobs]


def random_request(dice: random.Random, shared: list[int]) -> Request:
    """A prompt that others begin with, or one of its own; any drafter, sampling and length."""
    own = [dice.randrange(3, 200) for _ in range(dice.choice([1, 5, 20, 60]))]
    prompt = [*shared[: dice.choice([0, 0, 70, 120])], *own * dice.choice([1, 2])]
    drafter, controller = resolve(dice.choice(DRAFTS), None, None, None)
    params = SamplingParams(**dice.choice(SAMPLINGS))
    return Request(
        prompt,
        Sampler(params, dice.randrange(10**6), prompt_length=len(prompt), ends=[2]),
        max_new_tokens=dice.choice([1, 4, 12, 32]),
        eos=frozenset([2]),
        logprobs=0,
        drafter=drafter,
        controller=controller,
    )


def alone(llm: LLM, request: Request) -> list[tuple[int, float]]:
    """What the request gets by itself, without drafts."""
    request = replace(request, drafter=None, controller=None)
    steps = Generation(llm.model, [request])
    return [(e.token, e.logprob) for step in steps for part in step.rows for e in part.logprobs]


def tally(llm: LLM, weights: str, count: int, seed: int) -> Tally:
    """Ask for so many answers and compare each."""
    dice, begin = random.Random(seed), time.perf_counter()
    shared = [dice.randrange(3, 200) for _ in range(120)]
    worker = Worker(llm, Limits(rows=8, context=400, queue=40))
    worker.start()
    callers: list[Caller] = []
    most = 0
    for _ in range(count):
        while len(worker._waiting) > 20:
            time.sleep(0.002)
        caller = Caller(random_request(dice, shared))
        worker.submit(caller.job)
        callers.append(caller)
        most = max(most, len(worker._running))
        if dice.random() < 0.1:
            worker.leave(dice.choice(callers[-20:]).job)
        if dice.random() < 0.3:
            time.sleep(dice.random() * 0.02)
    worker.stop(600)
    return _counted(llm, weights, callers, most, time.perf_counter() - begin)


def _counted(llm: LLM, weights: str, callers: list[Caller], most: int, seconds: float) -> Tally:
    differing = 0
    for caller in callers:
        own = alone(llm, caller.job.request)
        whole = caller.ended.is_set()
        differing += caller.got != (own if whole else own[: len(caller.got)])
    ended = [caller for caller in callers if caller.ended.is_set()]
    stats = [caller.events[-1].stats for caller in ended]
    found = [each for each in stats if each is not None]
    return Tally(
        weights,
        len(callers),
        len(found),
        len(callers) - len(found),
        sum(len(caller.got) for caller in callers),
        differing,
        sum(each.accepted for each in found),
        sum(each.prompt_tokens for each in found),
        sum(each.cached_prompt_tokens for each in found),
        most,
        seconds,
    )


def markdown(run: ServedRun) -> str:
    header = ["weights", "requests", "finished", "left early", "tokens", "drafts kept",
              "prompt tokens", "cached", "at once", "differing"]  # fmt: skip
    rows = [
        [each.weights, *map(str, (each.requests, each.finished, each.left, each.tokens,
         each.drafts_kept, each.prompt_tokens, each.cached_tokens, each.most_at_once,
         each.differing))]
        for each in run.tallies
    ]  # fmt: skip
    return paragraphs([said_threads(run.provenance), Table(header, rows)])


def served(
    requests: Annotated[int, typer.Option(min=2, help="Requests, of both kinds together.")] = 2000,
    seed: Annotated[int, typer.Option(help="Of what is drawn at random.")] = 0,
    threads: Threads = 1,
    out: Out = None,
    show: Show = None,
) -> None:
    """Compare what a busy server's engine writes with what each request gets alone."""
    if show is not None:
        typer.echo(markdown(read(ServedRun, show)))
        return
    torch.set_num_threads(threads)
    model: Any = near_identity_model(0.6)
    run = ServedRun(made_by("served", threads), seed)
    path: Path = out or result_path("served")
    for weights in WEIGHTS:
        llm = LLM.from_pretrained(model, tokenizer=tiny_tokenizer(), weights=weights)
        run.tallies.append(tally(llm, weights, requests // len(WEIGHTS), seed))
    run.complete = True
    write(run, path)
    typer.echo(markdown(run))
    if any(each.differing for each in run.tallies):
        raise SystemExit(1)


if __name__ == "__main__":
    run_command(served)
