"""What this machine allows and how close our engine comes: memory bandwidth, the products alone,
and passes over n tokens.

One token must read every weight once, so weight bytes over bandwidth is a floor that no plain
decoding can go under. Knows our engine's `LayeredModel`; does not know peers or tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from ..model.measuring import product_seconds, weight_bytes
from .schema import CostCard, VerifyPoint
from .timing import Contestant, interleave, timed

if TYPE_CHECKING:
    from ..model.layered import LayeredModel

SMALLEST_BUFFER = (
    256 * 2**20
)  # well beyond a last-level cache, else it is the cache that is measured
LARGEST_BUFFER = 2**30
CARD_CONTEXT = 64
Tick = Callable[[str], None]


def read_bandwidth(size: int, repetitions: int = 7) -> dict[str, list[float]]:
    """Bytes a second at which memory can be read with torch's present number of threads, measured
    in three ways.

    No single way reaches the limit on every machine: a sum may be bound by its additions, a
    matrix-vector product by its kernel. What is wanted is the most the memory can do, so a reader
    takes the best of all. The buffer is about as large as the weights are.
    """
    values = min(max(size, SMALLEST_BUFFER), LARGEST_BUFFER) // 4
    buffer = torch.ones(values // 1024, 1024)
    vector = torch.ones(1024)
    flat = buffer.view(-1)
    ways: dict[str, Callable[[], object]] = {
        "sum": lambda: flat.sum(),
        "dot": lambda: torch.dot(flat, flat),
        "matrix-vector": lambda: torch.mv(buffer, vector),
    }
    seconds = interleave({name: timed(way) for name, way in ways.items()}, repetitions)
    return {name: [buffer.numel() * 4 / value for value in seconds.of(name)] for name in ways}


class Passes:
    """Our engine with `context` tokens in its cache, ready to run passes over 1..n more and to
    forget them again."""

    def __init__(self, model: LayeredModel, ids: Sequence[int], context: int, longest: int) -> None:
        self.model, self.context = model, context
        self.cache = model.new_cache(rows=1, capacity=context + longest + 1)
        model.prefill([list(ids[:context])], self.cache)
        self.following = torch.tensor(list(ids[context : context + longest]))

    def run(self, tokens: int) -> None:
        """One pass with logits of every token; the cache is as before afterwards."""
        place = self.cache.layout([tokens])
        self.model.forward(self.following[:tokens], self.cache, place)
        self.cache.rollback(0, self.context)

    def contestant(self, tokens: int) -> Contestant:
        return timed(lambda: self.run(tokens))


def cost_card(
    model: LayeredModel, ids: Sequence[int], rounds: int, on_turn: Tick | None = None
) -> CostCard:
    """Bandwidth first, then whole steps and their products alone in turns, at a short context where
    attention costs little."""
    bandwidth = read_bandwidth(weight_bytes(model))
    passes = Passes(model, ids, CARD_CONTEXT, 1)
    seconds = interleave(
        {"step": passes.contestant(1), "products": lambda: product_seconds(model)},
        rounds,
        warmup=2,
        on_turn=on_turn,
    )
    return CostCard(
        weight_bytes=weight_bytes(model),
        bandwidth=bandwidth,
        products=seconds.of("products"),
        step=seconds.of("step"),
        context=CARD_CONTEXT,
    )


def verify_curve(
    model: LayeredModel,
    ids: Sequence[int],
    contexts: Sequence[int],
    tokens: Sequence[int],
    rounds: int,
    on_turn: Tick | None = None,
) -> Iterator[list[VerifyPoint]]:
    """Passes over n tokens behind each context, every n in turn within a round; one list of points
    a context."""
    for context in contexts:
        passes = Passes(model, ids, context, max(tokens))
        contestants = {str(count): passes.contestant(count) for count in tokens}
        seconds = interleave(contestants, rounds, warmup=2, on_turn=on_turn)
        yield [VerifyPoint(context, count, seconds.seconds[str(count)]) for count in tokens]
