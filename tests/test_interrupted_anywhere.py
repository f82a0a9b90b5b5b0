"""Every drafter, interrupted in a chat, a stream and a batch: at calls of ours that are made to
raise in turn, and by Ctrl-C at random times. What follows must be what would have been written.

By default some points of each are tried. With `--full`: every call of a round, and 2,000 times
Ctrl-C.
"""

from __future__ import annotations

import functools
import random
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import pytest

from selfspec.control.registry import make_controller
from selfspec.core.sampling import Sampler, SamplingParams
from selfspec.draft.base import Drafter
from selfspec.engine.generation import Generation
from selfspec.engine.row import Request
from test_drafter_conformance import DRAFTERS, World
from test_interrupted import DEFAULTS
from test_rows_come_and_go import Interrupted, InterruptsAt

NEW = 14
POINTS = 5  # of each drafter and kind of call
TIMES = 60  # Ctrl-C
FIXED = make_controller("fixed", {"tokens": 5})
PROMPTS = [[1, 2, 3, 1, 2, 3, 1], [7] * 20, [5, 9]]
SAID = [{"role": "user", "content": "once upon a time, once upon"}]
OPTIONS: Any = {"max_new_tokens": NEW, "eos": [], "logprobs": 1}

Ran = Callable[[Drafter], object]


class Place:
    """A world of its own, with what plain decoding writes there."""

    def __init__(self) -> None:
        self.world, other = World("alike"), World("alike")
        self.llm, self.fresh = self.world.llm, other.llm
        self.prompt = self.fresh.encode_chat(SAID)
        whole = self.fresh.generate([self.prompt, *PROMPTS], **OPTIONS, draft=None)
        self.answer, *self.texts = (result.tokens for result in whole)
        # the next turn begins with the answer and goes on
        self.next = self._turn(self.fresh, None)

    def _turn(self, llm: Any, chats: Any) -> Any:
        options = DEFAULTS | OPTIONS | {"draft": None}
        found = llm._start([self.prompt + self.answer], options, chats).finish()[0]
        return found.tokens, [each.logprob for each in found.logprobs]

    def check_next_turn(self) -> None:
        assert self._turn(self.llm, self.llm._chats) == self.next


@functools.cache
def place() -> Place:
    return Place()


@functools.cache
def drafter_of(name: str, option: int, rows: int) -> Drafter:
    here = place()
    script = [here.answer] if rows == 1 else here.texts
    return DRAFTERS[name][option](here.world, script)


def control_of(drafter: Drafter) -> Any:
    return None if drafter.decides_how_much else FIXED


@contextmanager
def calls_raise(at: int) -> Iterator[InterruptsAt]:
    """Our n-th call from here on raises, unless there are fewer."""
    interruption = InterruptsAt(at)
    sys.setprofile(interruption)
    try:
        yield interruption
    except Interrupted:
        interruption.seen = at + 1
    finally:
        sys.setprofile(None)


@contextmanager
def ctrl_c(after: float) -> Iterator[None]:
    """As the terminal sends it, so many seconds from here, unless all is done by then."""
    # not SIGINT itself, which pytest would take for the end of all tests
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, after)
        yield
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        return  # as it was meant
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def chat(drafter: Drafter) -> Any:
    return place().llm.chat(SAID, **OPTIONS, draft=drafter, control=control_of(drafter))


def stream(drafter: Drafter) -> Any:
    options = OPTIONS | {"draft": drafter, "control": control_of(drafter)}
    with closing(place().llm.stream_chat(SAID, **options)) as pieces:
        return [piece.tokens for piece in pieces]


class Batch:
    """Three rows under way, whose tokens are gathered step by step."""

    def __init__(self, drafter: Drafter) -> None:
        sampler, control = Sampler(SamplingParams(), 0), control_of(drafter)
        requests = [Request(p, sampler, NEW, drafter=drafter, controller=control) for p in PROMPTS]
        self.generation = Generation(place().llm.model, requests, chunk=16)
        self.rows = list(self.generation.rows)
        self.written: Sequence[list[int]] = [[] for _ in PROMPTS]

    def step(self) -> None:
        for part in self.generation.step().rows:
            self.written[part.row].extend(part.tokens)

    def run(self) -> None:
        while self.generation.rows:
            self.step()


def points(count: int, full: bool, seed: str) -> Sequence[int]:
    """Which of so many calls are made to raise."""
    return range(count) if full else sorted(random.Random(seed).sample(range(count), POINTS))


@pytest.fixture
def full(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--full"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "option" in metafunc.fixturenames:
        full = metafunc.config.getoption("--full")
        pairs = [(n, o) for n, made in DRAFTERS.items() for o in range(len(made) if full else 1)]
        metafunc.parametrize(("name", "option"), pairs)


@pytest.mark.parametrize("call", [chat, stream])
def test_the_turn_after_an_interrupted_one(call: Ran, name: str, option: int, full: bool) -> None:
    """A cache that holds what was not kept, and is given back to the chat all the same."""
    here, drafter = place(), drafter_of(name, option, 1)
    with calls_raise(10**9) as whole:
        call(drafter)
    for at in points(whole.seen, full, f"{name} {option}"):
        here.llm._chats._kept.clear()
        with calls_raise(at):
            call(drafter)
        here.check_next_turn()


def test_a_batch_after_an_interrupted_round(name: str, option: int, full: bool) -> None:
    """A row that loses tokens, says them twice, or goes on from another row's state."""
    here, drafter = place(), drafter_of(name, option, 3)
    whole = Batch(drafter)
    for _ in range(3):
        whole.step()
    with calls_raise(10**9) as round_:
        whole.step()
    for at in points(round_.seen, full, f"batch {name} {option}"):
        batch = Batch(drafter)
        for _ in range(3):
            batch.step()
        with calls_raise(at):
            batch.step()
        batch.run()
        assert batch.written == here.texts, f"interrupted at call {at}"


def check_one_ctrl_c(turn: int, dice: random.Random) -> str:
    """One interruption and what follows; says what was interrupted."""
    here, names = place(), sorted(DRAFTERS)
    name = names[turn % len(names)]
    if turn % 3 == 2:
        batch = Batch(drafter_of(name, 0, 3))
        with ctrl_c(dice.uniform(1e-4, 0.03)):
            batch.run()
        batch.run()
        # the step that was on its way to its reader when the signal came is lost with it
        for row, text in zip(batch.rows, here.texts, strict=True):
            assert row.tokens[len(row.request.prompt) :] == text
        return f"batch {name}"
    here.llm._chats._kept.clear()
    call = (chat, stream)[turn % 3]
    with ctrl_c(dice.uniform(1e-4, 0.06)):
        call(drafter_of(name, 0, 1))
    here.check_next_turn()
    return f"{call.__name__} {name}"


def test_ctrl_c_at_any_time(full: bool) -> None:
    """A signal arrives between any two instructions, not only at calls."""
    dice = random.Random(5)
    for turn in range(2000 if full else TIMES):
        check_one_ctrl_c(turn, dice)
