"""A draft's next tokens by the row's own sampler: chosen outright, or drawn at random together with
what they were drawn from.

Drawn ones have numbers that belong to the round. A draft that was discarded has been seen, so
whoever decides how much to draft could bias the text if a later round drew with the same numbers. A
round is known by the length of its text when it began, since every round adds a token.

Where no token can be chosen there is none, and the draft ends: a logits processor may leave nothing
that a drafter can say, or fail. Verification asks it again, of the model's own logits, and only
that may fail a request. Knows no drafter.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .randomness import DRAFT, key
from .sampling import Sampler
from .tree import Contexts


def chosen_at_nodes(
    sampler: Sampler, logits: Tensor, contexts: Contexts
) -> tuple[Tensor, dict[int, Exception]]:
    """The token after every node of a tree, (nodes,), by logits (nodes, vocab). Where none can be
    chosen it is the likeliest, and what was raised is said by node."""
    try:
        return sampler.choose(logits, contexts, contexts.lengths), {}
    except Exception as error:  # noqa: BLE001  (a user's processor may raise anything)
        failures = {0: error}
    choices = logits.argmax(-1)
    if len(logits) == 1:
        return choices, failures
    failures = {}
    for node, context in enumerate(contexts):
        try:
            choices[node] = sampler.choose(logits[node : node + 1], [context], [len(context)])[0]
        except Exception as error:  # noqa: BLE001
            failures[node] = error
    return choices, failures


def chosen(sampler: Sampler, row: Tensor, context: Sequence[int]) -> int | None:
    """The token for a context that has the best chance to equal the model's own. `row`: the draft's
    logits, (vocab,)."""
    try:
        return int(sampler.choose(row[None], [context], [len(context)]))
    except Exception:  # noqa: BLE001  (a user's processor may raise anything)
        return None


def drawn(
    sampler: Sampler,
    row: Tensor,
    context: Sequence[int],
    begin: int,
    branch: int = 0,
    count: int = 1,
) -> list[tuple[int, Tensor]]:
    """Up to `count` different tokens to follow a context, drawn one after the other, each with the
    distribution it was drawn from, (vocab,) float32: without those before it.

    `begin`: the text's length when the round began. `branch`: which node of a tree is followed, so
    that nodes of equal depth draw on their own.
    """
    times = key(sampler.seed, len(context), DRAFT, begin, branch)
    try:
        q = sampler.probabilities(row[None], [context])[0]
        tokens = sampler.first(row, context, times, count)
    except Exception:  # noqa: BLE001  (a user's processor may raise anything)
        return []
    drawn: list[tuple[int, Tensor]] = []
    for token in tokens:
        if drawn:  # those before it cannot come again
            q = q.clone()
            q[drawn[-1][0]] = 0
            q /= q.sum()
        if not q[token] > 0:  # too unlikely for float32
            break
        drawn.append((token, q))
    return drawn
