"""`draft="auto"`: learns while it generates which drafter pays here, if any, and how much to draft.

It begins with a lookup and token recycling, which cost next to nothing. Now and then it tries
whether a drafter that runs part of the model would do better. Costs depend on the machine and
chances on the text, so each request learns its own, beginning with what earlier requests on the
same model found (numbers only, no text). While it does without lookups, or asks them for little,
their guesses are compared with the text now and then, which costs no pass. Knows no drafter by its
file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar
from weakref import WeakKeyDictionary

from ..control.base import ControlSession
from ..control.costs import MOST, CostModel, Pass, best, first_length, pass_of, shared
from ..control.curves import ENOUGH
from ..control.looks import FIRST_LOOK, Checks, Looks, Standing
from ..control.shares import LASTING
from ..control.together import Together
from ..core.contract import Budget, Draft, Outcome, RoundTime
from ..core.sampling import Sampler
from ..errors import OptionError
from ..model.compute.cpu.lookups import Lookups
from ..model.layered import LayeredModel
from .arms import MANY_ROWS, Arm, Pair
from .base import Drafter, JoinedSession, Target, Texts
from .registry import make_drafter

# A lookup's guesses are compared with the text after so many rounds in which fewer than
# TRIED_LENGTH were drafted: of places that bad luck made look worthless nobody would hear again.
# More rows wait as much longer, since they tell more at once.
TRIED_SHORT = 3
TRIED_EVERY = 6  # the same of rounds without drafts
TRIED_BESIDE = 2  # and of rounds in which part of the model drafts: they take far longer
TRIED_LENGTH = 8  # guesses of a row
TRIED_ROWS = 2  # of several rows so many are asked, in turns: guesses for all of them take too long
# A drafter that reads more of the model than this for each draft is left out beside others: if it
# were always right it would gain little more than lookups do, and looks at it are dear.
DEAREST = 0.6
# While drafts do not pay, whether they would by now is asked less often: so many rounds are passed
# over for each one without drafts, of several rows more, since it is asked of each of them, and
# never more than the last of these.
PASSED_OVER, MOST_ROWS, MOST_PASSED_OVER = 1 / 8, 4, 8
IDLE = 4  # the same, at least, once none of them pays for several rows: that changes slowly
# Many rows keep the arithmetic busy, and each guess adds its own. If it pays only where it is kept
# more often than this, few texts do that: then it has to gain more, and so many rounds are passed
# over, whatever the bound above.
TOO_OFTEN, LONG_IDLE = 0.7, 24
CONSIDERED = 3  # of several rows: choices between two in which all candidates are considered


@dataclass
class _Known:
    """What earlier requests learned of one drafter on one model."""

    costs: CostModel
    looks: Looks


@dataclass
class Past:
    """What earlier requests learned on one model."""

    known: Sequence[_Known] = ()  # drafter by drafter
    plain_rows: Counter[int] = field(default_factory=Counter)  # rounds without drafts, by rows


@dataclass(frozen=True)
class Auto(Drafter):
    """Learn which drafter pays, and how much to draft; it brings its own controller."""

    name: ClassVar[str] = "auto"
    trees: ClassVar[bool] = True
    decides_how_much: ClassVar[bool] = True

    candidates: Sequence[str | Drafter] = ("hybrid", "quantised", "early-exit")
    """Drafters to choose from, by name (as text: hybrid+early-exit) or as objects. Those that do
    not fit are left out."""
    most: int = MOST
    """Never draft more tokens than this for a row in one round, all guesses of a tree counted. How
    many it drafts follows from what they cost and bring here: a token is added while its own chance
    pays for what it adds to the pass."""

    def __post_init__(self) -> None:
        if self.most < 1:
            raise OptionError(
                f"most={self.most} leaves nothing to choose; use 1 or more, or draft='none'"
            )
        if not self._drafters:
            raise OptionError(
                "candidates is empty; name drafters to choose from, or use draft='none'"
            )

    @cached_property
    def _drafters(self) -> Sequence[Drafter]:
        named = self.candidates
        if isinstance(named, str | Drafter):
            named = [named] if isinstance(named, Drafter) else named.split("+")
        if any(candidate == "auto" or isinstance(candidate, Auto) for candidate in named):
            raise OptionError(
                "candidates names auto itself, which drafts nothing of its own; name the drafters "
                "to choose from"
            )
        made = [make_drafter(candidate, {}) for candidate in named]
        return [drafter for drafter in made if drafter is not None]

    @cached_property
    def _pasts(self) -> WeakKeyDictionary[LayeredModel, Past]:
        return WeakKeyDictionary()

    @property
    def learns_across_requests(self) -> bool:  # what it learns itself is costs, and changes no text
        return any(drafter.learns_across_requests for drafter in self._drafters)

    def start(self, target: Target) -> AutoSession:
        arms: list[Arm] = []
        if target.model.one_by_one:  # every draft costs a pass, so that none can pay
            return AutoSession(arms, self.most, Past())
        past = self._pasts.get(target.model)
        if past is None:
            past = self._pasts.setdefault(target.model, Past(self._first_known(target.model)))
        for drafter, memory in zip(self._drafters, past.known, strict=True):
            try:
                share = drafter.share(target.model)
                if len(self._drafters) > 1 and share > DEAREST:
                    continue
                session = drafter.start(target)
            except OptionError:  # an exit after a quarter of two layers, say
                continue
            costs = CostModel(memory.costs)
            arms.append(Arm(drafter.name, session, costs, memory.looks, drafter.looks_up, share))
        return AutoSession(arms, self.most, past, bool(target.model.pass_seconds))

    def _first_known(self, model: LayeredModel) -> list[_Known]:
        """The first is tried at once, and what is likely to be right soon after."""
        waits = [FIRST_LOOK if each.likely < 0.5 else 2 for each in self._drafters]
        known = [
            _Known(CostModel(likely=each.likely, fading=LASTING), Looks(wait if index else 1))
            for index, (each, wait) in enumerate(zip(self._drafters, waits, strict=True))
        ]
        for each in known:
            for tokens, seconds in list(model.pass_seconds) * ENOUGH:  # they are no spikes
                each.costs.passes.observe(1, tokens, seconds)
        return known


class AutoSession(JoinedSession, ControlSession):
    """Drafter and controller of one generation; `rounds` says how often each candidate drafted."""

    def __init__(self, arms: Sequence[Arm], most: int, past: Past, told: bool = False) -> None:
        """`told`: what passes cost is known from the beginning."""
        super().__init__([arm.session for arm in arms])
        self._arms, self._most, self._told, self._begun = arms, most, told, False
        self._chosen: Arm | None = None
        self._pair: Pair | None = None  # of whom `propose` chooses one
        self._asked: Sequence[int] = ()
        self.stands = 0
        self._stood = False  # whether the last round's choice was an earlier one's
        self._compared: set[int] = set()  # rows with drafts that were compared with the model's own
        self._rows: Sequence[int] = ()
        self._reading = 0
        self._checks, self._standing = Checks(past.plain_rows), Standing()
        self._together = Together()
        self._plain = 0  # rounds without drafts, one after the other
        self._unasked = 0  # rounds since a lookup was asked for much, or compared with the text
        self._turn = 0  # of the rows that are asked for such guesses
        self._rest = 0  # rounds that are still passed over
        self._idle = 0  # rounds to pass over at least, since none of them pays by the last choice
        self._considered = self._arms  # in the last choice
        self._since_all = CONSIDERED  # choices since all of them were
        self.control = self

    @property
    def rounds(self) -> dict[str, int]:
        return {arm.name: arm.rounds for arm in self._arms}

    def admit(
        self, row: int, prompt: Sequence[int], sampler: Sampler, ends: frozenset[int] = frozenset()
    ) -> None:
        super().admit(row, prompt, sampler, ends)
        if not (self._begun or self._told):
            for arm in self._arms:
                arm.costs.begin(len(prompt))
        self._begun = True
        self._rest = 0
        self._together.admit(row)
        self._compared.discard(row)
        if len(prompt) > sampler.prompt_length:  # it goes on after a round that was interrupted
            self._compared.add(row)

    def budget(self, rooms: Sequence[int], beside: int = 0) -> Budget:
        most = min(self._most, max(rooms))
        if self._rest and not self._reading:
            self._chosen, self._asked = None, [0] * len(rooms)
            return Budget(self._asked)
        self._rest, self._considered = 0, self._to_consider(len(rooms))
        for arm in self._considered:
            arm.catch_up()
        self._stood, self.stands, self._pair, self._idle = False, 0, None, 0
        self._chosen, tokens = self._choose(len(rooms), most, beside)
        if self._chosen and len(rooms) == 1:
            pair = Pair.of(self._arms, rooms[0], most, TRIED_LENGTH, beside)
            if pair and self._chosen in (pair.lookup, pair.other):
                self._pair, self.stands = pair, 0
                return Budget([pair.tokens])
        if self._chosen:
            self._chosen.rounds += 1
        self._asked = [min(tokens, room) for room in rooms]
        if not self._chosen:
            return Budget(self._asked)
        costs, weighs = self._chosen.costs, self._chosen.session.weighs
        if not weighs:
            self._asked = shared(costs, self._rows, rooms, most, beside) or self._asked
        # what runs the model was chosen for all rows, and not for some
        some_wait = len(rooms) > 1 and self._chosen.looks_up
        price = None
        if weighs or some_wait:
            price = costs.price(len(rooms), max(self._asked), most, beside)
        if some_wait:
            self._asked = self._together.held_back(self._rows, self._asked, price)
        return Budget(self._asked, price=price if weighs else None)

    def about(self, rows: Sequence[int], reading: int = 0) -> None:
        self._rows, self._reading = rows, reading

    def drop(self, row: int) -> None:
        super().drop(row)
        if len(self._rows) <= MANY_ROWS:  # of more of them one fewer changes little
            self._rest = 0
        self._together.drop(row)
        for arm in self._arms:
            arm.drop(row)

    def _to_consider(self, rows: int) -> Sequence[Arm]:
        """Who may be chosen. Of several rows what runs the model only now and then, unless it was
        the last choice: it seldom is, and finding that out for all takes longer than one lookup."""
        some = [arm for arm in self._arms if arm.looks_up or arm is self._chosen]
        if rows == 1 or not some or self._since_all >= CONSIDERED:
            self._since_all = 0
            return self._arms
        self._since_all += 1
        return some

    def _choose(self, rows: int, most: int, beside: int) -> tuple[Arm | None, int]:
        """Who drafts this round, and how much: the best offer, or one that is due for a look."""
        arms = self._considered
        timed = all(arm.costs.passes.known for arm in arms)
        if most == 0 or not timed or self._checks.unknown(rows):
            return None, 0
        together = [arm.costs.together(rows, self._reading, beside) for arm in arms]
        chosen, tokens, highest = None, 0, max(together, default=0.0)
        offers = [(arm, arm.costs.rates(rows, most, beside)) for arm in arms]
        needed = (arm.costs.needed(rows, beside) for arm in arms)  # of several rows only
        dear = rows > 1 and min(needed, default=0.0) > TOO_OFTEN
        for arm, rates in offers:
            length = arm.length(rates, dear) if arm.costs.drafting.known else 0
            if rates[length] > highest * arm.bar(rows):
                chosen, tokens, highest = (arm if length else None), length, rates[length]
        untried = rows > 1 and any(a.looks_up and not a.costs.drafting.known for a in arms)
        for arm, rates in offers:
            if arm is chosen or (self._reading and arm.costs.drafting.known):
                continue  # prompts that wait would pay for a look
            if untried and not arm.looks_up:
                continue  # a lookup's draft shows at less cost what larger passes take
            known = arm.costs.drafting.known or (arm.looks_up and self._told)
            tried = best(rates, least=1) if known else None
            length = first_length(rows, most) if tried is None else tried
            if rows > 1 and not arm.looks_up:  # a long draft of all of them is dearer than it tells
                length = min(length, first_length(rows, most))
            cost = arm.costs.passes.of(rows)(rows * (1 + length) + beside)
            # one slow look, at weights that were not in memory yet, must not rule a drafter out
            certain = arm.looks_up or arm.costs.drafting.certain
            expected = rates[tried] / arm.bar(rows) if tried is not None and certain else None
            if rows > 1:  # a look at all of them is dear
                if expected is None:
                    expected = arm.costs.supposed(rows, most, beside, arm.share)
                if expected < highest and not arm.looks_up:  # all must keep one to save a round
                    expected = min(expected, rows / cost)
            if arm.looks.due(highest, expected, cost):
                return arm, length
        if chosen and self._checks.due(chosen.costs.rates(rows, most, beside), tokens):
            return None, 0
        if chosen is None and rows > 1:
            self._idle = LONG_IDLE if dear else IDLE
        if chosen and chosen.looks_up:  # beside others' rounds choosing anew takes no time
            weighs = chosen.session.weighs
            self.stands = self._standing.after(chosen.costs, rows, tokens, weighs)
        return chosen, tokens

    def propose(self, rows: Sequence[int], texts: Texts, budget: Budget) -> Sequence[Draft]:
        assert self._chosen is not None, "only a chosen one has a budget above 0"
        if self._pair:
            return self._better(self._pair, rows, texts)
        return self._drafts_of(self._chosen, rows, texts, budget)

    def _drafts_of(
        self, arm: Arm, rows: Sequence[int], texts: Texts, budget: Budget
    ) -> Sequence[Draft]:
        drafts = arm.session.propose(rows, texts, budget)
        return list(map(self._one_coupling, rows, texts, drafts))

    def _better(self, pair: Pair, rows: Sequence[int], texts: Texts) -> Sequence[Draft]:
        """The draft of whoever does better here. What lookups guessed is compared with the text if
        it is not verified, or only their lucky rounds would count."""
        self._chosen, self._asked = pair.lookup, pair.lookups.tokens
        drafts = self._drafts_of(pair.lookup, rows, texts, pair.lookups)
        if not pair.wins(drafts[0]):
            pair.lookup.compare_later(rows, texts, drafts, pair.lookups.tokens[0])
            self._chosen, self._asked, self._unasked = pair.other, pair.others.tokens, 0
            drafts = self._drafts_of(pair.other, rows, texts, pair.others)
        self._chosen.rounds += 1
        return drafts

    def by_kernels(self, row: int) -> Lookups | None:
        chosen = None if self._pair else self._chosen
        found = chosen.session.by_kernels(row) if chosen else None
        if found is not None:
            self._compared.add(row)
        return found

    def _one_coupling(self, row: int, text: Sequence[int], draft: Draft) -> Draft:
        """A draft that was chosen outright shows the model's own draws at places that are not kept
        yet. So none of that row is drawn any more: whoever saw them could decide by them whether
        they count."""
        if draft.probs is not None and row in self._compared:
            return Draft.chain(text)
        if draft.probs is None and draft.guesses:
            self._compared.add(row)
        return draft

    def learn(self, outcome: Outcome, time: RoundTime) -> None:
        if self._rest and not self._reading:
            rows, tokens, seconds, _ = pass_of(outcome, time)
            return self.passed_over(rows, tokens, seconds)
        if self._chosen and self._stood:  # `budget` was not asked
            self._chosen.rounds += 1
        passes, several = [pass_of(outcome, time)], len(outcome.rows) > 1
        for arm in self._arms:
            if arm is self._chosen:
                arm.costs.observe(outcome, time, self._asked)
                arm.looks.learn(outcome, time)
            elif arm not in self._considered:
                arm.missed += passes
            else:
                arm.looks.wait(time, asked=not self._stood)
                if several or not outcome.drafted:  # a lone row's rounds are too short for all
                    arm.costs.hear(passes)
            arm.compare(outcome)
        self._checks.learn(outcome)
        self._together.learn(outcome)
        self._stood = True
        self._plain = 0 if outcome.drafted else self._plain + 1
        asked = self._chosen is not None and self._chosen.looks_up
        self._unasked = 0 if asked and max(self._asked) >= TRIED_LENGTH else self._unasked + 1
        waits = TRIED_BESIDE if outcome.drafted else TRIED_EVERY
        if self._unasked >= (TRIED_SHORT * len(outcome.rows) if asked else waits):
            self._unasked = 0
            self._try(outcome)
        share = PASSED_OVER * min(MOST_ROWS, len(outcome.rows))
        rest = int(self._plain * share) if self._arms else MOST_PASSED_OVER
        self._rest = max(min(rest, MOST_PASSED_OVER), self._idle)

    @property
    def rests(self) -> int:
        return self._rest

    def passed_over(self, rows: int, tokens: int, seconds: float) -> None:
        self._rest, self._plain = self._rest - 1, self._plain + 1
        self._unasked += 1
        for arm in self._arms:
            arm.missed.append(Pass(rows, tokens, seconds))

    def _try(self, outcome: Outcome) -> None:
        """Ask a drafter that runs no model what it would have drafted."""
        arm = next((arm for arm in self._arms if arm.looks_up), None)
        if arm is None:
            return
        count, self._turn = len(outcome.rows), self._turn + TRIED_ROWS
        turns = range(self._turn, self._turn + min(TRIED_ROWS, count))
        some = [outcome.rows[turn % count] for turn in turns]
        rows, texts = [row.row for row in some], [row.text for row in some]
        price = arm.price(count, TRIED_LENGTH, self._most)
        budget = Budget([TRIED_LENGTH] * len(rows), price=price)
        drafts = self._drafts_of(arm, rows, texts, budget)
        arm.compare_later(rows, texts, drafts, TRIED_LENGTH)
