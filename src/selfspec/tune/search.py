"""Which halves to leave out while drafting: the search over all 2 L of them.

`grown` needs costs and a probe only. It begins with runs of whole layers, which trained exits make
harmless together though none is alone. Each half's harm is probed; then halves are left out one
after another, each time the one among the least harmful that keeps most of what is drafted, and the
best set on the way is polished by exchanges. Optuna's samplers are in study.py. A
set is a vector z of 2 L switches, attention halves first. Knows no model.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

Halves = frozenset[int]
"""The halves that are left out: layer l's attention is l, its MLP is L + l."""
Value = Callable[[Halves], float]
"""What a set is worth, higher is better."""


@dataclass(frozen=True)
class Tried:
    """A set and what it was found to be worth."""

    halves: Halves
    value: float


def split(halves: Halves, layers: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The layers whose attention and whose MLP are left out."""
    attention = tuple(sorted(half for half in halves if half < layers))
    return attention, tuple(sorted(half - layers for half in halves if half >= layers))


def by_likeness(cosines: Sequence[float]) -> list[Halves]:
    """Sets to begin with, from how alike the stream is before and after each half: the eighth, the
    quarter and the half of them that change it least."""
    order = sorted(range(len(cosines)), key=lambda half: -cosines[half])
    counts = sorted({max(1, len(order) // part) for part in (8, 4, 2)})
    return [frozenset(order[:count]) for count in counts if count < len(order) - 1]


def runs(layers: int, ends: int = 12) -> list[Halves]:
    """Sets of layers that follow each other, left out whole, from some places to some others or to
    the end."""
    stride = -(-layers // ends)
    begins = range(stride, layers, stride)
    return [
        frozenset(half + layer for layer in range(begin, end) for half in (0, layers))
        for begin in begins
        for end in (*begins, layers)
        if begin < end
    ]


def far_apart(tried: Sequence[Tried], count: int, least: int = 4) -> list[Tried]:
    """The best sets of which each differs from those before in so many halves. What differs in
    fewer is told apart by costs and probe better than by the clock."""
    found: list[Tried] = []
    for each in sorted(tried, key=lambda each: -each.value):
        if all(len(each.halves ^ other.halves) >= least for other in found):
            found.append(each)
        if len(found) == count:
            break
    return found


def grown(
    layers: int,
    value: Value,
    kept: Value,
    until: float,
    width: int = 6,
    seed: int = 0,
    start: Sequence[Halves] = (),
) -> Iterator[Tried]:
    """Every set that was tried, with its value, until the clock says `until`.

    `kept`: how many drafts of a chain a set keeps, which is what the next half is chosen by: the
    gain itself falls before it rises. `start`: sets to look at first, found in other ways.
    """
    tried: dict[Halves, Tried] = {}

    def look(halves: Halves) -> Tried:
        if halves not in tried:
            tried[halves] = Tried(halves, value(halves))
        return tried[halves]

    def time_left() -> bool:
        return time.perf_counter() < until

    for halves in start:
        yield look(halves)
    harm: dict[int, float] = {}
    for half in range(2 * layers):
        if not time_left():
            return
        harm[half] = -kept(frozenset({half}))
        yield look(frozenset({half}))
    left_out: Halves = frozenset()
    while time_left() and len(left_out) < 2 * layers - 2:
        order = sorted((half for half in harm if half not in left_out), key=harm.__getitem__)
        offers = [left_out | {half} for half in order[:width]]
        for offer in offers:
            if not time_left():
                return
            yield look(offer)
        left_out = max(offers, key=kept)
    yield from _exchanged(2 * layers, look, tried, time_left, random.Random(seed))


def _exchanged(
    count: int,
    look: Callable[[Halves], Tried],
    tried: dict[Halves, Tried],
    time_left: Callable[[], bool],
    dice: random.Random,
) -> Iterator[Tried]:
    """Steps to neighbours of the best set: one half or layer more, one fewer, or one half for
    another."""
    while time_left():
        best = max(tried.values(), key=lambda each: each.value)
        outside = [half for half in range(count) if half not in best.halves]
        neighbours = [best.halves | {half} for half in outside]
        neighbours += [best.halves - {half} for half in best.halves if len(best.halves) > 1]
        neighbours += [best.halves - {a} | {b} for a in best.halves for b in outside]
        layers = [frozenset({layer, layer + count // 2}) for layer in range(count // 2)]
        neighbours += [best.halves | layer for layer in layers]
        neighbours += [best.halves - layer for layer in layers if best.halves > layer]
        fresh = [each for each in neighbours if each not in tried and len(each) < count - 1]
        if not fresh:
            return
        yield look(dice.choice(fresh))
