"""What is kept of a round: the model's choices at every node, the drafts that equal them, and the
state of each row afterwards. Nothing is changed here but the objects that a user gave (stop checks,
logits processors), which are never rewound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from ..core.contract import Draft, RowOutcome, RowStep
from ..core.guessing import chosen_at_nodes
from ..core.logprobs import TokenLogprob, logprobs_of
from ..core.randomness import uniform
from ..core.sampling import not_finite
from ..model.compute.cache import RowSpan
from ..model.compute.cpu.choosing import likeliest
from ..verify.outright import accepted_path
from ..verify.rejection import verified
from .row import Row, RowState

_BROKEN = -1  # stands for a token where there is none to choose


@dataclass(frozen=True)
class Block:
    """What the full model reads of one row in a round: a tree whose root is its last token."""

    row: Row
    draft: Draft

    @property
    def span(self) -> RowSpan:
        """Where it goes: all before it is in the cache."""
        return RowSpan(self.row.slot, len(self.row.tokens) - 1, len(self.draft.tree))


@dataclass(frozen=True)
class Decision:
    """What a round adds to one row. It counts once the row has taken it over."""

    block: Block
    path: Sequence[int]
    """The root and the guesses that are kept."""
    choices: Sequence[int]
    """What the model chose after each node."""
    state: RowState
    kept: Sequence[int]
    logprobs: Sequence[TokenLogprob]

    @property
    def outcome(self) -> RowOutcome:
        row = self.block.row
        return RowOutcome(
            row.slot, row.tokens, self.block.draft, self.path, self.kept, self.choices
        )

    @property
    def step(self) -> RowStep:
        tree, index = self.block.draft.tree, self.block.row.index
        rejected = [tree.tokens[node] for node in range(1, len(tree)) if node not in self.path]
        accepted, finish = len(self.path) - 1, self.state.finish
        return RowStep(index, self.kept, accepted, rejected, self.logprobs, finish)


def decide(blocks: Sequence[Block], logits: Tensor) -> tuple[list[Decision], list[Row]]:
    """What each row keeps, and the rows whose own code raised: they have an `error` now."""
    pieces = logits.split([len(block.draft.tree) for block in blocks])
    decisions: list[Decision] = []
    failed: list[Row] = []
    verdicts = _verdicts(blocks, logits, pieces)
    for block, piece, verdict in zip(blocks, pieces, verdicts, strict=True):
        try:
            if isinstance(verdict, Exception):
                raise verdict
            decisions.append(_decision(block, piece, *verdict))
        except Exception as error:  # noqa: BLE001  (a user's criterion or processor: its row ends)
            block.row.error = error
            failed.append(block.row)
    return decisions, failed


def _decision(
    block: Block, logits: Tensor, path: Sequence[int], choices: Sequence[int]
) -> Decision:
    row = block.row
    state, kept = row.after([choices[node] for node in path])
    logprobs: Sequence[TokenLogprob] = ()
    if row.request.logprobs is not None:
        logprobs = logprobs_of(logits[path[: len(kept)]], kept, row.request.logprobs)
    return Decision(block, path[: len(kept) + 1], choices, state, kept, logprobs)


Verdict = tuple[Sequence[int], Sequence[int]]  # the nodes to keep, and what was chosen at each node


def _verdicts(
    blocks: Sequence[Block], logits: Tensor, pieces: Sequence[Tensor]
) -> list[Verdict | Exception]:
    """Drafts that were chosen outright are compared with the model's tokens, of which all rows' are
    read from the device at once. Drawn ones are tested against their distributions."""
    found: Sequence[Tensor | Verdict | Exception]
    if all(each.draft.probs is None and each.row.request.sampler.plain for each in blocks):
        # all at once is faster than row by row
        found = _likeliest(logits).split([len(piece) for piece in pieces])
    else:
        found = [_choose(block, piece) for block, piece in zip(blocks, pieces, strict=True)]
    chosen = [each for each in found if isinstance(each, Tensor)]
    read = iter(torch.cat(chosen).tolist() if chosen else ())
    verdicts: list[Verdict | Exception] = []
    for block, each in zip(blocks, found, strict=True):
        if isinstance(each, Tensor):
            choices = list(islice(read, len(each)))
            if _BROKEN in choices:
                verdicts.append(not_finite())
                continue
            each = accepted_path(block.draft.tree, choices), choices
        verdicts.append(each)
    return verdicts


def _likeliest(logits: Tensor) -> Tensor:
    """Of each row the token with the best logit, `_BROKEN` where logits are not finite. It is
    found out on the device, so that choices are still read in one go."""
    broken = ~logits.amax(-1).isfinite()  # NaN wins against every number
    return likeliest(logits)[:, 0].masked_fill(broken, _BROKEN)


def _choose(block: Block, logits: Tensor) -> Tensor | Verdict | Exception:
    """The model's tokens at a row's nodes. A draft without guesses was not drawn, so that what a
    row's neighbours draft cannot change its tokens."""
    row, draft = block.row, block.draft
    sampler, contexts = row.request.sampler, draft.tree.contexts(row.tokens)
    if draft.probs is None or len(draft.tree) == 1:
        if sampler.plain:
            return _likeliest(logits)
        tokens, failures = chosen_at_nodes(sampler, logits, contexts)
        if not failures:
            return tokens
        choices: list[int] = tokens.tolist()
        return _unless_kept((accepted_path(draft.tree, choices), choices), failures)
    try:
        return _tested(block, sampler.probabilities(logits, contexts))
    except Exception:  # noqa: BLE001  (a user's logits processor: its row ends)
        return _tested_apart(block, logits)


def _unless_kept(verdict: Verdict, failures: Mapping[int, Exception]) -> Verdict | Exception:
    """Processors that fail after some node end the row only if the node is kept: a draft may not
    fail a request."""
    return next((failures[node] for node in verdict[0] if node in failures), verdict)


def _tested(block: Block, p: Tensor) -> Verdict:
    """Drawn drafts against the model's distribution after every node."""
    sampler, position = block.row.request.sampler, len(block.row.tokens)
    assert block.draft.probs is not None

    def dice(depth: int, stream: int) -> float:
        return uniform(sampler.seed, position + depth, stream)

    return verified(block.draft.tree, p, block.draft.probs, dice)


def _tested_apart(block: Block, logits: Tensor) -> Verdict | Exception:
    """The same node by node, where the processors fail after some node."""
    sampler, contexts = block.row.request.sampler, block.draft.tree.contexts(block.row.tokens)
    p, failures = torch.zeros_like(logits, dtype=torch.float32), {}
    for node, context in enumerate(contexts):
        try:
            p[node] = sampler.probabilities(logits[node : node + 1], [context])[0]
        except Exception as error:  # noqa: BLE001  (a user's logits processor)
            p[node, logits[node].argmax()] = 1
            failures[node] = error
    return _unless_kept(_tested(block, p), failures)
