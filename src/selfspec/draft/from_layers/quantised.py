"""Draft with a copy of the model in fewer bits, for which another drafter guesses.

The copy says nearly what the model says, whatever the text is about, and its passes cost a fraction
of the model's. It reads the model's own keys and values, and what it files for its drafts is
replaced when they are verified, so it needs no cache and reads no prompt. In two levels: a drafter
that costs next to nothing guesses, the copy keeps what it agrees with, the model verifies the rest.
How much is guessed follows from what the copy's passes cost here, and never changes what it says.
Where the copy is unsure its second choice can be drafted too, which makes the draft a tree. It
knows how likely its tokens are the model's own (likeness.py), and stops where more would not pay.
Published relatives: ML-SpecQD (2025, arXiv 2503.13565: 4-bit drafts, two levels), QSpec (2024,
arXiv 2410.11305). Does not know how a copy is made.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import ClassVar

import torch
from torch import Tensor

from ...control.cost_aware import CostAwareSession
from ...control.costs import CostModel
from ...core.contract import Budget, Draft, Outcome, RoundTime, RowOutcome
from ...core.guessing import chosen_at_nodes, drawn
from ...core.price import Price
from ...core.sampling import Sampler
from ...core.tree import Contexts, Tree
from ...errors import OptionError
from ...model.compute.cache import RowSpan
from ...model.compute.cpu.choosing import BROKEN, likeliest
from ...model.copies import share_of_copy
from ...model.layered import LayeredModel, Scored
from ...verify.outright import accepted_path
from ..base import Drafter, DraftSession, Target
from ..copied import copied
from ..likeness import Likeness
from ..registry import make_drafter
from ..second_model import SecondModelSession


@dataclass(frozen=True)
class Quantised(Drafter):
    """Draft with a copy of the model in 8 or 4 bits."""

    name: ClassVar[str] = "quantised"
    likely: ClassVar[float] = 0.9
    names: ClassVar[bool] = True

    weights: str = "auto"
    """What the copy's weights are stored as: int8 or int4. auto is int4 where that loses nothing,
    since the weights were rounded to 4 bits before, or where the model has 8 bits; else int8."""
    first: str | Drafter = "hybrid"
    """The drafter that guesses for the copy, by name or as an object. "none" guesses nothing."""
    guesses: int = 16
    """Never guess more tokens than this for one pass of the copy, all guesses of a tree counted.
    How many are guessed follows from what the copy's passes cost here."""
    sure: float = 0.0
    """Stop behind a token to which the copy gives a smaller probability than this."""
    unsure: float = 0.0
    """Where the copy gives its token a smaller probability than this, draft its second choice
    beside it, so that drafts are trees. 0 drafts chains."""
    sample: bool = False
    """Under sampling, draw drafts at random and verify them by rejection: the same distribution,
    other tokens for a seed."""

    def __post_init__(self) -> None:
        if self.guesses < 0 or not 0 <= self.sure <= 1 or not 0 <= self.unsure <= 1:
            raise OptionError(
                f"guesses={self.guesses}, sure={self.sure}, unsure={self.unsure}: guesses is 0 or "
                "more, sure a probability from 0 (never stop) to 1, unsure one from 0 (a chain) "
                "to 1"
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
    def learns_across_requests(self) -> bool:  # costs change no text
        return self._first is not None and self._first.learns_across_requests

    def share(self, model: LayeredModel) -> float:
        return share_of_copy(model, self.weights)

    def start(self, target: Target) -> DraftSession:
        copy = copied(target, self.weights, needed=self._first is None)
        if copy is None:
            assert self._first is not None
            return self._first.start(target)
        first = self._first.start(copy) if self._first else None
        if first and (first.collectors or first.observer):
            raise OptionError(
                f"first={self.first!r} reads states of the whole model, which the copy does not "
                "have; name one that drafts from the text, or an exit without a part"
            )
        # what earlier requests learned of the costs of guessing for this copy: numbers, no text
        known = copy.model.once((CostModel, self._first and self._first.name), CostModel)
        return _Session(copy, first, self, known, copy.model.once(Likeness, Likeness))

    def start_naming(self, target: Target) -> DraftSession:
        """The copy reads the text into a cache of its own: where a token left the model early, the
        model's cache has nothing to read."""
        copy = copied(target, self.weights, needed=True)
        assert copy is not None
        cache = copy.model.new_cache(target.cache.rows, 1)
        return SecondModelSession(Target(copy.model, cache), 0)


@dataclass(frozen=True)
class _Lead:
    """By how far a likeliest token leads the next one."""

    token: int
    other: int
    logits: float


@dataclass
class _Row:
    """What a session knows of one row, and the draft that it is making for it."""

    sampler: Sampler
    ends: frozenset[int]
    drawn: bool  # at random, and verified by rejection
    begin: int = 0  # the text's length when the round began
    tokens: list[int] = field(default_factory=list)  # of the tree, as are the next two
    parents: list[int] = field(default_factory=list)
    drawn_from: list[Tensor | None] = field(default_factory=list)
    last: int = 0  # the node at the chain's end
    chance: float = 1.0  # of the chain
    chain: list[tuple[int, _Lead | None]] = field(default_factory=list)  # its nodes
    drafted: Tree | None = None

    def begins(self, text: Sequence[int]) -> None:
        self.begin, self.last, self.chance = len(text), 0, 1.0
        self.tokens, self.parents, self.drawn_from = [text[-1]], [-1], [None]
        self.chain = []

    def add(self, parent: int, token: int, q: Tensor | None) -> None:
        self.tokens.append(token)
        self.parents.append(parent)
        self.drawn_from.append(q)

    @property
    def draft(self) -> Draft:
        self.drafted = Tree(self.tokens, self.parents)
        return Draft(self.drafted, self.drawn_from if self.drawn else None)


@dataclass(frozen=True)
class _Said:
    """What the copy says after each node of a row's guesses."""

    choices: list[int]
    drawn: Sequence[Sequence[tuple[int, Tensor]]] = ()
    """The first of them, and where it was drawn the second one too, each with its distribution."""
    leads: Sequence[_Lead] = ()
    """Of choices that are the likeliest tokens."""


class _Session(DraftSession):
    weighs = True

    def __init__(
        self,
        copy: Target,
        first: DraftSession | None,
        options: Quantised,
        known: CostModel,
        likeness: Likeness,
    ) -> None:
        self._copy, self._first, self._options = copy, first, options
        self._likeness = likeness
        self._price: Price | None = None
        self._guessing = CostAwareSession(options.guesses, known)
        self.ranks = first.ranks if first else 1  # of the model's own tokens, which it learns from
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
        self._learn(outcome)
        if self._first:
            self._first.observe(outcome)

    def _learn(self, outcome: Outcome) -> None:
        """How like the model the copy is, from drafts of its own."""
        agreed, leads, behind, begin = list[bool](), list[_Lead](), list[int](), 0
        for each in outcome.rows:
            row, kept = self._rows[each.row], set(each.path)
            if each.draft.tree is row.drafted:
                tested = [(n, lead) for n, lead in row.chain if row.parents[n] in kept]
                agreed += [node in kept for node, _ in tested]
                known = [(node, lead) for node, lead in tested if lead]
                leads += [lead for _, lead in known]
                behind += [begin + row.parents[node] for node, _ in known]
            begin += len(each.draft.tree)
        first, other = [lead.token for lead in leads], [lead.other for lead in leads]
        said = (outcome.logits[behind, first] - outcome.logits[behind, other]) if leads else ()
        off = [float(x) - lead.logits for x, lead in zip(said, leads, strict=True)]
        self._likeness.learn(agreed, off)

    def propose(
        self, rows: Sequence[int], texts: Sequence[Sequence[int]], budget: Budget
    ) -> Sequence[Draft]:
        sure, self._price = max(self._options.sure, budget.threshold or 0.0), budget.price
        grown = {row: list(text) for row, text in zip(rows, texts, strict=True)}
        most = dict(zip(rows, budget.tokens, strict=True))
        for row, text in zip(rows, texts, strict=True):
            self._rows[row].begins(text)
        active = [row for row in rows if most[row]]
        while active:
            room = [most[row] + 1 - len(self._rows[row].tokens) for row in active]
            active = self._extend(active, grown, room, sure)
        for row, text in zip(rows, texts, strict=True):
            self._copy.cache.rollback(row, len(text) - 1)
        return [self._rows[row].draft for row in rows]

    def _extend(
        self, rows: Sequence[int], grown: dict[int, list[int]], room: Sequence[int], sure: float
    ) -> list[int]:
        """One pass of the copy: what it agrees with of the guesses, and its own next token. Returns
        the rows that go on."""
        begin = time.perf_counter()
        texts = [grown[row] for row in rows]
        drafts = self._guessed(rows, texts, room)
        guessed = time.perf_counter()
        scored = self._run(rows, texts, drafts)
        ran = time.perf_counter()
        pieces = scored.logits.split([len(draft.tree) for draft in drafts])
        outcomes, active = [], []
        said = self._choices(rows, texts, drafts, scored)
        for row, text, draft, left, says, scores in zip(
            rows, texts, drafts, room, said, pieces, strict=True
        ):
            path = accepted_path(draft.tree, says.choices)[:left]
            kept, goes_on = self._add(self._rows[row], path, says, scores, left, sure)
            path = path[: len(kept)]
            if len(draft.tree) > 1:
                self._copy.cache.keep(row, len(text) - 1, path)
            grown[row] = [*text, *kept]
            outcomes.append(RowOutcome(row, grown[row], draft, path, kept, says.choices))
            if goes_on:
                active.append(row)
        if self._first:
            outcome = Outcome(outcomes, scored.logits, scored.states, scored.best)
            self._first.observe(outcome)
            spent = RoundTime(guessed - begin, ran - guessed, time.perf_counter() - ran)
            self._guessing.learn(outcome, spent)
        return active

    def _guessed(
        self, rows: Sequence[int], texts: Sequence[Sequence[int]], room: Sequence[int]
    ) -> Sequence[Draft]:
        """Guesses for the copy. A row that takes one more token needs none."""
        if self._first is not None:
            most = [self._options.guesses if left > 1 else 0 for left in room]
            budget = self._guessing.budget(most)
            if any(budget.tokens):
                drafts = self._first.propose(rows, texts, budget)
                if self._copy.model.chains_only:
                    return [draft.as_chain for draft in drafts]
                return drafts
        return [Draft.chain(text) for text in texts]

    def _run(
        self, rows: Sequence[int], texts: Sequence[Sequence[int]], drafts: Sequence[Draft]
    ) -> Scored:
        """What the copy says after every node, with as many of the likeliest tokens as are asked
        for by whoever guesses."""
        model, cache = self._copy.model, self._copy.cache
        trees = [draft.tree for draft in drafts]
        spans = [
            RowSpan(row, len(text) - 1, len(tree))
            for row, text, tree in zip(rows, texts, trees, strict=True)
        ]
        chains = all(tree.is_chain for tree in trees)
        layout = cache.layout_at(spans, None if chains else [tree.parents for tree in trees])
        tokens = [token for tree in trees for token in tree.tokens]
        scored = model.scored(tokens, cache, layout, max(2, self.ranks))
        if any(best[0] == BROKEN for best in scored.best or ()):
            return Scored(scored.states, scored.logits)  # verification alone may fail a request
        return scored

    def _choices(
        self,
        rows: Sequence[int],
        texts: Sequence[Sequence[int]],
        drafts: Sequence[Draft],
        scored: Scored,
    ) -> list[_Said]:
        """What the copy chooses at every node, as the row's own sampler would choose, and what that
        was drawn from. A choice does not depend on what was guessed."""
        sizes, states = [len(draft.tree) for draft in drafts], [self._rows[row] for row in rows]
        if all(state.sampler.plain for state in states):
            best = scored.best or likeliest(scored.logits, 2).tolist()
            leads = iter(_leads(best, scored.logits))
            read = iter([tokens[0] for tokens in best])
            return [
                _Said(list(islice(read, size)), leads=list(islice(leads, size))) for size in sizes
            ]
        contexts = [draft.tree.contexts(text) for draft, text in zip(drafts, texts, strict=True)]
        return list(map(self._said, states, contexts, scored.logits.split(sizes)))

    def _said(self, row: _Row, contexts: Contexts, logits: Tensor) -> _Said:
        """One row's choices. Where its sampler has none, the likeliest token is a certain guess."""
        if not row.drawn:
            return _Said(chosen_at_nodes(row.sampler, logits, contexts)[0].tolist())
        count = 2 if self._options.unsure else 1
        found = [
            drawn(row.sampler, scores, context, row.begin, count=count) or [_certain(scores)]
            for context, scores in zip(contexts, logits, strict=True)
        ]
        return _Said([pairs[0][0] for pairs in found], found)

    def _add(
        self, row: _Row, path: Sequence[int], said: _Said, scores: Tensor, left: int, sure: float
    ) -> tuple[list[int], bool]:
        """Add the copy's tokens after the nodes of a path to the draft: as many as it is sure of,
        the doubtful one included, with second choices beside those that it is unsure of. Says which
        tokens they are, and whether the draft may go on behind them."""
        tokens, unsure = [said.choices[node] for node in path], self._options.unsure
        shares = [1.0] * len(path)
        if sure or unsure:
            shares = scores[path].float().softmax(-1)[range(len(path)), tokens].tolist()
        for index, (node, token, share) in enumerate(zip(path, tokens, shares, strict=True)):
            end, pairs = row.last, said.drawn[node] if said.drawn else ()
            lead = said.leads[node] if said.leads else None
            row.last = len(row.tokens)
            row.chance *= self._likeness.chance(lead.logits if lead else None)
            row.chain.append((row.last, lead))
            row.add(end, token, pairs[0][1] if pairs else None)
            left -= 1
            if share < unsure and left:
                for other, q in pairs[1:] if said.drawn else _second(scores[node], token):
                    row.add(end, other, q)
                    left -= 1
            price, drafted = self._price, len(row.tokens) - 1
            pays = price is None or price.goes_on(row.chance, drafted)
            if share < sure or token in row.ends or not left or not pays:
                return tokens[: index + 1], False
        return tokens, True


def _leads(best: Sequence[Sequence[int]], logits: Tensor) -> list[_Lead]:
    """Of each row's two likeliest tokens."""
    pairs = torch.tensor([tokens[:2] for tokens in best], device=logits.device)
    highest, next_one = logits.gather(1, pairs).float().unbind(1)
    ahead = (highest - next_one).tolist()
    return [_Lead(first, other, lead) for (first, other, *_), lead in zip(best, ahead, strict=True)]


def _second(scores: Tensor, token: int) -> list[tuple[int, None]]:
    """The likeliest of the other tokens."""
    return [(other, None) for other in likeliest(scores[None], 2)[0].tolist() if other != token][:1]


def _certain(scores: Tensor) -> tuple[int, Tensor]:
    """The likeliest token, and the distribution that has no other."""
    q = torch.zeros_like(scores, dtype=torch.float32)
    q[scores.argmax()] = 1
    return int(scores.argmax()), q
