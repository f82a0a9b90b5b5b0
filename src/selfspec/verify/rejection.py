"""Verification of drafts that were drawn from a distribution q: speculative sampling, exact for
any p and q.

A draft x ~ q is accepted with probability min(1, p(x) / q(x)). After a rejection the token comes
from the residual norm(max(p - q, 0)), after the last draft from p itself (Leviathan et al. 2023,
algorithm 1; Chen et al. 2023, algorithm 2). In a tree the children of a node are tried in the order
in which they were drawn, and each rejection turns p into the residual against which the next
sibling is tested (SpecInfer, Miao et al. 2023, algorithm 2). A sibling's q may depend on the
siblings before it, so drawing without replacement is exact too if q says so.

The kept tokens have the distribution of plain sampling, but are not those that plain sampling draws
with the same seed. Does not know models, logits, temperature or seeds: p and q come from
`Sampler.probabilities`, random numbers from a `Dice`.

Callers must keep siblings in the order in which they were drawn, drop none because of its token,
and let q depend on no number that is still to be used. For that last reason the choices off the
accepted path are argmaxes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from ..core.randomness import ACCEPT, REMAINDER, invert
from ..core.tree import Tree

# (depth below the kept text, stream) -> a number in [0, 1), the same at every call
Dice = Callable[[int, int], float]


def residual(p: Tensor, q: Tensor) -> Tensor:
    """norm(max(p - q, 0)), (vocab,): what is left of p after a token from q was rejected."""
    left = (p - q).clamp_(min=0)
    total = left.sum()
    # no total: p = q up to rounding, and at most one draw in 2**53 is rejected
    return left / total if total > 0 else p


def accepted(p: Tensor, q: Tensor, token: int, number: float) -> bool:
    """Whether to keep a token drawn from q: with probability min(1, p / q)."""
    assert q[token] > 0, "a draft was drawn from the distribution that came with it"
    return bool(number * q[token] < p[token])


def verified(
    tree: Tree, p: Tensor, q: Sequence[Tensor | None], dice: Dice
) -> tuple[list[int], list[int]]:
    """The nodes to keep, from the root on, and what the target chooses after every node.

    p is (nodes, vocab), the target's distribution after each node. A node's token was drawn from
    q[node], (vocab,).
    """
    assert len(p) == len(q) == len(tree)
    choices: list[int] = p.argmax(-1).tolist()
    path = [0]
    while True:
        here, depth = path[-1], len(path) - 1
        left = _summing_to_one(p[here])
        children = [node for node, parent in enumerate(tree.parents) if parent == here]
        for rank, child in enumerate(children):
            drawn_from = q[child]
            assert drawn_from is not None, "a drawn draft comes with its distribution"
            drawn_from = _summing_to_one(drawn_from)
            if accepted(left, drawn_from, tree.tokens[child], dice(depth, ACCEPT + rank)):
                choices[here] = tree.tokens[child]
                path.append(child)
                break
            left = residual(left, drawn_from)
        else:
            choices[here] = invert(left, dice(depth, REMAINDER))
            return path, choices


def _summing_to_one(values: Tensor) -> Tensor:
    """float32 probabilities sum to 1 within 1e-7 only, which a residual would magnify."""
    exact = values.double()
    return exact / exact.sum()
