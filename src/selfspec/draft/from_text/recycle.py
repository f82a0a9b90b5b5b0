"""Token recycling: the tokens that the model itself found likeliest after a token, the last time it
was asked, are guessed again.

Every verification yields logits for every drafted token, right or wrong; their top k are kept as
that token's successors, and the next draft is the tree of the likeliest paths through this table.
Source: Luo et al. 2024, arXiv 2408.08696. Ours: the table also knows pairs of tokens, which come
first, it starts from the prompt instead of empty, what it does not know yet is looked up in a
trained part (`successors.py`), and the tree is grown best-first to any size instead of having one
fixed shape. Costs no model; knows nothing of the text but its last two tokens.
"""

from __future__ import annotations

import heapq
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ...core.contract import Budget, Draft, Outcome
from ...core.sampling import Sampler
from ...core.tree import TreeBuilder
from ...errors import OptionError
from ...model.layered import LayeredModel
from ...trained.files import TrainedPart
from ...trained.successors import Chances, Successors, trained_successors
from ..base import Drafter, DraftSession, Target

# How often the successor of each rank was the right one, after a pair of tokens and after a single
# one: 30 answers of SmolLM2-135M-Instruct to Spec-Bench prompts. Only the shape of the tree hangs
# on them.
PAIR_CHANCES = (0.66, 0.10, 0.04, 0.03, 0.016, 0.013, 0.01)
TOKEN_CHANCES = (0.46, 0.10, 0.05, 0.03, 0.015, 0.012, 0.01)
# of a single one whose pair is known to the trained part only
BESIDE_CHANCES = (
    0.21,
    0.12,
    0.06,
    0.03,
    0.015,
    0.012,
    0.01,
)
# Shares of a trained chance that are left: of a pair's where the text itself knows the pair, of a
# token's where no pair is known.
BESIDE_OWN, SINGLE = 0.28, 0.65
PAIRS_KEPT = 65_536  # of a table; the oldest are dropped first. About 20 MB.
BLOCK = 128

Context = tuple[int, ...]


@dataclass(frozen=True)
class TokenRecycling(Drafter):
    """Draft from the model's own recent successors of each token."""

    name: ClassVar[str] = "recycle"
    trees: ClassVar[bool] = True

    successors: int = 7
    """How many successors of a token to keep (k), 1 to 7."""
    pairs: bool = True
    """Keep successors of pairs of tokens as well, and trust those first. False is the published
    method."""
    part: str | os.PathLike[str] | TrainedPart | None = None
    """Folder of trained successors. None takes those that come with selfspec for this model, if
    any; "none" takes none."""
    keep_table: bool = False
    """Let later requests of the same drafter object begin with what earlier ones left. Benchmarks
    must say so."""

    def __post_init__(self) -> None:
        if not 1 <= self.successors <= len(TOKEN_CHANCES):
            raise OptionError(
                f"successors={self.successors} is outside 1 to {len(TOKEN_CHANCES)}, beyond which "
                f"a rank is right in under 1% of "
                f"cases; use {len(TOKEN_CHANCES)} or fewer"
            )
        assert self._tables is not None  # made now, not by whichever thread comes first

    @property
    def learns_across_requests(self) -> bool:
        return self.keep_table

    @cached_property
    def _tables(self) -> WeakKeyDictionary[LayeredModel, _Table]:
        """The kept table of each model: another model's successors would be noise, or outside its
        vocabulary."""
        return WeakKeyDictionary()

    def start(self, target: Target) -> DraftSession:
        trained = trained_successors(self.part, target.model)
        if not self.keep_table:
            return _Recycling(lambda: _Table(self, trained), self.successors)
        kept = self._tables.setdefault(target.model, _Table(self, trained))
        return _Recycling(lambda: kept, self.successors)


class _Recycling(DraftSession):
    def __init__(self, make_table: Callable[[], _Table], count: int) -> None:
        self._make_table, self._count = make_table, count
        self._tables: dict[int, _Table] = {}

    def admit(
        self,
        row: int,
        prompt: Sequence[int],
        sampler: Sampler,
        ends: frozenset[int] = frozenset(),
    ) -> None:
        self._tables[row] = self._make_table()
        self._tables[row].read(prompt)

    def drop(self, row: int) -> None:
        del self._tables[row]

    def propose(
        self, rows: Sequence[int], texts: Sequence[Sequence[int]], budget: Budget
    ) -> Sequence[Draft]:
        drafts = []
        for row, text, most in zip(rows, texts, budget.tokens, strict=True):
            tree = TreeBuilder(text[-1], most)
            _grow(tree, self._tables[row], tuple(text[-2:]))
            drafts.append(Draft(tree.tree()))
        return drafts

    def observe(self, outcome: Outcome) -> None:
        """Every token that was verified gets its successors anew, those of rejected drafts too. One
        read from the device."""
        found = iter(_likeliest(outcome.logits, self._count).tolist())
        for each in outcome.rows:
            tree, begin = each.draft.tree, len(each.text) - len(each.kept)
            contexts: list[Context] = [tuple(each.text[max(0, begin - 2) : begin])]
            for node in range(1, len(tree)):
                contexts.append((tree.tokens[tree.parents[node]], tree.tokens[node]))
            self._tables[each.row].learn({context: tuple(next(found)) for context in contexts})


class _Table:
    """Successors of tokens and of pairs of tokens. Rows of one generation have one each; a kept one
    is shared, hence the lock."""

    def __init__(self, options: TokenRecycling, trained: Successors | None = None) -> None:
        self._count, self._pairs, self._trained = options.successors, options.pairs, trained
        self._known: dict[
            Context, tuple[int, ...]
        ] = {}  # tokens stay within the vocabulary, pairs are bounded
        self._order: dict[Context, None] = {}  # of the pairs, by age
        self._lock = threading.Lock()

    def read(self, text: Sequence[int]) -> None:
        """Begin with what follows what in a prompt, the latest first; what the model said earlier
        comes after it."""
        with self._lock:
            for size in (1, 2) if self._pairs else (1,):
                for end in range(size, len(text)):
                    self._put(
                        tuple(text[end - size : end]),
                        self._merged((text[end],), tuple(text[end - size : end])),
                    )

    def learn(self, successors: dict[Context, tuple[int, ...]]) -> None:
        """Replace the successors of these contexts, the likeliest first; each context also speaks
        for its last token."""
        with self._lock:
            for context, tokens in successors.items():
                self._put(context[-1:], tokens)
                if self._pairs and len(context) == 2:
                    self._put(context, tokens)

    def after(self, context: Context) -> Chances:
        """The successors known after a context, each with its chance."""
        with self._lock:
            pair = self._known.get(context, ()) if self._pairs and len(context) == 2 else ()
            single = self._known.get(context[-1:], ())
        if self._trained:
            return self._with_trained(self._trained, context, pair, single)
        found = dict(zip(pair, PAIR_CHANCES, strict=False))
        others = (token for token in single if token not in found)
        return [
            *found.items(),
            *zip(
                others,
                (PAIR_CHANCES if pair else TOKEN_CHANCES)[len(pair) : self._count],
                strict=False,
            ),
        ]

    def _with_trained(
        self, trained: Successors, context: Context, pair: Sequence[int], single: Sequence[int]
    ) -> Chances:
        """The text's own pair, the trained one, the text's own single token; the trained single
        only where no pair is known."""
        found = dict(zip(pair, PAIR_CHANCES, strict=False))
        known = trained.after(context) if self._pairs and len(context) == 2 else ()
        share = BESIDE_OWN if pair else 1.0
        for token, chance in known:
            found.setdefault(token, share * chance)
        if not pair:
            for token, chance in zip(
                single, BESIDE_CHANCES if known else TOKEN_CHANCES, strict=False
            ):
                found.setdefault(token, chance)
            if not known:
                for token, chance in trained.after(context[-1:]):
                    found.setdefault(token, SINGLE * chance)
        return list(found.items())

    def _merged(self, first: tuple[int, ...], context: Context) -> tuple[int, ...]:
        known = tuple(token for token in self._known.get(context, ()) if token not in first)
        return (*first, *known)[: self._count]

    def _put(self, context: Context, tokens: tuple[int, ...]) -> None:
        self._known[context] = tokens
        if len(context) == 2:
            self._order.pop(context, None)
            self._order[context] = None
            if len(self._order) > PAIRS_KEPT:
                oldest = next(iter(self._order))
                del self._order[oldest], self._known[oldest]


def _grow(tree: TreeBuilder, table: _Table, context: Context) -> None:
    """Fill the tree with the likeliest paths through the table; a path's chance is the product of
    its tokens'."""
    order = count()
    heap: list[
        tuple[float, int, int, Context]
    ] = []  # -chance, order, parent, the last token before the guess and the guess

    def push(parent: int, context: Context, chance: float) -> None:
        for token, share in table.after(context):
            heapq.heappush(heap, (-chance * share, next(order), parent, (context[-1], token)))

    if tree.room:
        push(0, context, 1.0)
    while heap and tree.room:
        chance, _, parent, guess = heapq.heappop(heap)
        node = tree.add(parent, guess[-1])
        assert node is not None, "the loop ends when the tree is full"
        push(node, guess, -chance)


def _likeliest(logits: Tensor, count: int) -> Tensor:
    """(n, vocab) -> (n, count), the likeliest tokens in order. Looks for the best blocks first: a
    fifth of `topk`'s time."""
    size = logits.shape[1]
    blocks = size // BLOCK
    if blocks <= 4 * count:
        return logits.topk(min(count, size)).indices
    body = blocks * BLOCK
    # the likeliest tokens are in these
    best = logits[:, :body].unflatten(1, (blocks, BLOCK)).amax(-1).topk(count).indices
    inside = (best[..., None] * BLOCK + torch.arange(BLOCK, device=logits.device)).flatten(1)
    rest = torch.arange(body, size, device=logits.device).expand(len(logits), -1)
    where = torch.cat([inside, rest], dim=1)
    return where.gather(1, logits.gather(1, where).topk(count).indices)
