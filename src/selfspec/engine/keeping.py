"""What is kept of a round: the model's choices at every node, the drafts that equal them, and the
state of each row afterwards. Nothing is changed here but the objects that a user gave (stop checks,
logits processors), which are never rewound.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice

import torch
from torch import Tensor

from ..core.contract import Draft, RowOutcome, RowStep
from ..core.guessing import chosen_at_nodes
from ..core.logprobs import TokenLogprob, logprobs_of
from ..core.randomness import uniform
from ..core.sampling import not_finite
from ..model.compute.cache import RowSpan
from ..model.compute.cpu.choosing import BROKEN, likeliest_or_broken
from ..model.layered import Scored
from ..verify.outright import accepted_path
from ..verify.rejection import verified
from .plain import Gain
from .row import Row, RowState


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
    def gain(self) -> Gain:
        tree, row = self.block.draft.tree, self.block.row
        rejected = [tree.tokens[node] for node in range(1, len(tree)) if node not in self.path]
        accepted, finish = len(self.path) - 1, self.state.finish
        step = RowStep(row.index, self.kept, accepted, rejected, self.logprobs, finish)
        return Gain(row, self.state, step)


@dataclass(frozen=True)
class Decided:
    """What a round adds to its rows, the rows whose own code raised (they have an `error` now),
    and the likeliest tokens at every node, if they were looked for."""

    rows: Sequence[Decision]
    failed: Sequence[Row]
    best: Sequence[Sequence[int]] | None


def places_of(blocks: Sequence[Block]) -> dict[Row, range]:
    """Where each row's nodes stand among those of all."""
    ends = accumulate(len(block.draft.tree) for block in blocks)
    return {
        block.row: range(end - len(block.draft.tree), end)
        for block, end in zip(blocks, ends, strict=True)
    }


def by_likeliest(blocks: Sequence[Block]) -> bool:
    """Whether the likeliest token at every node is all that decides."""
    return all(block.draft.probs is None and block.row.request.sampler.plain for block in blocks)


def decide(blocks: Sequence[Block], scored: Scored, ranks: int = 1) -> Decided:
    """What each row keeps. `ranks`: how many of the likeliest tokens somebody will ask for."""
    decisions: list[Decision] = []
    failed: list[Row] = []
    logits, best = scored.logits, scored.best
    if best is None and by_likeliest(blocks):  # of all rows at once, faster than row by row
        best = likeliest_or_broken(logits, ranks).tolist()
    verdicts = _verdicts(blocks, logits) if best is None else _outright(blocks, best)
    end = 0
    for block, verdict in zip(blocks, verdicts, strict=True):
        begin, end = end, end + len(block.draft.tree)
        try:
            if isinstance(verdict, Exception):
                raise verdict
            decisions.append(_decision(block, logits, begin, *verdict))
        except Exception as error:  # noqa: BLE001  (a user's criterion or processor: its row ends)
            block.row.error = error
            failed.append(block.row)
    return Decided(decisions, failed, best)


def _decision(
    block: Block, logits: Tensor, begin: int, path: Sequence[int], choices: Sequence[int]
) -> Decision:
    """`begin`: where the block's logits do."""
    row = block.row
    state, kept = row.after([choices[node] for node in path])
    logprobs: Sequence[TokenLogprob] = ()
    if row.request.logprobs is not None:
        nodes = [begin + node for node in path[: len(kept)]]
        logprobs = logprobs_of(logits[nodes], kept, row.request.logprobs)
    return Decision(block, path[: len(kept) + 1], choices, state, kept, logprobs)


Verdict = tuple[Sequence[int], Sequence[int]]  # the nodes to keep, and what was chosen at each node


def _outright(
    blocks: Sequence[Block], best: Sequence[Sequence[int]]
) -> Iterator[Verdict | Exception]:
    """Drafts that were chosen outright are compared with the model's tokens."""
    read = iter(best)
    for block in blocks:
        yield _compared(block, [row[0] for row in islice(read, len(block.draft.tree))])


def _compared(block: Block, choices: list[int]) -> Verdict | Exception:
    if BROKEN in choices:
        return not_finite()
    return accepted_path(block.draft.tree, choices), choices


def _verdicts(blocks: Sequence[Block], logits: Tensor) -> list[Verdict | Exception]:
    """The same where some rows are drawn, or have logits processors: all tokens that were chosen
    are read from the device at once. Drawn drafts are tested against their distributions."""
    pieces = logits.split([len(block.draft.tree) for block in blocks])
    found = [_choose(block, piece) for block, piece in zip(blocks, pieces, strict=True)]
    chosen = [each for each in found if isinstance(each, Tensor)]
    read = iter(torch.cat(chosen).tolist() if chosen else ())
    return [
        _compared(block, list(islice(read, len(each)))) if isinstance(each, Tensor) else each
        for block, each in zip(blocks, found, strict=True)
    ]


def _choose(block: Block, logits: Tensor) -> Tensor | Verdict | Exception:
    """The model's tokens at a row's nodes. A draft without guesses was not drawn, so that what a
    row's neighbours draft cannot change its tokens."""
    row, draft = block.row, block.draft
    sampler, contexts = row.request.sampler, draft.tree.contexts(row.tokens)
    if draft.probs is None or len(draft.tree) == 1:
        if sampler.plain:
            return likeliest_or_broken(logits)[:, 0]
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
