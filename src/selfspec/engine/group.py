"""Rows that draft together: one drafter's session and one controller's, for as long as there are
rows. Knows neither the cache's slots nor what is kept.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..control.base import Controller, ControlSession
from ..core.contract import Budget, Draft, Outcome, RoundTime, RowOutcome
from ..core.grammar import Allowed
from ..core.tree import Tree
from ..draft.base import Drafter, DraftSession, Target
from ..errors import OptionError
from ..model.compute.cpu.choosing import likeliest_known
from ..model.compute.cpu.lookups import Lookups
from ..model.layered import Scored
from .row import Row

NOTHING = torch.empty(0)


class Group:
    """Rows of equal drafters and controllers."""

    def __init__(self, drafter: Drafter, controller: Controller | None, target: Target) -> None:
        self.drafter, self.controller, self._target = drafter, controller, target
        self.rows: list[Row] = []
        self.draft_seconds = 0.0  # of this round
        self._open()

    def _open(self) -> None:
        self.session: DraftSession = self.drafter.start(self._target)
        control = self.controller.start() if self.controller else self.session.control
        if control is None:
            raise OptionError(
                f"the drafter {self.drafter.name!r} does not say how much to draft; give the "
                "request a controller, or name one (control=)"
            )
        self._control: ControlSession = control
        self._two_sessions = self.session.control is not control
        self._stands = 0  # for how many rounds the last budget still stands
        self._planned: Budget | None = None  # of a round that is still to be drafted
        self._budget: tuple[Budget, tuple[object, ...]] | None = None  # and what it is for
        self._untold: list[tuple[Outcome, RoundTime]] = []  # of rounds with one that stood
        self._missed: list[Sequence[Sequence[int]]] = []  # of rounds: the rows' likeliest tokens
        self._is_open = True

    def admit(self, row: Row) -> None:
        self._reopen()
        self._catch_up()
        self._tell()
        self._enter(row)
        self.rows.append(row)

    def _enter(self, row: Row) -> None:
        self.session.admit(row.slot, row.tokens, row.request.sampler, row.request.eos)
        if self._two_sessions:
            self._control.admit(row.slot, row.tokens, row.request.sampler)

    def drop(self, row: Row) -> None:
        if self._is_open:
            self._catch_up()
            self._tell()
        self.rows.remove(row)
        if self._is_open:
            self.session.drop(row.slot)
            if self._two_sessions:
                self._control.drop(row.slot)

    def close(self) -> None:
        """After a round that was interrupted nobody knows what the sessions hold. They begin anew,
        with the rows as they are, when they are needed next."""
        self._is_open = False

    def _reopen(self) -> None:
        if not self._is_open:
            self._open()
            for row in self.rows:
                self._enter(row)

    @property
    def rests(self) -> int:
        """How many rounds it leaves alone, if no prompts are read, and hears of later."""
        return self._control.rests if self._is_open else 0

    def passed_over(
        self,
        rows: Sequence[Row],
        logits: Tensor,
        best: Sequence[Sequence[int]] | None,
        seconds: float,
        failed: bool,
    ) -> None:
        """These rows wrote a token each, its own all among them, unless one `failed`. `best`: the
        likeliest after each text, as far as they were looked up."""
        self.draft_seconds = 0.0
        if failed:
            return self.close()
        best = likeliest_known(best, logits, self.session.ranks)
        if rows != self.rows:
            best = [best[rows.index(row)] for row in self.rows]
        self._missed.append(best)
        self._control.passed_over(len(self.rows), len(rows), seconds)

    def _catch_up(self) -> None:
        """Show the session what it missed: as if all but the last token had been drafts."""
        count, missed = len(self._missed), self._missed
        if not count:
            return
        self._missed, rows = [], list[RowOutcome]()
        for row in self.rows:
            text = row.tokens
            written = text[-count:]
            draft = Draft(Tree.chain(text[-count - 1], written[:-1]))
            rows.append(RowOutcome(row.slot, text, draft, range(count), written, written))
        best = [each[index] for index in range(len(rows)) for each in missed]
        self.session.observe(Outcome(rows, torch.empty(0), torch.empty(0), best))

    def plan(self, rows: Sequence[Row], beside: int, reading: int = 0) -> Budget:
        """How much is to be drafted for these rows in the next round. `beside`: tokens of other
        rows in the same pass. `reading`: rows whose prompts are not read yet."""
        self._reopen()
        self._catch_up()
        self._planned = self._budget_for(rows, beside, reading)
        return self._planned

    def streak(self, row: Row) -> tuple[Lookups | None, int]:
        """What drafts by itself as much as was planned, and for how many rounds it may."""
        return self.session.by_kernels(row.slot), 1 + self._stands

    def drafted(self, seconds: float, number: int) -> None:
        """It did, and this is the round of that number."""
        self._planned, self.draft_seconds = None, seconds
        self._stands -= number > 0

    def draft(self, rows: Sequence[Row], beside: int, reading: int = 0) -> list[Draft]:
        """What is guessed to follow these rows, as `plan` says, or has said."""
        budget = self._planned or self.plan(rows, beside, reading)
        self._planned = None
        begin = time.perf_counter()
        if any(budget.tokens):
            texts = [row.tokens for row in rows]
            drafts = list(self.session.propose([row.slot for row in rows], texts, budget))
            if self._target.model.chains_only:
                drafts = [draft.as_chain for draft in drafts]
            assert len(drafts) == len(rows), "there is one draft for each row that was asked for"
            for draft, row, most in zip(drafts, rows, budget.tokens, strict=True):
                assert draft.tree.tokens[0] == row.tokens[-1], "a draft's root is the last token"
                assert len(draft.tree) - 1 <= most, "a draft is within its budget"
                self._check_tokens(draft)
            drafts = [fitting(*each) for each in zip(drafts, rows, strict=True)]
        else:
            drafts = [Draft.chain(row.tokens) for row in rows]
        self.draft_seconds = time.perf_counter() - begin
        return drafts

    def _budget_for(self, rows: Sequence[Row], beside: int, reading: int) -> Budget:
        """How much to draft: as before while that stands and fits, or what the controller says."""
        longest = self._target.model.longest_draft
        rooms = [min(row.state.room - 1, longest) for row in rows]
        slots = [row.slot for row in rows]
        about = (slots, beside, reading)
        if self._stands and self._budget and self._budget[1] == about:
            budget = self._budget[0]
            if all(map(int.__le__, budget.tokens, rooms)):
                self._stands -= 1
                return budget
        self._tell()
        self._control.about(slots, reading)
        budget = self._control.budget(rooms, beside)
        self._stands, self._budget = self._control.stands, (budget, about)
        return budget

    def _tell(self) -> None:
        """Tell the controller what it has not heard yet."""
        untold, self._untold, self._stands = self._untold, [], 0
        for outcome, round_time in untold:
            self._control.learn(outcome, round_time)

    def _check_tokens(self, draft: Draft) -> None:
        """A guess beyond the vocabulary would read another token's embedding, or none."""
        vocabulary = self._target.model.shape.vocabulary
        for token in draft.guesses:
            if not 0 <= token < vocabulary:
                raise OptionError(
                    f"drafter {self.drafter.name!r} proposed token {token}, and the model's "
                    f"vocabulary ends at {vocabulary - 1}; was it made for another tokenizer?"
                )

    def learn(
        self,
        outcomes: Mapping[Row, RowOutcome],
        places: Mapping[Row, Sequence[int]],
        scored: Scored,
        begin: float,
        verify: float,
        beside: int,
    ) -> None:
        """Tell the sessions what became of its rows' drafts. `places`: where each row's nodes are
        among all. `begin`: of the round, had there been no drafting. What a round takes beside its
        pass is part of every comparison with another size: a plain round takes most of it too.
        `beside`: tokens that the pass read again."""
        mine = [row for row in outcomes if row in self.rows]
        states, logits, best = scored
        if len(mine) < len(places):
            nodes = [node for row in mine for node in places[row]]
            states, logits = states[nodes], logits[nodes]
            best = None if best is None else [best[node] for node in nodes]
            beside += len(scored.logits) - len(logits)
        outcome = Outcome([outcomes[row] for row in mine], logits, states, best)
        self.session.observe(outcome)
        host = time.perf_counter() - begin - verify
        round_time = RoundTime(self.draft_seconds, verify, host, beside)
        if self._stands:  # until it is told, the pass's tensors would be held
            outcome = Outcome(outcome.rows, NOTHING, NOTHING)
        self._untold.append((outcome, round_time))
        if not self._stands:
            self._tell()


def fitting(draft: Draft, row: Row) -> Draft:
    """The draft without guesses that the row's grammar forbids, nor what follows them. Nobody knows
    of it yet but its drafter, to whom the rest is shown as if it had been all.

    Guesses by a row's own sampler obey its grammar already: drawn ones, and those of layers.
    """
    grammar = row.request.sampler.grammar
    if grammar is None or draft.probs is not None or draft.exits is not None or not draft.guesses:
        return draft
    try:
        return _cut(draft, grammar, row.tokens[row.request.sampler.prompt_length :])
    except OptionError:  # it cannot be followed; only verification may fail a request for that
        return Draft.chain(row.tokens)


def _cut(draft: Draft, grammar: Allowed, written: Sequence[int]) -> Draft:
    tree, tokens, parents = draft.tree, [draft.tree.tokens[0]], [-1]
    places: dict[int, int] = {0: 0}  # of the nodes that stay
    for node in range(1, len(tree)):
        under = tree.parents[node]
        if under not in places:
            continue
        path = [tree.tokens[guess] for guess in tree.paths[under][1:]]
        if grammar.follows([*written, *path], tree.tokens[node]):
            places[node] = len(tokens)
            tokens.append(tree.tokens[node])
            parents.append(places[under])
    return draft if len(tokens) == len(tree) else Draft(Tree(tokens, parents))
