"""What the parts of a pass cost on this machine: halves, head, and what no part explains.

Measured in under a minute, by passes of all attention halves alone, all MLP halves alone and both,
over cache entries that nobody computed. From these the cost of any plan follows, in any batch:

    pass = fixed + halves(MLP) * m(tokens) + halves(attention) * (p(tokens) + rows * s(t, context))

where `tokens` are those of all rows and s is what looking at `context` entries adds for a row with
t of them. Knows no drafter.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch

from ..model.compute.cache import KVCache, RowSpan
from ..model.compute.plan import LayerPlan
from ..model.layered import LayeredModel

TOKENS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 64, 128)  # in a pass
ROW_TOKENS = (1, 8, 32)
CONTEXTS = (64, 512, 2048, 4096)
CHECKS = ((1, 3, 256), (1, 10, 1024), (2, 5, 512), (4, 8, 256), (8, 2, 1024))
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
    looking: dict[str, Line]
    """What looking back adds for one row: by its new tokens, then by context."""
    head: Line
    """The head, by tokens."""
    fixed: float
    """What a pass takes beside its halves and its head."""
    errors: list[float] = field(default_factory=list)
    """Predicted over measured whole passes, less 1."""

    def pass_seconds(
        self, halves: tuple[float, float], rows: int, tokens: float, context: float, scored: float
    ) -> float:
        """A pass of (attention, MLP) halves over `tokens` new tokens a row, `scored` of which go
        through the head, each row behind `context` others."""
        attention, mlp = halves
        seconds = self.fixed + mlp * self.mlp(rows * tokens)
        seconds += attention * (self.attention(rows * tokens) + rows * self._look(tokens, context))
        return seconds + (self.head(scored) if scored else 0.0)

    def _look(self, tokens: float, context: float) -> float:
        return Line({count: line(context) for count, line in self.looking.items()})(tokens)


Work = Callable[[], object]


class Bench:
    """Passes over a cache that nobody computed."""

    def __init__(self, model: LayeredModel, rows: int, context: int, room: int) -> None:
        self.model, self._context = model, context
        self.cache: KVCache = model.new_cache(rows, context + room)
        self.cache.assume(context)

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


@torch.inference_mode()
def measure(
    model: LayeredModel, seconds: float = 30.0, tick: Callable[[float], None] = lambda share: None
) -> Steps:
    """Measure the parts, in turns, for about so long. `tick` is told the share that is done."""
    works = dict(_works(model))
    for work in works.values():
        work()
    times: dict[tuple[str, int, int], list[float]] = {key: [] for key in works}
    end = time.perf_counter() + seconds
    begin, turns = time.perf_counter(), 0
    while turns < 3 or time.perf_counter() < end:
        for key, work in works.items():
            start = time.perf_counter()
            work()
            times[key].append(time.perf_counter() - start)
            tick(min(1.0, (time.perf_counter() - begin) / seconds))
            if turns >= 3 and time.perf_counter() > end:
                break
        turns += 1
    found = {key: median(taken) for key, taken in times.items()}
    return _steps(model, found)


def _works(model: LayeredModel) -> Iterator[tuple[tuple[str, int, int], Work]]:
    """What is timed: (part, tokens, context)."""
    everything = range(model.layers)
    plans = {
        "attention": LayerPlan.skipping(model.layers, (), everything),
        "mlp": LayerPlan.skipping(model.layers, everything, ()),
        "both": model.full_plan,
    }
    room = model.shape.context
    contexts = fitting(CONTEXTS, room - max(ROW_TOKENS))
    least = contexts[0]
    counts = [count for count in TOKENS if count < room - least]
    bench = Bench(model, 1, least, max(counts))
    for count in counts:
        yield ("mlp", count, least), bench.run(plans["mlp"], 1, count)
        yield ("attention", count, least), bench.run(plans["attention"], 1, count)
        yield ("head", count, 0), _head(model, count)
    yield ("both", 1, least), bench.run(plans["both"], 1, 1)
    for context in contexts[1:]:
        bench = Bench(model, 1, context, max(ROW_TOKENS))
        for count in ROW_TOKENS:
            yield ("attention", count, context), bench.run(plans["attention"], 1, count)
    for rows, count, context in checks(model):
        bench = Bench(model, rows, context, count)
        yield (f"check {rows}", count, context), bench.run(plans["both"], rows, count)


def _head(model: LayeredModel, count: int) -> Work:
    x = model.embed(torch.arange(count, device=model.device) + 1)

    def work() -> None:
        model.head(x)
        model.wait()

    return work


def fitting(contexts: Sequence[int], room: int) -> list[int]:
    """Those contexts that a model has room for, one at least."""
    return [context for context in contexts if context <= room] or [max(1, room // 2)]


def checks(model: LayeredModel) -> list[tuple[int, int, int]]:
    """Where predictions are compared."""
    return [each for each in CHECKS if each[1] + each[2] <= model.shape.context]


def _steps(model: LayeredModel, found: Mapping[tuple[str, int, int], float]) -> Steps:
    """Parts from whole passes. A pass of one kind of halves has the fixed part in it as well."""
    layers = model.layers
    least = min(context for part, _, context in found if part == "attention")
    one = {part: found[part, 1, least] for part in ("attention", "mlp", "both")}
    fixed = max(0.0, one["attention"] + one["mlp"] - one["both"])

    def line(part: str) -> dict[int, float]:
        sizes = {count: s for (name, count, at), s in found.items() if (name, at) == (part, least)}
        return {count: max(0.0, seconds - fixed) / layers for count, seconds in sizes.items()}

    attention = line("attention")
    looking: dict[str, dict[str, float]] = {}
    for (name, count, context), seconds in found.items():
        if name == "attention" and count in ROW_TOKENS:
            near = attention[count] if count in attention else Line(_keyed(attention))(count)
            added = max(0.0, (seconds - fixed) / layers - near)
            looking.setdefault(str(count), {})[str(context)] = added
    steps = Steps(
        Line(_keyed(line("mlp"))),
        Line(_keyed(attention)),
        {count: Line(by) for count, by in looking.items()},
        Line({str(count): s for (name, count, _), s in found.items() if name == "head"}),
        fixed,
    )
    for (name, count, context), seconds in found.items():
        if name.startswith("check"):
            rows = int(name.split()[1])
            predicted = steps.pass_seconds((layers, layers), rows, count, context, 0)
            steps.errors.append(predicted / seconds - 1)
    return steps


def _keyed(values: Mapping[int, float]) -> dict[str, float]:
    return {str(size): value for size, value in values.items()}
