"""Jobs that wait for a row: by priority, then in the order of arrival. Knows no threads."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from typing import TypeVar

from .job import Job
from .settings import Limits

T = TypeVar("T")
PATIENCE = 10.0  # seconds of waiting that weigh as much as one step of priority
FIRST_GUESS = 5.0  # seconds that a request takes, while none has ended
FADING = 0.9


class Waiting:
    """The queue. A lower number is served first, as in other servers; who waits rises."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._jobs: list[Job] = []
        self._takes = FIRST_GUESS

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, job: Job) -> None:
        # all rise at the same speed, so their order never changes
        insort(self._jobs, job, key=lambda each: each.arrived + PATIENCE * each.priority)

    def take(self, place: Callable[[Job], T | None]) -> tuple[Job, T] | None:
        """The first job that has a place now, with its place."""
        for at, job in enumerate(self._jobs):
            found = place(job)
            if found is not None:
                del self._jobs[at]
                return job, found
        return None

    def tidied(self) -> tuple[list[Job], list[Job]]:
        """Take out those whom nobody waits for, and those who have waited too long."""
        gone = [job for job in self._jobs if job.left]
        late = [job for job in self._jobs if not job.left and job.age > self._limits.queue_seconds]
        if gone or late:
            self._jobs = [job for job in self._jobs if job not in gone and job not in late]
        return gone, late

    def clear(self) -> list[Job]:
        jobs, self._jobs = self._jobs, []
        return jobs

    def learn(self, seconds: float) -> None:
        """A request took so long, from its arrival to its end."""
        self._takes = FADING * self._takes + (1 - FADING) * seconds

    def expected(self, running: int) -> float:
        """Seconds until about half of the queue is through."""
        return self._takes * (1 + len(self._jobs) / 2) / max(1, running)
