"""What a trained part knows of each row's kept text: states of the model, and a cache of its own.

States come with the prompt and with every verification. Those of rejected drafts are dropped, the
others wait until the part reads them. Where states are missing (the beginning of a prompt that was
cached, a round whose first layers were not run) the part's context begins anew behind the gap.
Entries of drafts need no rollback: they lie behind the kept text's and are written over. Does not
know what a part makes of an entry.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..core.contract import Budget, Outcome
from ..model.compute.cache import KVCache, RowSpan
from ..model.compute.hidden_states import StateCollector
from ..model.layered import PREFILL_CHUNK
from .base import Texts
from .chain import ChainSession


@dataclass
class Known:
    """One row: slot 0 of the part's cache belongs to token `first`, `held` entries were read,
    `waiting` (n, taps, width) were not, in pieces that have `end` behind them."""

    first: int = 0
    held: int = 0
    waiting: list[Tensor] = field(default_factory=list)
    end: int = 0
    """The first token whose states are not known."""

    def add(self, first: int, states: Tensor) -> None:
        """States from token `first` on. Behind a gap the part's context begins anew."""
        if self.end != first:
            self.first, self.held, self.waiting, self.end = first, 0, [], first
        self.waiting.append(states)
        self.end += len(states)

    def take(self, most: int) -> Tensor:
        """At most so many of those that wait, in order. They count as read."""
        states = torch.cat(self.waiting) if len(self.waiting) > 1 else self.waiting[0]
        taken, left = states[:most], states[most:]
        self.waiting = [left] if len(left) else []
        self.held += len(taken)
        return taken


class Entries:
    """The rows' entries in a cache of the part's own."""

    def __init__(self, layers: Sequence[int], cache: KVCache) -> None:
        self.collectors, self.cache = StateCollector(layers), cache
        self._known: dict[int, Known] = {}

    def admit(self, row: int) -> None:
        self.cache.reserve_rows(row + 1)
        self._known[row] = Known()

    def drop(self, row: int) -> None:
        del self._known[row]

    def __getitem__(self, row: int) -> Known:
        return self._known[row]

    def observe(self, outcome: Outcome) -> None:
        """Take over the states of what a round kept."""
        paths = {}
        for row in outcome.rows:
            begin = len(row.text) - len(row.kept) - 1  # the slot of what was the last token
            paths[row.row, begin] = row.path[: len(row.kept)]
        self.gather(paths)

    def gather(self, paths: Mapping[tuple[int, int], Sequence[int]] | None = None) -> None:
        """Sort new states by rows. A span that begins where a path does was verified, and the path
        is kept of it. Others are kept whole: prompts, and single tokens, whether a round without
        guesses or several that were passed over. Rows of other drafters pass by."""
        for layout, states in self.collectors.take():
            pieces = states.split([span.count for span in layout.spans])
            for span, piece in zip(layout.spans, pieces, strict=True):
                if span.row in self._known:
                    path = (paths or {}).get((span.row, span.first))
                    kept = piece if path is None or len(piece) == 1 else piece[list(path)]
                    self._known[span.row].add(span.first, kept)

    def allow(self, rows: Sequence[int], texts: Texts, budget: Budget) -> Budget:
        """The budget, with nothing for rows whose latest states are missing."""
        most = [
            tokens if self._known[row].end == len(text) - 1 else 0
            for row, text, tokens in zip(rows, texts, budget.tokens, strict=True)
        ]
        return replace(budget, tokens=most)

    def unread(self, rows: Sequence[int]) -> Iterator[tuple[list[RowSpan], Tensor]]:
        """What waits of these rows, a limited number of entries at a time: where they go, and their
        states. They count as read."""
        while left := [row for row in rows if self._known[row].waiting]:
            room, spans, pieces = PREFILL_CHUNK, [], []
            for row in left:
                known = self._known[row]
                if room:
                    begin, piece = known.held, known.take(room)
                    spans.append(RowSpan(row, begin, len(piece)))
                    pieces.append(piece)
                    room -= len(piece)
            yield spans, torch.cat(pieces)


class EntriesSession(ChainSession):
    """A session whose trained part has entries, in `_entries`. Goes before another base class."""

    def use_entries(self, layers: Sequence[int], cache: KVCache) -> None:
        """To be called once, by `__init__`."""
        self._entries = Entries(layers, cache)
        self.collectors = [self._entries.collectors]

    def admit(self, row: int, prompt: Sequence[int], *rest: Any) -> None:
        super().admit(row, prompt, *rest)
        self._entries.admit(row)
        self._entries.cache.reserve(len(prompt) + 64)

    def drop(self, row: int) -> None:
        super().drop(row)
        self._entries.drop(row)

    def observe(self, outcome: Outcome) -> None:
        self._entries.observe(outcome)
