"""How close our engine comes to what this machine allows: whole steps, their products alone, and
passes over n tokens.

Does not know peers or tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from benchmarks.plain.results import CostCard, VerifyPoint
from selfspec.bench.costs import Passes
from selfspec.bench.meters import read_bandwidth
from selfspec.bench.timing import interleave
from selfspec.model.layered import LayeredModel
from selfspec.model.measuring import product_seconds, weight_bytes

CARD_CONTEXT = 64


Tick = Callable[[str], None]


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
