"""The asyncio side of the worker: what a connection waits for, until it ends or is left."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Coroutine
from typing import TypeVar

from starlette.requests import Request

from .asked import Asked
from .job import Event, Job
from .worker import Worker

T = TypeVar("T")


class Tickets:
    """The jobs of one request. Made in the event loop that will hear of them."""

    def __init__(self, worker: Worker, asked: Asked) -> None:
        self._worker, self._loop = worker, asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        pairs = zip(asked.requests, asked.texts, strict=True)
        self._jobs = [
            Job(request, text, functools.partial(self._deliver, index), asked.body.priority or 0)
            for index, (request, text) in enumerate(pairs)
        ]

    def submit(self) -> None:
        """Hand all of them in, or none."""
        try:
            for job in self._jobs:
                self._worker.submit(job)
        except Exception:
            self.leave()
            raise

    def _deliver(self, index: int, event: Event) -> None:
        """In the engine's thread."""
        self._loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        """Each job's events, until all have ended. An error ends all of them."""
        left = len(self._jobs)
        while left:
            index, event = await self._events.get()
            if event.error:
                raise event.error
            yield index, event
            left -= event.last

    def leave(self) -> None:
        """Nobody waits any more. May be called at any time."""
        for job in self._jobs:
            self._worker.leave(job)


async def unless_left(request: Request, work: Coroutine[None, None, T]) -> T | None:
    """What the work brings, or None if the client has gone before."""
    task, gone = asyncio.create_task(work), asyncio.create_task(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        gone.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        continue
