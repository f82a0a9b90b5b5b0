"""What the parts of a pass cost on this machine: halves, head, and what no part explains.

Measured in under a minute, by passes of all attention halves alone, all MLP halves alone and both,
over cache entries that nobody computed. From these the cost of any plan follows, in any batch:

    pass = fixed + halves(MLP) * m(tokens) + halves(attention) * (p(tokens) + rows * s)

where `tokens` are those of all rows, and s is what looking back adds for each row. It depends on
the context, on the row's new tokens, and on how many rows there are: a lone token's heads are
shared out among the threads, and each then reads the same keys again. Knows no drafter.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import NamedTuple

import torch

from ..model.compute.cache import KVCache, RowSpan
from ..model.compute.plan import LayerPlan
from ..model.layered import LayeredModel

TOKENS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256)  # in a pass
LOOKS = ((1, 1), (1, 8), (1, 32), (2, 1), (2, 8), (4, 1), (4, 8))  # (rows, tokens of a row)
MOST_ROWS = 4
BUSY = 1.3  # a spread above this is other work's
LEAST = 3  # times that each is run
MOST_BYTES = 1 << 30  # of a cache that is only measured with
CONTEXTS = (64, 512, 2048, 4096)
CHECKS = ((1, 3, 256), (1, 10, 1024), (2, 5, 512), (3, 4, 2048), (4, 8, 256), (8, 2, 1024))
"""(rows, tokens of a row, context) at which a prediction is compared with a measured pass."""


@dataclass(frozen=True)
class Line:
    """Seconds by size, linear between what was measured and beyond it."""

    seconds: dict[str, float]  # by size, as text: that is how JSON keeps it

    def __call__(self, size: float) -> float:
        known = sorted((int(key), value) for key, value in self.seconds.items())
        if len(known) == 1:
            return known[0][1] * size / known[0][0]
        at = min(max(1, bisect_left(known, (size, 0.0))), len(known) - 1)
        (low, below), (high, above) = known[at - 1], known[at]
        return max(0.0, below + (above - below) * (size - low) / (high - low))


@dataclass(frozen=True)
class Steps:
    """The parts of a pass, each with its seconds."""

    mlp: Line
    """One MLP half, by tokens of all rows."""
    attention: Line
    """One attention half without looking back, by tokens of all rows."""
    looking: dict[str, dict[str, Line]]
    """What looking back adds for one row: by the number of rows, its new tokens, the context."""
    head: Line
    """The head, by tokens."""
    fixed: float
    """What a pass takes beside its halves and its head."""
    errors: list[float] = field(default_factory=list)
    """Predicted over measured whole passes, less 1."""
    spread: float = 1.0
    """The median time of a part over its shortest, in the median of all parts."""

    @property
    def busy(self) -> bool:
        """Whether times were so uneven that something else must have run."""
        return self.spread > BUSY

    def pass_seconds(
        self, halves: tuple[float, float], rows: int, tokens: float, context: float, scored: float
    ) -> float:
        """A pass of (attention, MLP) halves over `tokens` new tokens a row, `scored` of which go
        through the head, each row behind `context` others."""
        attention, mlp = halves
        seconds = self.fixed + mlp * self.mlp(rows * tokens)
        seconds += attention * (
            self.attention(rows * tokens) + rows * self._look(rows, tokens, context)
        )
        return seconds + (self.head(scored) if scored else 0.0)

    def _look(self, rows: int, tokens: float, context: float) -> float:
        """For one row of so many. More rows than were measured share as those did."""
        by_rows = {
            count: Line({new: line(context) for new, line in lines.items()})(tokens)
            for count, lines in self.looking.items()
        }
        most = max(map(int, by_rows))
        return Line(by_rows)(min(rows, most)) if len(by_rows) > 1 else by_rows[str(most)]


Work = Callable[[], object]


def made_up_cache(model: LayeredModel, rows: int, context: int, room: int) -> KVCache:
    """Room for so many more tokens behind `context` entries that nobody computed. They are written
    once: memory that never was is read as one page of zeros, much faster than what is there."""
    cache = model.new_cache(rows, context + room)
    for entries in (cache.keys, cache.values):
        entries.fill_(0.01)
    cache.assume(context)
    return cache


class Bench:
    """Passes over a cache that nobody computed."""

    def __init__(self, model: LayeredModel, rows: int, context: int, room: int) -> None:
        self.model, self._context = model, context
        self.cache = made_up_cache(model, rows, context, room)

    def run(self, plan: LayerPlan, rows: int, tokens: int) -> Work:
        """`tokens` more of each of some rows, forgotten again."""
        spans = [RowSpan(row, self._context, tokens) for row in range(rows)]
        layout = self.cache.layout_at(spans)
        x = self.model.embed(torch.arange(rows * tokens, device=self.model.device) + 1)

        def work() -> None:
            self.model.run(x, plan, self.cache, layout)
            self.model.wait()
            for row in range(rows):
                self.cache.rollback(row, self._context)

        return work

    def scored(self, plan: LayerPlan, rows: int, tokens: int) -> Work:
        """The same with the head."""
        run, head = self.run(plan, rows, tokens), _head(self.model, rows * tokens)

        def work() -> None:
            run()
            head()

        return work


@torch.inference_mode()
def seconds_of(work: Work) -> float:
    """What it takes once."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class Size(NamedTuple):
    """What is timed: a part of the model over some rows."""

    part: str
    rows: int
    tokens: int
    """Of a row."""
    context: int


class Parts:
    """A model's parts, timed in turns for as long as somebody likes."""

    @torch.inference_mode()
    def __init__(self, model: LayeredModel, works: Iterable[tuple[Size, Work]] = ()) -> None:
        self._model, self._works = model, dict(works or _works(model))
        self._times: dict[Size, list[float]] = {size: [] for size in self._works}
        self._spent = dict.fromkeys(self._works, 0.0)
        for work in self._works.values():
            work()

    def turn(self) -> None:
        """Each once."""
        for size in self._works:
            self._time(size)

    def next(self) -> None:
        """The one with the least time so far: all get the same time, short ones more turns."""
        few = [size for size, taken in self._times.items() if len(taken) < LEAST]
        self._time(min(few or self._works, key=self._spent.__getitem__))

    def _time(self, size: Size) -> None:
        self._times[size].append(seconds_of(self._works[size]))
        self._spent[size] += self._times[size][-1]

    @property
    def enough(self) -> bool:
        """Whether each was timed often enough to say anything."""
        return min(map(len, self._times.values())) >= LEAST

    def run(self, seconds: float, tick: Callable[[float], None] = lambda share: None) -> None:
        """For about so long, in turns. `tick` is told the share that is done."""
        begin = time.perf_counter()
        while (spent := time.perf_counter() - begin) < seconds or not self.enough:
            self.next()
            tick(min(1.0, spent / seconds) if seconds else 1.0)

    @property
    def spread(self) -> float:
        return median(median(taken) / min(taken) for taken in self._times.values())

    @property
    def found(self) -> dict[Size, float]:
        """What each takes while nothing else runs, by all turns so far."""
        return _settled(self._times)

    @property
    def steps(self) -> Steps:
        """What they take, by all turns so far."""
        return replace(_steps(self._model, self.found), spread=self.spread)


def measure(
    model: LayeredModel, seconds: float = 30.0, tick: Callable[[float], None] = lambda share: None
) -> Steps:
    """Measure the parts, in turns, for about so long. `tick` is told the share that is done."""
    parts = Parts(model)
    parts.run(seconds, tick)
    return parts.steps


def compared(model: LayeredModel, steps: Steps, seconds: float) -> Steps:
    """The same parts beside whole passes of now: `errors` and `spread` are of these."""
    works = list(_checks(model))
    if not works:
        return replace(steps, errors=[])
    parts = Parts(model, works)
    parts.run(seconds)
    return replace(steps, errors=_errors(model, steps, parts.found), spread=parts.spread)


def measure_quietly(
    model: LayeredModel, seconds: float, tick: Callable[[float], None] = lambda share: None
) -> Steps:
    """The same, once more if something else ran meanwhile: the quieter of the two."""
    first = measure(model, seconds, tick)
    if not first.busy:
        return first
    return min(first, measure(model, seconds, tick), key=lambda steps: steps.spread)


def _works(model: LayeredModel) -> Iterator[tuple[Size, Work]]:
    """Everything that is timed."""
    everything = range(model.layers)
    plans = {
        "attention": LayerPlan.skipping(model.layers, (), everything),
        "mlp": LayerPlan.skipping(model.layers, everything, ()),
        "both": model.full_plan,
    }
    room = model.shape.context
    contexts = fitting(CONTEXTS, room - max(tokens for _, tokens in LOOKS))
    least = contexts[0]
    counts = [count for count in TOKENS if count < room - least]
    bench = Bench(model, 1, least, max(counts))
    for count in counts:
        for part in ("mlp", "attention"):
            yield Size(part, 1, count, least), bench.run(plans[part], 1, count)
        yield Size("head", 1, count, 0), _head(model, count)
    yield Size("both", 1, 1, least), bench.run(plans["both"], 1, 1)
    for context in contexts[1:]:
        most = max(1, min(MOST_ROWS, MOST_BYTES // max(1, cache_bytes(model, context))))
        bench = Bench(model, most, context, max(tokens for _, tokens in LOOKS))
        for rows, tokens in LOOKS:
            if rows <= most:
                size = Size("attention", rows, tokens, context)
                yield size, bench.run(plans["attention"], rows, tokens)
    yield from _checks(model)


def _checks(model: LayeredModel) -> Iterator[tuple[Size, Work]]:
    """Whole passes, at which predictions are compared."""
    for rows, tokens, context in checks(model):
        bench = Bench(model, rows, context, tokens)
        yield Size("check", rows, tokens, context), bench.run(model.full_plan, rows, tokens)


def _head(model: LayeredModel, count: int) -> Work:
    x = model.embed(torch.arange(count, device=model.device) + 1)

    def work() -> None:
        model.head(x)
        model.wait()

    return work


def fitting(contexts: Sequence[int], room: int) -> list[int]:
    """Those contexts that a model has room for, one at least."""
    return [context for context in contexts if context <= room] or [max(1, room // 2)]


def cache_bytes(model: LayeredModel, context: int) -> int:
    """Of one row's keys and values."""
    shape = model.shape
    return 8 * context * shape.layers * shape.kv_heads * shape.head_size


def checks(model: LayeredModel) -> list[tuple[int, int, int]]:
    """Where predictions are compared."""
    return [
        (rows, tokens, context)
        for rows, tokens, context in CHECKS
        if tokens + context <= model.shape.context
        and rows * cache_bytes(model, context) <= MOST_BYTES
    ]


def undisturbed(times: Sequence[float]) -> float:
    """What it takes while nothing else runs: the lower quartile, since other work only adds."""
    return sorted(times)[len(times) // 4]


def _settled(times: Mapping[Size, Sequence[float]]) -> dict[Size, float]:
    """What each takes while nothing else runs. More tokens never take less, so no size takes longer
    than a larger one of its kind."""
    low = {size: undisturbed(taken) for size, taken in times.items()}
    return {
        size: min(
            seconds
            for other, seconds in low.items()
            if (other.part, other.rows, other.context) == (size.part, size.rows, size.context)
            and other.tokens >= size.tokens
        )
        for size in low
    }


def _steps(model: LayeredModel, found: Mapping[Size, float]) -> Steps:
    """Parts from whole passes. A pass of one kind of halves has the fixed part in it as well."""
    layers = model.layers
    least = min(size.context for size in found if size.part == "attention")
    one = {part: found[Size(part, 1, 1, least)] for part in ("attention", "mlp", "both")}
    fixed = max(0.0, one["attention"] + one["mlp"] - one["both"])

    def line(part: str) -> Line:
        near = {size: s for size, s in found.items() if (size.part, size.context) == (part, least)}
        halves = {str(size.tokens): max(0.0, s - fixed) / layers for size, s in near.items()}
        return Line(halves)

    attention = line("attention")
    looking: dict[str, dict[str, dict[str, float]]] = {}
    for size, seconds in found.items():
        if size.part == "attention" and (size.rows, size.tokens) in LOOKS:
            here = attention(size.rows * size.tokens)
            added = max(0.0, (seconds - fixed) / layers - here) / size.rows
            lines = looking.setdefault(str(size.rows), {}).setdefault(str(size.tokens), {})
            lines[str(size.context)] = added
    steps = Steps(
        line("mlp"),
        attention,
        {
            rows: {tokens: Line({str(least): 0.0, **by}) for tokens, by in lines.items()}
            for rows, lines in looking.items()
        },
        Line({str(size.tokens): s for size, s in found.items() if size.part == "head"}),
        fixed,
    )
    return replace(steps, errors=_errors(model, steps, found))


def _errors(model: LayeredModel, steps: Steps, found: Mapping[Size, float]) -> list[float]:
    """Predicted over measured whole passes, less 1."""
    whole = model.layers, model.layers
    return [
        steps.pass_seconds(whole, size.rows, size.tokens, size.context, 0) / seconds - 1
        for size, seconds in found.items()
        if size.part == "check"
    ]
