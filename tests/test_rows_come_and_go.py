"""Rows join and leave a running generation, each with its own drafter, length and sampling. What a
row writes is what it writes alone, bit for bit; and what is raised inside a step leaves no trace.
"""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

import pytest

from selfspec import LLM, SamplingParams, ScriptedDrafter
from selfspec.control.registry import make_controller
from selfspec.core.contract import RowStep
from selfspec.core.sampling import Sampler
from selfspec.draft.from_layers.early_exit import EarlyExit
from selfspec.draft.from_text.recycle import TokenRecycling
from selfspec.draft.registry import make_drafter
from selfspec.engine.generation import Generation
from selfspec.engine.row import Request, Row
from selfspec.testing import tiny_model, tiny_tokenizer
from test_drafter_conformance import alike

FIXED = make_controller("fixed", {"tokens": 5})
SAMPLINGS = [
    SamplingParams(),
    SamplingParams(temperature=0.8, top_k=40, seed=11),
    SamplingParams(repetition_penalty=1.3, frequency_penalty=0.4),
    SamplingParams(temperature=0.7, min_p=0.02, presence_penalty=0.3, seed=2),
]
DRAFTERS: list[Callable[[], Any]] = [
    lambda: None,
    lambda: make_drafter("hybrid", {}),
    lambda: make_drafter("ngram", {}),
    lambda: make_drafter("recycle", {}),
    lambda: make_drafter("jacobi", {}),
    lambda: make_drafter("early-exit", {"layer": 2}),
    lambda: make_drafter("early-exit", {"layer": 3}),
    lambda: make_drafter("early-exit", {"layer": 2, "sample": True}),
    lambda: make_drafter("layer-skip", {}),
    lambda: make_drafter("cosine", {"threshold": 0.5, "keep_last": 1}),
    lambda: make_drafter("kv-subset", {"sink": 1, "recent": 2, "blocks": 1, "block_size": 2}),
    lambda: make_drafter("draft-model", {}),
]


@functools.cache
def model_of(name: str) -> LLM:
    changes = {"mistral": {"sliding_window": 12}}.get(name, {})
    hf = alike() if name == "alike" else tiny_model(name, seed=4, **changes)
    return LLM.from_pretrained(hf, tokenizer=tiny_tokenizer())


@dataclass
class Written:
    """What a row wrote, as its steps reported it."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str | None = None

    def add(self, part: RowStep) -> None:
        self.tokens += part.tokens
        self.logprobs += [each.logprob for each in part.logprobs]
        self.finish = part.finish_reason


def random_request(dice: random.Random) -> Request:
    prompt = [dice.randrange(1, 200) for _ in range(dice.choice([1, 3, 8, 30, 70]))]
    prompt = prompt * dice.choice([1, 1, 2])  # repeated text, so that lookups find something
    drafter = dice.choice(DRAFTERS)()
    params = dice.choice(SAMPLINGS)
    return Request(
        prompt,
        Sampler(params, params.seed or 0, prompt_length=len(prompt)),
        max_new_tokens=dice.choice([1, 5, 14, 24]),
        logprobs=1,
        drafter=drafter,
        controller=FIXED if drafter else None,
    )


def alone(model: Any, request: Request) -> Written:
    """The same request with nobody beside it. What is drawn hangs on what is drafted, so drawn
    drafts keep their drafter; all others are compared with plain decoding."""
    if not getattr(request.drafter, "sample", False):
        request = replace(request, drafter=None, controller=None)
    written = Written()
    for step in Generation(model, [request]):
        for part in step.rows:
            written.add(part)
    return written


def test_sampler_takes_its_arguments_by_these_names() -> None:
    """The requests above would all be seeded alike, or counted from 0, if names had changed."""
    sampler = Sampler(SamplingParams(temperature=1.0), 7, prompt_length=3)
    assert sampler.seed == 7 and sampler.prompt_length == 3


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "alike"])
def test_each_row_writes_what_it_writes_alone(name: str) -> None:
    """A slot that remembers its last row, sessions that mix rows up, a long prompt read wrongly
    beside others, exit states of one row used for another. A lucky pass would need rows that never
    meet: what must have happened is counted."""
    model, dice = model_of(name).model, random.Random(name)
    generation = Generation(model, rows=2, chunk=16)
    running: dict[int, tuple[Row, Written]] = {}
    slots: list[int] = []
    met = mixed = accepted = retired = 0
    for _ in range(70):
        while len(running) < 4 and dice.random() < 0.5:
            row = generation.admit(random_request(dice))
            running[row.index] = row, Written()
            slots.append(row.slot)
        if running and dice.random() < 0.05:  # somebody hangs up
            row, written = running.pop(dice.choice(list(running)))
            generation.retire(row)
            whole = alone(model, row.request)
            assert written.tokens == whole.tokens[: len(written.tokens)]
            retired += 1
        if not running:
            continue
        step = generation.step()
        met = max(met, len(step.rows))
        mixed = max(mixed, len(generation._groups.all))
        for part in step.rows:
            row, written = running[part.row]
            written.add(part)
            accepted += part.accepted
            if part.finish_reason:
                del running[part.row]
                assert written == alone(model, row.request), row.request
    assert met >= 3 and mixed >= 3 and retired >= 1, "rows met, with drafters of several kinds"
    assert len(slots) > 2 * len(set(slots)) and max(slots) >= 2, "slots were reused, and added"
    assert accepted > (30 if name == "alike" else 0)


# ---------------------------------------------------------- a round counts whole or not at all


class Interrupted(BaseException):
    """Like Ctrl-C: nobody catches it by chance."""


class InterruptsAt:
    """Raises at the n-th call within selfspec, and counts calls."""

    def __init__(self, at: int) -> None:
        self.at, self.seen = at, 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and "/selfspec/" in frame.f_code.co_filename:
            if self.seen == self.at:
                sys.setprofile(None)
                raise Interrupted
            self.seen += 1


def requests_for(model: Any, name: str) -> list[Request]:
    prompts = [[1, 2, 3, 1, 2, 3, 1], [7] * 40, [5, 9]]
    scripts = [alone(model, Request(p, Sampler(SamplingParams(), 0), 20)).tokens for p in prompts]
    drafters: dict[str, Any] = {
        "scripted": ScriptedDrafter(scripts, wrong_every=3),
        "exit": EarlyExit(layer=2),
        "kept table": TokenRecycling(keep_table=True),
        "auto": make_drafter("auto", {}),
    }
    drafter = drafters[name]
    control = None if drafter.decides_how_much else FIXED
    return [
        Request(p, Sampler(SamplingParams(), 0), 20, drafter=drafter, controller=control)
        for p in prompts
    ]


@pytest.mark.parametrize("name", ["scripted", "exit", "kept table", "auto"])
def test_an_interrupted_step_counts_whole_or_not_at_all(name: str) -> None:
    """Drafts left in the cache, tokens kept twice or never reported, sessions that go on with what
    a broken round left in them. Every generation is run on to its end, and on the same shared
    tables and costs the next one begins."""
    model = model_of("alike").model
    requests = requests_for(model, name)
    expected = [alone(model, request).tokens for request in requests]
    counter = InterruptsAt(10**9)
    generation = Generation(model, requests, chunk=16)
    for _ in range(4):
        generation.step()
    sys.setprofile(counter)
    generation.step()
    sys.setprofile(None)
    for at in range(0, counter.seen, 1 + counter.seen // 20):
        generation = Generation(model, requests, chunk=16)
        rows = list(generation.rows)
        written: dict[int, list[int]] = {row.index: [] for row in rows}

        def run(generation: Generation, written: dict[int, list[int]], steps: int) -> None:
            while generation.rows and steps:
                steps -= 1
                for part in generation.step().rows:
                    written[part.row] += part.tokens

        run(generation, written, 4)
        states = [(row.state, list(row.tokens), row.ended) for row in rows]
        sys.setprofile(InterruptsAt(at))
        try:
            generation.step()
        except Interrupted:
            for row, (state, tokens, ended) in zip(rows, states, strict=True):
                assert len(row.tokens) == row.state.length
                assert row.state == state or row.tokens[: state.length] == tokens
                assert row.ended == ended or row.state != state
                if row in generation.rows:
                    assert generation.cache.length(row.slot) <= row.settled
        else:
            continue  # fewer calls than the round that was counted
        finally:
            sys.setprofile(None)
        run(generation, written, -1)
        assert [written[row.index] for row in rows] == expected, f"interrupted at call {at}"


class RaisesAfter:
    """A user's stop check with a bug."""

    def __init__(self, tokens: int) -> None:
        self.left = tokens

    def push(self, token: int) -> bool:
        self.left -= 1
        if self.left < 0:
            raise ZeroDivisionError
        return False


@pytest.mark.parametrize("name", ["scripted", "exit"])
def test_what_a_request_raises_ends_that_request_only(name: str) -> None:
    """Neighbours that end with it, lose a step, or go on with its drafts."""
    model = model_of("alike").model
    first, broken, last = requests_for(model, name)
    expected = [alone(model, request).tokens for request in (first, last)]
    generation = Generation(model, [first, replace(broken, stop_checks=[RaisesAfter(7)]), last])
    written: list[list[int]] = [[], [], []]
    errors: list[Exception] = []
    while generation.rows:
        for part in generation.step().rows:
            written[part.row] += part.tokens
            errors += [part.error] if part.error else []
    assert [type(error) for error in errors] == [ZeroDivisionError]
    assert [written[0], written[2]] == expected and len(written[1]) <= 7
    with pytest.raises(ZeroDivisionError):
        list(Generation(model, [first, replace(broken, stop_checks=[RaisesAfter(7)]), last]))
