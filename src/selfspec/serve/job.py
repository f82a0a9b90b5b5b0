"""A request at the worker, and what it is told while it is worked on. Plain values."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from ..core.contract import FinishReason, RowStep, Stats
from ..core.logprobs import TokenLogprob
from ..core.text_stream import RowText
from ..engine.row import Request, Row


@dataclass(frozen=True)
class Event:
    """What a request is told: that it has begun (nothing in it), what a round brought, its end."""

    text: str = ""
    step: RowStep | None = None
    stats: Stats | None = None
    """At the end."""
    error: Exception | None = None
    """Instead of an end."""

    @property
    def tokens(self) -> list[int]:
        return list(self.step.tokens) if self.step else []

    @property
    def logprobs(self) -> list[TokenLogprob]:
        return list(self.step.logprobs) if self.step else []

    @property
    def finish(self) -> FinishReason | None:
        return self.step.finish_reason if self.step else None

    @property
    def last(self) -> bool:
        return self.finish is not None or self.error is not None


class Job:
    """One request at the worker. `deliver` is called in the engine's thread."""

    def __init__(
        self, request: Request, text: RowText, deliver: Callable[[Event], None], priority: int = 0
    ) -> None:
        self.request, self.text, self.deliver, self.priority = request, text, deliver, priority
        self.arrived = time.monotonic()
        self.row: Row | None = None
        self.left = False  # nobody waits for it any more
        self.last: float | None = None  # when its last tokens came

    @property
    def age(self) -> float:
        return time.monotonic() - self.arrived
