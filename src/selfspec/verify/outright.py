"""Verification of drafts that were chosen outright (a point mass): keep them while the target
chooses the same tokens.

The target's choice at a position is its argmax, or the draw that (seed, position) fixes; either way
it does not depend on the draft. So what is kept is token for token what plain decoding writes, in
greedy decoding and in sampling. Under sampling this accepts a token x with probability p(x), just
as rejection sampling does for a point mass.
"""

from __future__ import annotations

from collections.abc import Sequence


def accepted_path(
    tokens: Sequence[int], parents: Sequence[int], chosen: Sequence[int]
) -> list[int]:
    """Indices of the drafts that the target would have written itself, from the root on.

    `parents[i]` is the draft that draft i follows, -1 for the kept text. `chosen[0]` is what the
    target chooses after the kept text, `chosen[i + 1]` what it chooses after draft i. A chain has
    parents -1, 0, 1, ...
    """
    assert len(chosen) == len(tokens) + 1 and len(parents) == len(tokens)
    path: list[int] = []
    here = -1
    # parents come first, so one pass is enough
    for index, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if parent == here and token == chosen[here + 1]:
            path.append(index)
            here = index
    return path
