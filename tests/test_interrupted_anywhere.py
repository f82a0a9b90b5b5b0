"""Every drafter, interrupted in a chat, a stream and a batch: at calls of ours that are made to
raise in turn, and by Ctrl-C at random times. What follows must be what would have been written.

Some points of each are tried here; `python -m tests.endurance calls` tries every call of a round,
and `ctrl-c` thousands of times.
"""

from __future__ import annotations

import functools
import random
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
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
KINDS = ["chat", "stream", "batch"]
POINTS = 5  # of each drafter and kind of call
TIMES = 60  # Ctrl-C
LATEST = [0.06, 0.06, 0.03]  # seconds until Ctrl-C at most: chats, streams, batches
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

    def check_next_turn(self, words: str = "") -> None:
        assert self._turn(self.llm, self.llm._chats) == self.next, words


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


def ctrl_c(after: float, work: Callable[[], object]) -> bool:
    """Work that is interrupted as the terminal does it, so many seconds from here, unless all is
    done by then; says which. No `with`: the signal may arrive on the way into one, or out of it."""
    # not SIGINT itself, which pytest would take for the end of all tests
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, after)
            work()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        return True
    finally:
        signal.signal(signal.SIGALRM, before)
    return False


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


@dataclass(frozen=True)
class Way:
    """One kind of call with one drafter, whose calls of ours can be made to raise."""

    kind: str  # chat, stream, batch
    name: str
    option: int

    @property
    def _drafter(self) -> Drafter:
        return drafter_of(self.name, self.option, 3 if self.kind == "batch" else 1)

    def count(self) -> int:
        """How many calls there are: in a whole chat or stream, in one round of a batch."""
        return self._interrupted(10**9)[0].seen

    def check(self, at: int) -> None:
        """The n-th raises; what follows is what would have been written."""
        batch = self._interrupted(at)[1]
        if batch is None:
            place().check_next_turn(f"{self}, interrupted at call {at}")
        else:
            batch.run()
            assert batch.written == place().texts, f"{self}, interrupted at call {at}"

    def _interrupted(self, at: int) -> tuple[InterruptsAt, Batch | None]:
        if self.kind == "batch":
            batch = Batch(self._drafter)
            for _ in range(3):
                batch.step()
            with calls_raise(at) as seen:
                batch.step()
            return seen, batch
        place().llm._chats._kept.clear()
        with calls_raise(at) as seen:
            {"chat": chat, "stream": stream}[self.kind](self._drafter)
        return seen, None


WAYS = sorted(
    (Way(k, n, o) for k in KINDS for n in DRAFTERS for o in range(len(DRAFTERS[n]))),
    key=lambda way: way.option,  # every drafter in every kind of call first
)


@pytest.mark.parametrize("way", [each for each in WAYS if each.option == 0], ids=str)
def test_what_follows_an_interrupted_call(way: Way) -> None:
    """A cache that holds what was not kept, and is given back to the chat all the same. A row of a
    batch that loses tokens, says them twice, or goes on from another row's state."""
    for at in sorted(random.Random(str(way)).sample(range(way.count()), POINTS)):
        way.check(at)


def check_one_ctrl_c(turn: int, dice: random.Random) -> bool:
    """One interruption and what follows; says whether it came before the end. If it came too late
    the next one of its kind comes sooner, since machines are not equally fast."""
    kind = turn % 3
    interrupted = _check_one(kind, turn, dice)
    LATEST[kind] *= 1.1 if interrupted else 0.8
    return interrupted


def _check_one(kind: int, turn: int, dice: random.Random) -> bool:
    here, names = place(), sorted(DRAFTERS)
    name, seconds = names[turn // 3 % len(names)], dice.uniform(1e-4, max(1e-3, LATEST[kind]))
    if kind == 2:
        batch = Batch(drafter_of(name, 0, 3))
        interrupted = ctrl_c(seconds, batch.run)
        batch.run()
        # the step that was on its way to its reader when the signal came is lost with it
        for row, text in zip(batch.rows, here.texts, strict=True):
            assert row.tokens[len(row.request.prompt) :] == text, f"batch, {name}"
        return interrupted
    here.llm._chats._kept.clear()
    call, drafter = (chat, stream)[kind], drafter_of(name, 0, 1)
    interrupted = ctrl_c(seconds, lambda: call(drafter))
    here.check_next_turn(f"{call.__name__}, {name}")
    return interrupted


def test_ctrl_c_at_any_time() -> None:
    """A signal arrives between any two instructions, not only at calls."""
    dice = random.Random(5)
    interrupted = sum(check_one_ctrl_c(turn, dice) for turn in range(TIMES))
    assert interrupted > TIMES / 4, "hardly anything was interrupted"
