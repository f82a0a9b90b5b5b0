"""The worker alone, without HTTP: requests come, go and fail beside each other."""

from __future__ import annotations

import functools
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from selfspec import LLM, OptionError
from selfspec.control.registry import make_controller
from selfspec.core.contract import Stats
from selfspec.core.sampling import Sampler, SamplingParams
from selfspec.core.text_stream import RowText
from selfspec.draft.base import Drafter, DraftSession
from selfspec.draft.from_layers.early_exit import EarlyExit
from selfspec.draft.hybrid import Hybrid
from selfspec.engine import streak
from selfspec.engine.generation import Generation
from selfspec.engine.group import Group
from selfspec.engine.row import Request
from selfspec.serve.job import Event, Job
from selfspec.serve.pace import Pace
from selfspec.serve.problems import Problem
from selfspec.serve.settings import Limits, context_for
from selfspec.serve.worker import Worker
from selfspec.testing import tiny_model, tiny_tokenizer
from test_drafter_conformance import alike
from test_rows_come_and_go import DRAFTERS, FIXED, SAMPLINGS, RaisesAfter


@functools.cache
def llm() -> LLM:
    return LLM.from_pretrained(alike(), tokenizer=tiny_tokenizer())


class Caller:
    """Waits for one job, as a connection would."""

    def __init__(self, request: Request, priority: int = 0) -> None:
        self.events: list[Event] = []
        self.ended = threading.Event()
        self.job = Job(request, RowText(None, ()), self._hear, priority)

    def _hear(self, event: Event) -> None:
        self.events.append(event)
        if event.last:
            self.ended.set()

    @property
    def tokens(self) -> list[int]:
        return [token for event in self.events for token in event.tokens]

    @property
    def logprobs(self) -> list[float]:
        return [each.logprob for event in self.events for each in event.logprobs]

    @property
    def error(self) -> Exception | None:
        return self.events[-1].error if self.events else None

    @property
    def stats(self) -> Stats:
        stats = self.events[-1].stats
        assert stats is not None
        return stats

    def wait(self) -> Caller:
        assert self.ended.wait(60), "it never ended"
        return self


def plain(prompt: list[int], tokens: int = 8, **more: Any) -> Request:
    return Request(prompt, Sampler(SamplingParams(), 0), tokens, **more)


def alone(request: Request) -> tuple[list[int], list[float]]:
    """What the request writes with nobody beside it and without drafts."""
    request = replace(request, drafter=None, controller=None)
    parts = [part for step in Generation(llm().model, [request]) for part in step.rows]
    tokens = [token for part in parts for token in part.tokens]
    return tokens, [each.logprob for part in parts for each in part.logprobs]


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker(llm(), Limits(rows=4, context=400))
    made.start()
    yield made
    made.stop(0)


def submitted(worker: Worker, request: Request, priority: int = 0) -> Caller:
    caller = Caller(request, priority)
    worker.submit(caller.job)
    return caller


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.002)


def random_request(dice: random.Random, shared: list[int]) -> Request:
    """A prompt of its own, or one that begins as others do."""
    prompt = [dice.randrange(1, 200) for _ in range(dice.choice([1, 5, 20, 90]))]
    prompt = [*shared[: dice.choice([0, 70, 120])], *prompt * dice.choice([1, 1, 2])]
    drafter = dice.choice([*DRAFTERS[:7], *DRAFTERS[8:11], "auto"])
    drafter = drafter() if callable(drafter) else None if drafter is None else _auto()
    params = dice.choice(SAMPLINGS)
    return Request(
        prompt,
        Sampler(params, dice.randrange(1000), prompt_length=len(prompt)),
        max_new_tokens=dice.choice([1, 5, 14, 24]),
        logprobs=1,
        drafter=drafter,
        controller=None if drafter is None or drafter.decides_how_much else FIXED,
    )


@functools.cache
def _auto() -> Drafter:
    from selfspec.draft.registry import make_drafter

    found = make_drafter("auto", {})
    assert found is not None
    return found


def test_each_answer_is_the_one_given_alone(worker: Worker) -> None:
    """Tokens or log-probabilities that depend on who came before, beside or behind: rows that are
    reused, beginnings that are shared, callers that leave."""
    dice = random.Random(7)
    shared = [dice.randrange(1, 200) for _ in range(120)]
    callers: list[Caller] = []
    for _ in range(120):
        until(lambda: len(worker._waiting) < 20)
        callers.append(submitted(worker, random_request(dice, shared), dice.choice([0, 0, 1])))
        if dice.random() < 0.1:
            worker.leave(dice.choice(callers).job)
    finished = cached = 0
    for caller in callers:
        if caller.job.left and not caller.ended.is_set():
            assert caller.tokens == alone(caller.job.request)[0][: len(caller.tokens)]
            continue
        caller.wait()
        assert caller.error is None
        assert (caller.tokens, caller.logprobs) == alone(caller.job.request), caller.job.request
        finished += 1
        cached += caller.stats.cached_prompt_tokens
    assert finished > 90 and cached > 1500
    until(lambda: not worker._running)
    assert worker._slots.used == {} and not worker._generation.rows, "a row was not given back"


def test_a_shared_beginning_is_read_once(worker: Worker) -> None:
    """Callers that come together with the same long prompt, and the next turn of a chat."""
    prompt = list(range(1, 150))
    with worker._changed:  # together: none has ended, and given its row away, when the last comes
        four = [submitted(worker, plain([*prompt, 200 + number])) for number in range(4)]
    known = sorted(caller.wait().stats.cached_prompt_tokens for caller in four)
    assert known == [0, 149, 149, 149]
    turn = [*prompt, 200, *four[0].tokens, 7, 8, 9]
    known_then = submitted(worker, plain(turn)).wait().stats.cached_prompt_tokens
    assert known_then == len(turn) - 4, "all but the last answer's last token, which was never read"


def test_a_caller_that_leaves_frees_its_row(worker: Worker) -> None:
    """Work that goes on for nobody."""
    callers = [submitted(worker, plain([5, number], 390)) for number in range(4)]
    waiting = submitted(worker, plain([9], 3))
    until(lambda: all(caller.tokens for caller in callers))
    worker.leave(callers[1].job)
    assert waiting.wait().error is None
    assert not callers[0].ended.is_set(), "the others were still at it"
    count = len(callers[1].tokens)
    for caller in callers:
        worker.leave(caller.job)
    until(lambda: not worker._running)
    assert len(callers[1].tokens) == count < 390


class Stubborn(DraftSession):
    """A session with a bug."""

    def propose(self, rows: Any, texts: Any, budget: Any) -> Any:
        raise ZeroDivisionError


class Broken(Drafter):
    """A drafter with a bug: at once, or in the midst of its work."""

    name = "broken"

    def __init__(self, at_once: bool) -> None:
        self.at_once = at_once

    def start(self, target: Any) -> DraftSession:
        if self.at_once:
            raise OptionError("it does not fit")
        return Stubborn()


@pytest.mark.parametrize("how", ["drafter", "misfit", "stop check"])
def test_an_error_ends_its_own_request_only(worker: Worker, how: str) -> None:
    """One request's mistake that ends its neighbours, or the thread."""
    good = plain([1, 2, 3, 1, 2, 3], 40, drafter=DRAFTERS[2](), controller=FIXED, logprobs=0)
    fixed = make_controller("fixed", {"tokens": 2})
    bad = {
        "drafter": plain([4, 5], 30, drafter=Broken(False), controller=fixed),
        "misfit": plain([4, 5], 30, drafter=Broken(True), controller=fixed),
        "stop check": plain([4, 5], 30, stop_checks=[RaisesAfter(3)]),
    }[how]
    first, second = submitted(worker, good), submitted(worker, bad)
    third = submitted(worker, good)
    kind = OptionError if how == "misfit" else ZeroDivisionError
    assert isinstance(second.wait().error, kind)
    for caller in (first.wait(), third.wait(), submitted(worker, good).wait()):
        assert (caller.tokens, caller.logprobs) == alone(good)
    assert worker.ready


def test_what_cannot_fit_is_refused_with_both_lengths(worker: Worker) -> None:
    """A request that is begun and cannot be finished."""
    with pytest.raises(Problem, match=r"has 390 tokens and max_tokens is 11; .* 400") as refused:
        submitted(worker, plain([1] * 390, 11))
    assert refused.value.status == 400
    assert len(submitted(worker, plain([1] * 390, 10)).wait().tokens) == 10


def test_a_full_queue_refuses_and_says_when_to_come_again() -> None:
    """A queue without an end, in which everybody waits for ever."""
    worker = Worker(llm(), Limits(rows=1, context=300, queue=2))
    worker.start()
    running = submitted(worker, plain([3], 290))
    until(lambda: bool(running.events))
    waiting = [submitted(worker, plain([4], 4)) for _ in range(2)]
    with pytest.raises(Problem, match="2 requests wait already") as refused:
        submitted(worker, plain([4], 4))
    assert refused.value.status == 429 and int(refused.value.headers["Retry-After"]) >= 1
    worker.leave(running.job)
    assert all(caller.wait().error is None for caller in waiting)
    worker.stop()


def test_priority_comes_first_and_waiting_counts() -> None:
    """Requests of low priority that are never served, or a priority that changes nothing."""
    worker = Worker(llm(), Limits(rows=1, context=300))
    running = submitted_early(worker, plain([3], 20))
    order: list[int] = []
    callers = []
    for number, priority in enumerate([1, 0, 0, -1]):
        caller = Caller(plain([4 + number], 2), priority)
        caller.job.deliver = functools.partial(_note, order, number, caller)
        worker._waiting.add(caller.job)
        callers.append(caller)
    patient = Caller(plain([99], 2), 5)
    patient.job.arrived -= 100  # seconds
    patient.job.deliver = functools.partial(_note, order, 4, patient)
    worker._waiting.add(patient.job)
    worker.start()
    for caller in (running, *callers, patient):
        caller.wait()
    assert order == [4, 3, 1, 2, 0]
    worker.stop()


def _note(order: list[int], number: int, caller: Caller, event: Event) -> None:
    if event.last:
        order.append(number)
    caller._hear(event)


def submitted_early(worker: Worker, request: Request) -> Caller:
    """Before the thread runs, so that the order is certain."""
    caller = Caller(request, -9)
    worker._waiting.add(caller.job)
    return caller


def test_draining_finishes_what_is_there_and_takes_nothing_new() -> None:
    """Answers that are cut off when a server is replaced."""
    worker = Worker(llm(), Limits(rows=2, context=300))
    worker.start()
    callers = [submitted(worker, plain([3, number], 40)) for number in range(5)]
    worker.drain()
    with pytest.raises(Problem, match="about to end") as refused:
        submitted(worker, plain([1], 2))
    assert refused.value.status == 503
    assert worker.stop() and not worker.alive
    assert [len(caller.tokens) for caller in callers] == [40] * 5


def test_ending_at_once_tells_everybody() -> None:
    """Callers that wait for a thread which is gone."""
    worker = Worker(llm(), Limits(rows=1, context=400))
    worker.start()
    callers = [submitted(worker, plain([3, number], 390)) for number in range(3)]
    assert not worker.stop(0)
    assert all(isinstance(caller.wait().error, Problem) for caller in callers)


class Dawdles:
    """A stop check that takes its time: on a fast machine 395 tokens end within any limit."""

    def push(self, token: int) -> bool:
        time.sleep(0.002)
        return False


def test_what_takes_too_long_is_ended() -> None:
    """A request that holds its row for ever, and one that waits for ever."""
    worker = Worker(llm(), Limits(rows=1, context=400, seconds=0.05, queue_seconds=0.01))
    worker.start()
    running = submitted(worker, plain([3], 395, stop_checks=[Dawdles()]))
    until(lambda: bool(running.events))
    waiting = submitted(worker, plain([3], 395))
    found = [caller.wait().error for caller in (running, waiting)]
    assert [error.status for error in found if isinstance(error, Problem)] == [504, 429]
    worker.stop()


def test_room_is_counted_before_anything_runs() -> None:
    """A cache that grows until the machine has no memory left."""
    model = LLM.from_pretrained(tiny_model("llama"), tokenizer=tiny_tokenizer()).model
    each = 2 * 4 * 2 * 16 * 4  # keys and values, layers, heads, size, bytes
    assert context_for(model, Limits(rows=2), free=each * 2 * 2 * 300) == 300
    assert context_for(model, Limits(rows=2), free=10**9) == model.shape.context
    with pytest.raises(Exception, match="fewer rows, or a context of 300"):
        context_for(model, Limits(rows=2, context=400), free=each * 2 * 300)
    with pytest.raises(OptionError, match="more than the model's 512"):
        context_for(model, Limits(context=513))


def test_a_short_prompt_does_not_wait_for_a_long_one_nor_stops_it() -> None:
    """A first token that comes after somebody's whole book, or a book that is never read because
    short prompts keep coming."""
    generation = Generation(llm().model, rows=4, chunk=32)
    long = generation.admit(plain([7] * 400, 2))
    generation.step()
    for number in range(3):
        short = generation.admit(plain([number] * 30, 1))
        before, rounds = long.settled, 0
        while short in generation.rows:
            generation.step()
            rounds += 1
        assert rounds <= 2
        assert long.settled >= before + 8 * rounds, "a quarter of each chunk is its own"


def test_chunks_are_as_large_as_time_allows() -> None:
    """Rounds that last seconds while a prompt is read, or a prompt in crumbs on a fast machine."""
    slow, fast = Pace(), Pace()
    for _ in range(16):
        for pace, each in ((slow, 0.1), (fast, 0.0001)):
            pace.observe(pace.chunk(), each * pace.chunk(), 1.0)
    assert slow.chunk() == 16 and fast.chunk() == 512


def test_drafts_beside_a_chunk_do_not_make_chunks_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk whose time has the round's in it: drafts of others make rounds ten times as long, and
    prompts were read in crumbs, so that few rows ever wrote together."""
    worker, told = Worker(llm(), Limits(rows=2, context=400)), list[tuple[int, float, float]]()
    monkeypatch.setattr(worker._pace, "observe", lambda *seen: told.append(seen))
    monkeypatch.setattr(Group, "draft", _slowly(Group.draft))
    writer = Caller(plain([3, 4], 60, drafter=EarlyExit(1), controller=FIXED))
    reader = Caller(plain([7] * 300, 2))
    for caller in (writer, reader):
        worker._waiting.add(caller.job)
    while not reader.ended.is_set():
        _round(worker)
    both = [(reading, writing) for read, reading, writing in told if read and writing]
    assert len(both) >= 5
    assert min(reading for reading, _ in both) < SLOW <= min(writing for _, writing in both)


def test_rounds_of_a_streak_count_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight rounds taken for one, so that chunks of prompts become eight times as long."""
    worker, told = Worker(llm(), Limits(rows=2, context=400)), list[float]()
    monkeypatch.setattr(worker._pace, "observe", lambda *seen: told.append(seen[2]))
    monkeypatch.setattr(streak, "SECONDS", 1e9)
    own, steps = streak.run_rounds, dict[int, int]()

    def slow(*given: Any) -> Any:
        rounds = own(*given)
        steps[len(told)] = len(rounds)
        time.sleep(SLOW)
        return rounds

    monkeypatch.setattr(streak, "run_rounds", slow)
    writer = Caller(plain([3, 4], 60, drafter=Hybrid(), controller=FIXED))
    worker._waiting.add(writer.job)
    while not writer.ended.is_set():
        _round(worker)
    if not steps:
        pytest.skip("no C++ compiler found (g++ or clang++)")
    assert max(steps.values()) > 2
    assert all(told[step] < SLOW for step, rounds in steps.items() if rounds > 2)


SLOW = 0.2  # seconds


def _slowly(work: Callable[..., Any]) -> Callable[..., Any]:
    def slow(*given: Any) -> Any:
        time.sleep(SLOW)
        return work(*given)

    return slow


@pytest.mark.parametrize("slow", [True, False], ids=["chunks of 16", "chunks of 512"])
@pytest.mark.parametrize("read", [100, 2000, 3900])
def test_a_first_token_comes_within_three_rounds_beside_4000_tokens(slow: bool, read: int) -> None:
    """A short prompt that waits for somebody's long one. Rounds are counted and not seconds: one in
    which nobody knew of it yet, and two in which it is read even where chunks are smallest. How
    long rounds are is `Pace`'s: at most four plain ones by what was measured."""
    model = tiny_model("llama", max_position_embeddings=8192)
    wide = LLM.from_pretrained(model, tokenizer=tiny_tokenizer())
    worker = Worker(wide, Limits(rows=3, context=4200))
    for _ in range(16):  # what rounds took here, it believes
        for size in (16, 32, 64, 128, 256, 512):
            worker._pace.observe(size, 3.0 + size if slow else size / 1e6, 1.0)
    assert worker._pace.chunk() == (16 if slow else 512)
    worker._pace.observe = lambda *_: None  # type: ignore[method-assign]
    writer, long = Caller(plain([3, 4], 2000)), Caller(plain([7] * 4000, 2))
    for caller in (writer, long):
        worker._waiting.add(caller.job)
    while (long.job.row.settled if long.job.row else 0) < read:
        _round(worker)
    short, rounds = Caller(plain([*range(24)], 3)), 1  # it came while a round was under way
    worker._waiting.add(short.job)
    while not short.tokens:
        _round(worker)
        rounds += 1
    assert rounds <= 3
    assert read == 3900 or not long.tokens, "the long one was being read all the while"
    before = len(writer.tokens)
    _round(worker)
    assert len(writer.tokens) == before + 1, "and who writes goes on in each round"


def _round(worker: Worker) -> None:
    """What the worker's thread does, in this one."""
    worker._tidy()
    worker._admit()
    worker._step()
