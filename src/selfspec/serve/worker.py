"""The engine's one thread. It owns a generation, in which requests come and go between rounds.

Others hand in jobs and take events from them. The thread alone touches rows, slots and text, so
nothing here waits for a lock while it computes. Knows no HTTP.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter

import torch

from ..core.contract import RowStep
from ..engine.row import Request
from ..errors import SelfspecError
from ..llm import LLM
from .job import Event, Job
from .metrics import Metrics
from .pace import Pace
from .problems import Problem, ending, overloaded
from .settings import Limits, context_for
from .slots import Slots
from .waiting import Waiting

log = logging.getLogger("selfspec.serve")


class Worker:
    """Runs jobs. `start` begins, `submit` and `leave` may be called from any thread."""

    def __init__(
        self, llm: LLM, limits: Limits | None = None, metrics: Metrics | None = None
    ) -> None:
        self.llm, self.limits = llm, limits or Limits()
        self.context = context_for(llm.model, self.limits)
        self.metrics = metrics or Metrics()
        cache = llm.model.new_cache(self.limits.rows, self.context)
        self._generation = llm.generation(cache=cache)
        self._slots, self._pace = Slots(self.limits.rows), Pace()
        self._waiting = Waiting(self.limits)
        self._running: dict[int, Job] = {}
        self._changed = threading.Condition()
        self._draining = self._stopped = False
        self.failure: BaseException | None = None
        """What ended the thread, if it was not meant to end."""
        self._thread = threading.Thread(target=self._run, name="selfspec-engine", daemon=True)
        self.metrics.watch(
            running=lambda: len(self._running),
            waiting=lambda: len(self._waiting),
            cache=self.cache_share,
        )

    # ------------------------------------------------------------------------------- from outside

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def ready(self) -> bool:
        """Whether it takes new requests."""
        return self.alive and not self._draining

    def check(self, request: Request) -> None:
        """Raise unless the request can be served whole."""
        asked, prompt = request.max_new_tokens, len(request.prompt)
        if prompt + asked > self.context:
            raise Problem(
                f"the prompt has {prompt} tokens and max_tokens is {asked}; together they may be "
                f"{self.context}, the context of this server; shorten the prompt, or ask for less",
                code="context_length_exceeded",
            )

    def submit(self, job: Job) -> None:
        """Take a job, or raise the reason why not. It begins when a row is free."""
        self.check(job.request)
        with self._changed:
            if not self.ready:
                raise ending()
            if len(self._waiting) >= self.limits.queue:
                self.metrics.refused.inc()
                raise overloaded(
                    f"{len(self._waiting)} requests wait already, which is the limit; try again "
                    "later",
                    self._waiting.expected(len(self._running)),
                )
            self._waiting.add(job)
            self._changed.notify()

    def leave(self, job: Job) -> None:
        """Nobody waits for it any more: its row is free from the next round on."""
        with self._changed:
            job.left = True
            self._changed.notify()

    def drain(self) -> None:
        """Take nothing new. The thread ends once all is done."""
        with self._changed:
            self._draining = True
            self._changed.notify()

    def stop(self, seconds: float | None = None) -> bool:
        """Drain for so long at most, then end all that is left. Whether nothing was cut off."""
        self.drain()
        if not self._thread.is_alive():
            return True
        self._thread.join(self.limits.drain_seconds if seconds is None else seconds)
        whole = not self.alive
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join()
        return whole

    def cache_share(self) -> float:
        """The share of the cache that running requests fill."""
        held = sum(job.row.settled for job in self._running.values() if job.row)
        return held / (self.limits.rows * self.context)

    # ------------------------------------------------------------------------- the engine's thread

    def _run(self) -> None:
        try:
            while self._next():
                self._tidy()
                self._admit()
                if self._running:
                    self._step()
        except BaseException as error:
            self.failure = error
            log.exception("the engine's thread has ended")
            raise
        finally:
            self._draining = True
            self._end_all(ending())

    def _next(self) -> bool:
        """Wait until there is something to do; False: it is time to end."""
        with self._changed:
            while not (self._running or len(self._waiting) or self._draining or self._stopped):
                self._changed.wait()
            return not self._stopped and bool(self._running or len(self._waiting))

    def _tidy(self) -> None:
        """End what nobody waits for, and what takes too long."""
        for job in list(self._running.values()):
            if job.left:
                self._end(job, None)
            elif job.age > self.limits.seconds:
                self._end(job, _too_long(self.limits.seconds))
        with self._changed:
            gone, late = self._waiting.tidied()
        for job in gone:
            self.metrics.ended(job, None, "cancelled")
        for job in late:
            waited = f"no row was free for {self.limits.queue_seconds:g} s; try again later"
            self._end(job, overloaded(waited, self._waiting.expected(len(self._running))))

    def _admit(self) -> None:
        """Give rows to waiting jobs, as long as there are some."""
        while self._slots.free:
            with self._changed:
                found = self._waiting.take(lambda job: self._slots.place(job.request.prompt))
            if found is None:
                return
            job, place = found
            try:
                job.row = self._generation.admit(job.request, place.known, place.slot, place.source)
            except Exception as error:  # noqa: BLE001  (a drafter that does not fit the model)
                self._slots.left.pop(place.slot, None)  # what it held may be cut by now
                self._end(job, error)
                continue
            self._slots.take(job.row)
            self._running[job.row.index] = job
            self.metrics.admitted(job)
            self._tell(job, Event())

    def _step(self) -> None:
        """A round, or some of a row that is alone, and what they brought for whom."""
        self._generation.chunk = self._pace.chunk()
        unread, (read, written, before) = self._unread(), self._generation.progress
        try:
            step = self._generation.step()
        except Exception as error:  # noqa: BLE001  (whoever it is ends, the others go on)
            self._failed(error)
            return
        reading, writing, rounds = self._generation.progress
        round_seconds = (writing - written) / max(1, rounds - before)
        self._pace.observe(unread - self._unread(), reading - read, round_seconds)
        for index, parts in groupby(step.rows, key=attrgetter("row")):
            job = self._running.get(index)
            if job is not None:
                self._took(job, list(parts))

    def _unread(self) -> int:
        """Prompt tokens of all rows that are still to be read."""
        rows = [job.row for job in self._running.values() if job.row]
        return sum(max(0, len(row.request.prompt) - row.settled) for row in rows)

    def _failed(self, error: Exception) -> None:
        """A round was given up. The rows whose drafter raised end; if nobody knows, all do."""
        blamed = {row.index for row in self._generation.culprits} or set(self._running)
        for index in blamed & set(self._running):
            self._end(self._running[index], error)

    def _took(self, job: Job, parts: Sequence[RowStep]) -> None:
        self.metrics.step(job, [part for part in parts if not part.error])
        for part in parts:
            if part.error:
                self._end(job, part.error)
                return
            text = job.text.push(part)
            if part.finish_reason:
                self._end(job, None, Event(text, part, job.row.stats if job.row else None))
            else:
                self._tell(job, Event(text, part))

    def _end(self, job: Job, error: Exception | None, event: Event | None = None) -> None:
        """Take a job's row back and tell it. Without an event or an error nobody listens."""
        row = job.row
        if row is not None:
            self._running.pop(row.index, None)
            if row in self._generation.rows:
                self._generation.retire(row)
            if self._slots.used.get(row.slot) is row:
                self._slots.give(row)
            self._waiting.learn(job.age)
        if error is not None and not isinstance(error, SelfspecError):
            log.error("a request has failed", exc_info=error)
        outcome = "error" if error else str(event.finish) if event else "cancelled"
        self.metrics.ended(job, row.stats if row else None, outcome)
        if error is not None:
            event = Event(error=error)
        if event is not None:
            self._tell(job, event)

    def _tell(self, job: Job, event: Event) -> None:
        try:
            job.deliver(event)
        except RuntimeError:  # its event loop is closed: nobody will ever ask again
            job.left = True

    def _end_all(self, error: Exception) -> None:
        with self._changed:
            jobs = [*self._running.values(), *self._waiting.clear()]
        for job in jobs:
            self._end(job, error)


def _too_long(seconds: float) -> Problem:
    return Problem(
        f"the request took more than {seconds:g} s, the limit of this server; ask for fewer tokens",
        504,
        kind="timeout_error",
        code="timeout",
    )


def warm_up(llm: LLM, draft: str) -> None:
    """Make what a first request would wait for: a drafter's copies, recorded steps, threads."""
    prompt = [0] * min(40, llm.model.shape.context - 8)
    with torch.inference_mode():
        llm.generate(prompt, max_new_tokens=6, eos=[], draft=draft)
