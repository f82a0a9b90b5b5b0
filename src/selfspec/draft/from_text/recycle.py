"""Token recycling: guess again what the model found likeliest after a token the last time.

Every verification yields logits for every drafted token, right or wrong. Their top k are kept as
that token's successors, and the next draft is the tree of the likeliest paths through this table.
Source: Luo et al. 2024, arXiv 2408.08696. Ours: the table also knows pairs of tokens, which come
first. It starts from the prompt instead of empty. What it does not know yet is looked up in a
trained part (trained/successors.py). The tree is grown best-first to any size instead of having one
fixed shape. Costs no model. Knows nothing of the text but its last three tokens.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice, pairwise
from typing import Any, ClassVar, TypeVar
from weakref import WeakKeyDictionary

from ...core.contract import Outcome
from ...errors import OptionError
from ...model.compute.cpu.choosing import likeliest_known
from ...model.layered import LayeredModel
from ...trained.files import TrainedPart
from ...trained.successors import SUREST, VOTES, Chances, Successors, trained_successors
from ..base import Drafter, DraftSession, Target, Texts
from ..growing import Guesses, grow
from ..voting import Voter, VotingSession

# How often the successor of each rank was right, after a pair of tokens and after a single one, in
# 30 answers of SmolLM2-135M-Instruct to Spec-Bench prompts. They only shape the tree.
PAIR_CHANCES = (0.66, 0.10, 0.04, 0.03, 0.016, 0.013, 0.01)
TOKEN_CHANCES = (0.46, 0.10, 0.05, 0.03, 0.015, 0.012, 0.01)
# after a single one whose pair only the trained part knows
BESIDE_CHANCES = (0.21, 0.12, 0.06, 0.03, 0.015, 0.012, 0.01)
# What counts of a trained chance: a pair's if the text knows the pair, a single token's.
BESIDE_OWN, SINGLE = 0.28, 0.65
# Beside other sources: how many times likelier each rank makes a token, see `voting.py`.
PAIR_VOTES = (3.7, 3.2, 2.3, 2.0)
TOKEN_VOTES = (3.5, 2.0, 1.5)
PAIRS_KEPT = 65_536  # in a table, the newest: about 20 MB
UNTOLD = 64  # rounds of a row that a table which nobody asks is not told of yet

Context = tuple[int, ...]
Where = TypeVar("Where", int, Context)
_Learned = tuple[tuple[Context, ...], tuple[tuple[int, ...], ...]]


@dataclass(frozen=True)
class TokenRecycling(Drafter):
    """Draft from the model's own recent successors of each token."""

    name: ClassVar[str] = "recycle"
    trees: ClassVar[bool] = True
    names: ClassVar[bool] = True

    successors: int = 7
    """How many successors of a token to keep (k), 1 to 7."""
    pairs: bool = True
    """Keep successors of pairs too, and trust those first. False is the published method."""
    part: str | os.PathLike[str] | TrainedPart | None = None
    """Folder of trained successors. None is what selfspec ships for the model, "none" is none."""
    keep_table: bool = False
    """Let later requests begin with what earlier ones left. Benchmarks must say so."""

    def __post_init__(self) -> None:
        if not 1 <= self.successors <= len(TOKEN_CHANCES):
            raise OptionError(
                f"successors={self.successors} is outside 1 to {len(TOKEN_CHANCES)}, beyond which "
                f"a rank is right in under 1% of cases; use {len(TOKEN_CHANCES)} or fewer"
            )
        assert self._tables is not None  # made now, not by whichever thread comes first

    @property
    def looks_up(self) -> bool:
        return True

    @property
    def learns_across_requests(self) -> bool:
        return self.keep_table

    @cached_property
    def _tables(self) -> WeakKeyDictionary[LayeredModel, _Table]:
        """One kept table a model: another's successors are noise, or outside its vocabulary."""
        return WeakKeyDictionary()

    def start(self, target: Target) -> DraftSession:
        trained = trained_successors(self.part, target.model)
        if not self.keep_table:
            numbers = partial(self._native, trained)
            return _Recycling(lambda: _Table(self, trained), self.successors, numbers=numbers)
        kept = self._tables.setdefault(target.model, _Table(self, trained))
        return _Recycling(lambda: kept, self.successors, keeps=True)

    def _native(self, trained: Successors | None) -> Mapping[str, Any]:
        """What kernels need to know to say what a table says."""
        factors, powers = zip(*reversed(VOTES), strict=True)  # after one token, after several
        return {
            "successors": self.successors,
            "paired": self.pairs,
            "kept": PAIRS_KEPT,
            "pair": PAIR_VOTES,
            "single": TOKEN_VOTES,
            "counted": trained.counted if trained else (),
            "vocabulary": trained.vocabulary if trained else 0,
            "factors": factors,
            "powers": powers,
            "surest": SUREST,
        }


class _Recycling(VotingSession):
    def __init__(
        self,
        make_table: Callable[[], _Table],
        count: int,
        keeps: bool = False,
        numbers: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        """`keeps`: others read the tables too. `numbers`: what kernels need to know."""
        self._make_table, self.ranks, self._keeps = make_table, count, keeps
        self._numbers = numbers
        self._tables: dict[int, _Table] = {}
        # What the table of a row that was not asked yet is still to hear: its prompt, and of each
        # round contexts and successors. Of many rows that are asked now and then, most would have
        # read their prompts for nothing. Tuples, which Python's collections pass over.
        self._untold: dict[int, tuple[Context, list[_Learned]]] = {}

    def admit(self, row: int, prompt: Sequence[int], *_: object) -> None:
        self._tables[row] = self._make_table()
        self._untold[row] = tuple(prompt), []
        if self._keeps:
            self._told(row)

    def drop(self, row: int) -> None:
        self._untold.pop(row, None)
        del self._tables[row]

    def _told(self, row: int) -> _Table:
        """The row's table, which has heard everything."""
        table = self._tables[row]
        if row in self._untold:
            prompt, learned = self._untold.pop(row)
            table.read(prompt)
            for contexts, successors in learned:
                table.learn(contexts, successors)
        return table

    def fill(self, tree: Guesses, row: int, text: Sequence[int]) -> None:
        table = self._told(row)

        def following(context: Context) -> list[tuple[float, int, Context]]:
            last = context[-2:]
            return [(chance, token, (*last, token)) for token, chance in table.after(context)]

        grow(tree, tuple(text[-3:]), following)

    def voter(self, row: int, text: Sequence[int]) -> Voter:
        return self._told(row)

    def native(self) -> Mapping[str, Any] | None:
        return self._numbers() if self._numbers else None

    def named(self, rows: Sequence[int], texts: Texts, count: int) -> Sequence[Sequence[int]]:
        """The likeliest successors. Where too few are known, those of the last token too."""
        found = []
        for row, text in zip(rows, texts, strict=True):
            table = self._told(row)
            known = dict(table.after(tuple(text[-2:])))
            for token, chance in table.after(tuple(text[-1:])) if len(known) < count else ():
                known.setdefault(token, chance * min(known.values(), default=1.0))
            found.append(sorted(known, key=known.__getitem__, reverse=True)[:count])
        return found

    def observe(self, outcome: Outcome) -> None:
        """Every verified token, rejected or not, gets new successors."""
        best = iter(likeliest_known(outcome.best, outcome.logits, self.ranks))
        for row in outcome.rows:
            tokens, parents = row.draft.tree.tokens, row.draft.tree.parents
            begin = len(row.text) - len(row.kept)
            contexts: list[Context] = [tuple(row.text[max(0, begin - 2) : begin])]
            contexts += [(tokens[parents[node]], tokens[node]) for node in range(1, len(tokens))]
            learned = tuple(contexts), tuple(map(tuple, islice(best, len(contexts))))
            if row.row in self._untold and len(self._untold[row.row][1]) < UNTOLD:
                self._untold[row.row][1].append(learned)
            else:
                self._told(row.row).learn(*learned)


class _Table(Voter):
    """Successors of tokens and of pairs, one table a row. A kept table is shared, hence the
    lock."""

    def __init__(self, options: TokenRecycling, trained: Successors | None = None) -> None:
        self._count, self._paired, self._trained = options.successors, options.pairs, trained
        self._tokens: dict[int, tuple[int, ...]] = {}
        self._pairs: dict[Context, tuple[int, ...]] = {}  # by age, PAIRS_KEPT at most
        self.heard = self._pairs if self._paired else None
        self._lock = threading.Lock()

    def read(self, text: Sequence[int]) -> None:
        """Begin with what follows what in a prompt, the latest first, then what the table held."""
        with self._lock:
            for token, latest in self._following(text, text[1:]):
                self._tokens[token] = self._before(self._tokens.get(token, ()), latest)
            pairs = self._following(list(pairwise(text)), text[2:]) if self._paired else ()
            for pair, latest in pairs:
                self._put(pair, self._before(self._pairs.get(pair, ()), latest))

    def _following(
        self, contexts: Sequence[Where], tokens: Sequence[int]
    ) -> Iterator[tuple[Where, list[int]]]:
        """Each context with the different tokens that followed it, the latest first. The contexts
        themselves come in the order of their last places."""
        found: dict[Where, list[int]] = {}
        for context, token in zip(reversed(contexts[: len(tokens)]), reversed(tokens), strict=True):
            if (known := found.get(context)) is None:
                found[context] = [token]
            elif len(known) < self._count and token not in known:
                known.append(token)
        return reversed(found.items())

    def _before(self, earlier: Sequence[int], latest: Sequence[int]) -> tuple[int, ...]:
        """The latest, then the earlier ones."""
        others = (token for token in earlier if token not in latest) if earlier else ()
        return (*latest, *others)[: self._count]

    def learn(self, contexts: Iterable[Context], successors: Iterable[Sequence[int]]) -> None:
        """Replace successors, the likeliest first. Those of a pair are its last token's too."""
        with self._lock:
            for context, likeliest in zip(contexts, successors, strict=False):
                tokens = tuple(likeliest[: self._count])
                self._tokens[context[-1]] = tokens
                if self._paired and len(context) == 2:
                    self._put(context, tokens)

    def after(self, context: Context) -> Chances:
        """The successors known after a context, each with its chance."""
        paired = self._paired and len(context) > 1
        with self._lock:
            pair = self._pairs.get(context[-2:], ()) if paired else ()
            single = self._tokens.get(context[-1], ())
        if self._trained:
            return self._with_trained(self._trained, context, paired, pair, single)
        others = (token for token in single if token not in pair)
        chances = PAIR_CHANCES if pair else TOKEN_CHANCES
        return list(zip((*pair, *others), chances[: self._count], strict=False))

    def votes(self, context: Context) -> list[tuple[int, float]]:
        """Beside other sources: what each kind of successors says, the text's own first."""
        pair = context[-2:] if self._paired else ()
        with self._lock:
            found = list(zip(self._pairs.get(pair, ()), PAIR_VOTES, strict=False))
            found += zip(self._tokens.get(context[-1], ()), TOKEN_VOTES, strict=False)
        if self._trained:
            found += self._trained.votes(context if self._paired else context[-1:])
        return found

    def _with_trained(
        self,
        trained: Successors,
        context: Context,
        paired: bool,
        pair: Sequence[int],
        single: Sequence[int],
    ) -> Chances:
        """First the text's own pair, then the trained triple or pair, then the text's own single
        token, and the trained single token only where no pair is known."""
        chances = dict(zip(pair, PAIR_CHANCES, strict=False))
        trained_pair = trained.longest(context, 2) if paired else ()
        share = BESIDE_OWN if pair else 1.0
        for token, chance in trained_pair:
            chances.setdefault(token, share * chance)
        if not pair:
            own = BESIDE_CHANCES if trained_pair else TOKEN_CHANCES
            for token, chance in zip(single, own, strict=False):
                chances.setdefault(token, chance)
            for token, chance in () if trained_pair else trained.after(context[-1:]):
                chances.setdefault(token, SINGLE * chance)
        return list(chances.items())

    def _put(self, pair: Context, tokens: tuple[int, ...]) -> None:
        self._pairs.pop(pair, None)
        self._pairs[pair] = tokens
        if len(self._pairs) > PAIRS_KEPT:
            del self._pairs[next(iter(self._pairs))]
