"""Verification of drafts that were chosen outright (a point mass): keep them while the target
chooses the same tokens.

The target's choice at a position is its argmax, or the draw that (seed, position) fixes; either way
it does not depend on the draft. So what is kept is token for token what plain decoding writes, in
greedy decoding and in sampling. Under sampling this accepts a token x with probability p(x), just
as rejection sampling does for a point mass.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..core.tree import Tree


def accepted_path(tree: Tree, choices: Sequence[int]) -> list[int]:
    """The nodes that the target would have written itself, from the root on. `choices[node]` is
    what it chooses after a node."""
    assert len(choices) == len(tree)
    path = [0]
    for node in range(1, len(tree)):  # parents come first, so one walk is enough
        here = path[-1]
        if tree.parents[node] == here and tree.tokens[node] == choices[here]:
            path.append(node)
    return path
