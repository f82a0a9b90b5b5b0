"""What an operator may set, with the limits that keep a server alive. Knows no web framework."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from ..core.door import is_finite, is_whole
from ..errors import OptionError, ResourceError
from ..model.layered import LayeredModel

SHARE = 0.5  # of the free memory, for keys and values, where nobody says how much

DRAFTS = (
    "auto", "none", "cosine", "early-exit", "hybrid", "jacobi", "kv-subset", "layer-skip", "ngram",
    "quantised", "recycle",
)  # fmt: skip
"""Drafters that a request may name: those that need nothing but the model."""


@dataclass(frozen=True)
class Limits:
    """How much a server takes on. What is beyond them is refused before anything is computed."""

    rows: int = 16
    """Requests that are worked on at the same time."""
    context: int | None = None
    """Most tokens of one request, prompt and answer. Without it the model's context, or as much of
    it as half of the free memory holds."""
    queue: int = 64
    """Requests that may wait for a row. One more is answered 429."""
    queue_seconds: float = 60.0
    """How long a request may wait. Then it is answered 429."""
    seconds: float = 600.0
    """How long a request may take in all. Then it is ended."""
    body: int = 4_000_000
    """Most bytes of a request's body."""
    choices: int = 16
    """Most answers to one request: prompts times n."""
    drain_seconds: float = 60.0
    """How long running requests may go on once the server is told to end."""

    def __post_init__(self) -> None:
        for name in ("rows", "queue", "body", "choices", "context"):
            value = getattr(self, name)
            if value is not None and not (is_whole(value) and value >= 1):
                raise OptionError(f"{name}={value!r} would let nothing through; use 1 or more")
        for name in ("queue_seconds", "seconds", "drain_seconds"):
            value = getattr(self, name)
            if not (is_finite(value) and value > 0):
                raise OptionError(f"{name}={value!r} is no time to work in; use more than 0")


@dataclass(frozen=True)
class Settings:
    """All that a server is told."""

    limits: Limits = Limits()
    keys: Sequence[str] = ()
    """Keys of which a request must bring one. Without any, everybody is served."""
    origins: Sequence[str] = ()
    """Web pages' origins that may call (CORS). Without any, no other page may."""
    draft: str = "auto"
    """The drafter of requests that name none."""
    name: str | None = None
    """What the model is called. Without it, what it was loaded as."""


def context_for(model: LayeredModel, limits: Limits, free: int | None = None) -> int:
    """Tokens for which every row has room in the cache, from the start on."""
    shape, rows = model.shape, limits.rows
    if limits.context is not None and limits.context > shape.context:
        raise OptionError(
            f"context={limits.context} is more than the model's {shape.context}, where its answers "
            "end; use at most that"
        )
    each = model.new_cache(1, 1).bytes // model.new_cache(1, 1).capacity  # bytes of a token
    free = psutil.virtual_memory().available if free is None else free
    fitting = int(SHARE * free) // (each * rows)
    asked = limits.context or shape.context
    if limits.context is not None and each * rows * asked > free:
        raise ResourceError(
            f"keys and values for {rows} rows of {asked} tokens take "
            f"{each * rows * asked / 1e9:.2f} GB and {free / 1e9:.2f} GB are free; use fewer rows, "
            f"or a context of {free // (each * rows)}"
        )
    if limits.context is None and fitting < min(256, shape.context):
        raise ResourceError(
            f"{rows} rows would have room for {fitting} tokens each in half of the "
            f"{free / 1e9:.2f} GB that are free; use fewer rows, or free some memory"
        )
    return asked if limits.context is not None else min(shape.context, fitting)
