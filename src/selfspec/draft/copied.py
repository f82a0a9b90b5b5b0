"""What drafters share that draft with a copy of the model in fewer bits.

Does not know how a copy is made.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from ..errors import OptionError, ResourceError
from ..model.compute.plan import LayerPlan
from ..model.copies import copy_in
from .base import Target
from .chain import LayerSession


def copied(target: Target, weights: str, needed: bool = False) -> Target | None:
    """What a copy drafts for, on the model's own cache. Without memory for one there is none, which
    is an error if it is needed."""
    try:
        return Target(copy_in(target.model, weights), target.cache)
    except ResourceError as lacking:
        if needed:
            raise
        warnings.warn(f"{lacking}: drafting goes on without it", stacklevel=3)
        return None


def plan_session(
    target: Target,
    plan: LayerPlan,
    weights: str | None,
    vocabulary: int,
    reuse: bool,
    sample: bool,
    tokens: Sequence[int] = (),
) -> LayerSession:
    """Drafts by a plan of the model, or of its copy. A copy's states are not the model's, so its
    verification begins at the first layer."""
    copy = copied(target, weights) if weights is not None else None
    if copy is None:
        return LayerSession(target, plan, vocabulary, reuse, sample, tokens)
    return LayerSession(copy, plan, vocabulary, False, sample, tokens)


def refuse_copy(weights: str | None) -> None:
    """A part learned to go with the model's own weights."""
    if weights is not None:
        raise OptionError(
            f"weights={weights!r} and a part: the part was trained beside the model's own weights "
            "and would meet others; leave out one of them"
        )
