"""A streak: rounds of one row that our kernels run by themselves, one after the other, while nobody
drafts, or a drafter that only looks up drafts as much as before. Between two passes that read all
of a model a round in Python takes longer to be fetched than to run, so the engine writes several
down at once.

The rounds are those that the engine would have run. Knows neither what is kept of them nor what is
learned.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..core.contract import Budget
from ..model.compute.cache import KVCache
from ..model.compute.cpu.rounds import Asked, Round, fits, run_rounds
from ..model.layered import LayeredModel
from .group import Group
from .row import Row

# No round begins that long after the first: whoever reads a stream sees its rounds together, and
# who asks for something else waits for their end.
SECONDS = 0.06
PLAIN = 16  # rounds of a row without a drafter, at most


def streak(model: LayeredModel, cache: KVCache, group: Group | None, row: Row) -> Sequence[Round]:
    """The next rounds of a row that is alone: as many as its drafter rests, or as its budget stands
    for. None: Python has a say in the next one."""
    request, whole = row.request, model.at_once
    if not request.sampler.plain or request.logprobs is not None or not fits(whole, cache):
        return ()
    if model.of_tokens is not None or model.chains_only:
        return ()
    lookups, budget, rounds = None, Budget([0]), group.rests if group else PLAIN
    if group and not rounds:
        budget = group.plan([row], 0)
        lookups, rounds = group.streak(row)
        if lookups is None or not any(budget.tokens):
            return ()
    asked = Asked(
        text=row.tokens,
        room=row.state.room,
        ends=request.eos,
        most=budget.tokens[0],
        price=budget.price,
        ranks=group.session.ranks if group else 1,
        rounds=rounds,
        seconds=SECONDS,
        angles=min((len(rope.cosines) for rope in model.ropes), default=cache.capacity),
    )
    return run_rounds(whole, model.full_plan, cache, row.slot, lookups, asked)
