"""Verification of drafts that were chosen outright: keep them while the target chooses the same.

The target's choice at a position is its argmax, or the draw that (seed, position) fixes. Neither
depends on the draft. So the kept tokens are those of plain decoding, greedy or sampled. Under
sampling a token x is accepted with probability p(x), as rejection sampling does for a point mass.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..core.tree import Tree


def accepted_path(tree: Tree, choices: Sequence[int]) -> list[int]:
    """The nodes to keep, from the root on. `choices[node]` is what the target chooses after it."""
    assert len(choices) == len(tree)
    path = [0]
    for node in range(1, len(tree)):  # parents come first, so one walk is enough
        last = path[-1]
        if tree.parents[node] == last and tree.tokens[node] == choices[last]:
            path.append(node)
    return path
