"""Draft with a copy of the model in fewer bits, for which another drafter guesses.

The copy says nearly what the model says, whatever the text is about, and its passes cost a fraction
of the model's. It reads the model's own keys and values, and what it files for its drafts is
replaced when they are verified, so it needs no cache and reads no prompt. In two levels: a drafter
that costs next to nothing guesses, the copy keeps what it agrees with, the model verifies the rest.
Published relatives: ML-SpecQD (2025, arXiv 2503.13565: 4-bit drafts, two levels), QSpec (2024,
arXiv 2410.11305). Does not know how a copy is made.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from ...core.contract import Budget, Draft, Outcome, RowOutcome
from ...core.guessing import chosen, drawn
from ...core.sampling import Sampler
from ...core.tree import Tree
from ...errors import OptionError, ResourceError
from ...model.compute.cache import RowSpan
from ...model.compute.cpu.choosing import likeliest
from ...model.copies import copy_in
from ...verify.outright import accepted_path
from ..base import Drafter, DraftSession, Target
from ..registry import make_drafter


@dataclass(frozen=True)
class Quantised(Drafter):
    """Draft with a copy of the model in 8 or 4 bits."""

    name: ClassVar[str] = "quantised"
    likely: ClassVar[float] = 0.9

    weights: str = "auto"
    """What the copy's weights are stored as: int8 or int4. auto is int4 where that loses nothing,
    since the weights were rounded to 4 bits before, or where the model has 8 bits; else int8."""
    first: str | Drafter = "hybrid"
    """The drafter that guesses for the copy, by name or as an object. "none" guesses nothing."""
    guesses: int = 7
    """Most tokens that are guessed for one pass of the copy, all guesses of a tree counted."""
    sure: float = 0.0
    """Stop behind a token to which the copy gives a smaller probability than this."""
    sample: bool = False
    """Under sampling, draw drafts at random and verify them by rejection: the same distribution,
    other tokens for a seed."""

    def __post_init__(self) -> None:
        if self.guesses < 0 or not 0 <= self.sure <= 1:
            raise OptionError(
                f"guesses={self.guesses}, sure={self.sure}: guesses is 0 or more, sure is a "
                "probability from 0 (never stop) to 1"
            )
        if self._first is not None and self._first.decides_how_much:
            raise OptionError(
                f"first={self.first!r} decides itself how much it drafts, and the copy would never "
                "ask it; name a drafter without a controller, such as 'hybrid'"
            )

    @cached_property
    def _first(self) -> Drafter | None:
        return make_drafter(self.first, {})

    @property
    def learns_across_requests(self) -> bool:
        return self._first is not None and self._first.learns_across_requests

    def start(self, target: Target) -> DraftSession:
        try:
            copy = Target(copy_in(target.model, self.weights), target.cache)
        except ResourceError as lacking:
            if self._first is None:
                raise
            warnings.warn(f"{lacking}: drafting goes on without it", stacklevel=2)
            return self._first.start(target)
        first = self._first.start(copy) if self._first else None
        if first and (first.collectors or first.observer):
            raise OptionError(
                f"first={self.first!r} reads states of the whole model, which the copy does not "
                "have; name one that drafts from the text, or an exit without a part"
            )
        return _Session(copy, first, self)


@dataclass
class _Row:
    """What a session knows of one row, and the draft that it is making for it."""

    sampler: Sampler
    ends: frozenset[int]
    drawn: bool  # at random, and verified by rejection
    begin: int = 0  # the text's length when the round began
    guesses: list[int] = field(default_factory=list)
    drawn_from: list[Tensor | None] = field(default_factory=list)


class _Session(DraftSession):
    def __init__(self, copy: Target, first: DraftSession | None, options: Quantised) -> None:
        self._copy, self._first, self._options = copy, first, options
        self._rows: dict[int, _Row] = {}

    def admit(
        self, row: int, prompt: Sequence[int], sampler: Sampler, ends: frozenset[int] = frozenset()
    ) -> None:
        drawn = self._options.sample and not sampler.params.greedy
        self._rows[row] = _Row(sampler, ends, drawn)
        if self._first:
            self._first.admit(row, prompt, sampler, ends)

    def drop(self, row: int) -> None:
        del self._rows[row]
        if self._first:
            self._first.drop(row)

    def observe(self, outcome: Outcome) -> None:
        if self._first:
            self._first.observe(outcome)

    def propose(
        self, rows: Sequence[int], texts: Sequence[Sequence[int]], budget: Budget
    ) -> Sequence[Draft]:
        sure = max(self._options.sure, budget.threshold or 0.0)
        grown = {row: list(text) for row, text in zip(rows, texts, strict=True)}
        most = dict(zip(rows, budget.tokens, strict=True))
        for row, text in zip(rows, texts, strict=True):
            state = self._rows[row]
            state.begin, state.guesses, state.drawn_from = len(text), [], [None]
        active = [row for row in rows if most[row]]
        while active:
            room = [most[row] - len(self._rows[row].guesses) for row in active]
            active = self._extend(active, grown, room, sure)
        for row, text in zip(rows, texts, strict=True):
            self._copy.cache.rollback(row, len(text) - 1)
        states = [self._rows[row] for row in rows]
        return [
            Draft(Tree.chain(text[-1], s.guesses), s.drawn_from if s.drawn else None)
            for s, text in zip(states, texts, strict=True)
        ]

    def _extend(
        self, rows: Sequence[int], grown: dict[int, list[int]], room: Sequence[int], sure: float
    ) -> list[int]:
        """One pass of the copy: what it agrees with of the guesses, and its own next token. Returns
        the rows that go on."""
        texts = [grown[row] for row in rows]
        drafts = self._guessed(rows, texts, room)
        hidden, logits = self._run(rows, texts, drafts)
        pieces = logits.split([len(draft.tree) for draft in drafts])
        outcomes, active = [], []
        said = self._choices(rows, texts, drafts, logits)
        for row, text, draft, left, (choices, q), scores in zip(
            rows, texts, drafts, room, said, pieces, strict=True
        ):
            path = accepted_path(draft.tree, choices)[:left]
            kept, goes_on = self._kept(row, [choices[node] for node in path], scores[path], sure)
            path = path[: len(kept)]
            if len(draft.tree) > 1:
                self._copy.cache.keep(row, len(text) - 1, path)
            grown[row] = [*text, *kept]
            self._rows[row].guesses += kept
            self._rows[row].drawn_from += [q[node] for node in path if q]
            outcomes.append(RowOutcome(row, grown[row], draft, path, kept, choices))
            if goes_on and len(kept) < left:
                active.append(row)
        if self._first:
            self._first.observe(Outcome(outcomes, logits, hidden))
        return active

    def _guessed(
        self, rows: Sequence[int], texts: Sequence[Sequence[int]], room: Sequence[int]
    ) -> Sequence[Draft]:
        """Guesses for the copy. A row that takes one more token needs none."""
        if self._first is None or max(room) == 1:
            return [Draft.chain(text) for text in texts]
        most = [self._options.guesses if left > 1 else 0 for left in room]
        return self._first.propose(rows, texts, Budget(most))

    def _run(
        self, rows: Sequence[int], texts: Sequence[Sequence[int]], drafts: Sequence[Draft]
    ) -> tuple[Tensor, Tensor]:
        model, cache = self._copy.model, self._copy.cache
        trees = [draft.tree for draft in drafts]
        spans = [
            RowSpan(row, len(text) - 1, len(tree))
            for row, text, tree in zip(rows, texts, trees, strict=True)
        ]
        chains = all(tree.is_chain for tree in trees)
        layout = cache.layout_at(spans, None if chains else [tree.parents for tree in trees])
        tokens = [token for tree in trees for token in tree.tokens]
        x = model.embed(torch.tensor(tokens, device=model.device))
        hidden = model.run(x, model.full_plan, cache, layout)
        return hidden, model.head(hidden)

    def _choices(
        self,
        rows: Sequence[int],
        texts: Sequence[Sequence[int]],
        drafts: Sequence[Draft],
        logits: Tensor,
    ) -> list[tuple[list[int], list[Tensor]]]:
        """What the copy chooses at every node, as the row's own sampler would choose, and what that
        was drawn from. A choice does not depend on what was guessed."""
        sizes = [len(draft.tree) for draft in drafts]
        if all(self._rows[row].sampler.plain for row in rows):
            return [(piece.tolist(), []) for piece in likeliest(logits)[:, 0].split(sizes)]
        contexts = [draft.tree.contexts(text) for draft, text in zip(drafts, texts, strict=True)]
        states = [self._rows[row] for row in rows]
        return list(map(_chosen, states, contexts, logits.split(sizes)))

    def _kept(
        self, row: int, tokens: list[int], scores: Tensor, sure: float
    ) -> tuple[list[int], bool]:
        """As many of the copy's tokens as it is sure of, the doubtful one included, and whether
        the draft may go on behind them."""
        ends = self._rows[row].ends
        unsure = [False] * len(tokens)
        if sure:
            shares = scores.float().softmax(-1)
            unsure = (shares[range(len(tokens)), tokens] < sure).tolist()
        for index, (token, doubtful) in enumerate(zip(tokens, unsure, strict=True)):
            if doubtful or token in ends:
                return tokens[: index + 1], False
        return tokens, True


def _chosen(
    row: _Row, contexts: Sequence[Sequence[int]], logits: Tensor
) -> tuple[list[int], list[Tensor]]:
    """One row's choices. Where its sampler has none, the likeliest token is a certain guess."""
    choices: list[int] = []
    drawn_from: list[Tensor] = []
    for context, scores in zip(contexts, logits, strict=True):
        if row.drawn:
            found = drawn(row.sampler, scores, context, row.begin)
            token, q = found[0] if found else _certain(scores)
            drawn_from.append(q)
        else:
            best = chosen(row.sampler, scores, context)
            token = int(scores.argmax()) if best is None else best
        choices.append(token)
    return choices, drawn_from


def _certain(scores: Tensor) -> tuple[int, Tensor]:
    """The likeliest token, and the distribution that has no other."""
    q = torch.zeros_like(scores, dtype=torch.float32)
    q[scores.argmax()] = 1
    return int(scores.argmax()), q
