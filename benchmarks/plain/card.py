"""How close our engine comes to what this machine allows: whole steps, their products alone, and
passes over n tokens.

Does not know peers or tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from benchmarks.plain.results import CostCard, VerifyPoint
from selfspec.bench.costs import Passes
from selfspec.bench.meters import ways_to_read
from selfspec.bench.timing import interleave
from selfspec.model.layered import LayeredModel
from selfspec.model.measuring import product_seconds, weight_bytes

CARD_CONTEXT = 64
CARD_TURNS = 5  # in a round: a step, its products, three ways to read


Tick = Callable[[str], None]


def cost_card(
    model: LayeredModel, ids: Sequence[int], rounds: int, on_turn: Tick | None = None
) -> CostCard:
    """Whole steps, their products alone and reading as many bytes, in turns: how fast memory is
    changes within seconds. At a short context, where attention costs little."""
    count, ways = ways_to_read(weight_bytes(model))
    passes = Passes(model, ids, CARD_CONTEXT, 1)
    seconds = interleave(
        {"step": passes.contestant(1), "products": lambda: product_seconds(model), **ways},
        rounds,
        warmup=2,
        on_turn=on_turn,
    )
    return CostCard(
        weight_bytes=weight_bytes(model),
        bandwidth={way: [count / each for each in seconds.of(way)] for way in ways},
        in_turns=True,
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
