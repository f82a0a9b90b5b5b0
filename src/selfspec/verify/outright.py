"""Verification of drafts that were chosen outright (a point mass): keep them while the target chooses the same tokens.

The target's choice at a position is its argmax, or the draw that (seed, position) fixes; either way it does not depend on
the draft. So what is kept is token for token what plain decoding writes, in greedy decoding and in sampling. Under
sampling this accepts a token x with probability p(x), just as rejection sampling does for a point mass.
"""

from __future__ import annotations

from collections.abc import Sequence


def accepted(drafted: Sequence[int], chosen: Sequence[int]) -> int:
    """How many leading drafts equal the target's choices. `chosen[i]` is the choice after i drafts, so there is one more."""
    assert len(chosen) == len(drafted) + 1
    for index, token in enumerate(drafted):
        if token != chosen[index]:
            return index
    return len(drafted)
