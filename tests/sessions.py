"""A drafter's session with rows of its own and no engine around it, for tests that ask a drafter
directly."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from selfspec.core.contract import Draft, Outcome, RowOutcome
from selfspec.core.sampling import Sampler, row_samplers
from selfspec.core.tree import Tree
from selfspec.draft.base import Drafter, DraftSession, Target
from selfspec.model.layered import LayeredModel

NOTHING = torch.empty(0)


def begin(
    drafter: Drafter,
    model: LayeredModel,
    prompts: Sequence[Sequence[int]],
    samplers: Sequence[Sampler] | None = None,
    ends: Sequence[frozenset[int]] | None = None,
    *,
    read: bool = False,
) -> DraftSession:
    """A session that was given row i for prompt i. With `read` the cache holds all of the prompts
    but their last tokens, as before a round."""
    cache = model.new_cache(len(prompts), 64)
    if read:
        model.prefill([prompt[:-1] for prompt in prompts], cache)
    session = drafter.start(Target(model, cache))
    samplers = samplers or row_samplers(None, prompts, ())
    ends = ends or [frozenset()] * len(prompts)
    for row, each in enumerate(zip(prompts, samplers, ends, strict=True)):
        session.admit(row, *each)
    return session


def guesses(drafts: Sequence[Draft]) -> list[list[int]]:
    """The tokens of each draft."""
    return [list(draft.guesses) for draft in drafts]


def parents(drafts: Sequence[Draft]) -> list[list[int]]:
    """Of each guess of each draft: its parent, where 0 is the text's last token."""
    return [list(draft.tree.parents)[1:] for draft in drafts]


def grown(root: int, tokens: Sequence[int], parents: Sequence[int]) -> Draft:
    """A draft of these guesses after `root`; a parent is a node, 0 the root."""
    return Draft(Tree([root, *tokens], [-1, *parents]))


def told(rows: Sequence[RowOutcome], best: Sequence[Sequence[int]], vocabulary: int) -> Outcome:
    """What a drafter is told. `best[i]`: the likeliest tokens after node i of all that was
    verified, in order. All other logits are lower."""
    logits = torch.zeros(len(best), vocabulary)
    for row, tokens in zip(logits, best, strict=True):
        row[torch.tensor(tokens)] = torch.arange(len(tokens), 0, -1.0)
    return Outcome(rows, logits, logits)
