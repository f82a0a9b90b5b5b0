"""Rows of the cache, those in use and those that keep what an ended request left in them.

A new request begins where the longest shared beginning of a text lies: in a row that is free by now
(a chat's next turn) or in a copy of another row's (a system prompt that several have in common).
Keys and values of a token depend on the tokens before it alone, so bits do not change. Knows no
queue.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..engine.chat_cache import shared_length
from ..engine.row import Row

WORTH = 64  # tokens of a shared beginning that is worth waiting for, while somebody reads it
MOSTLY = 0.5  # of a kept text: if less is shared, the text is left to its own next turn


@dataclass(frozen=True)
class Place:
    """Where a request's row begins: in a free row of the cache, which knows so many of its tokens
    once they have been copied from the row `source`."""

    slot: int
    known: int = 0
    source: int | None = None


@dataclass
class Slots:
    """Of each row of the cache: who has it, or what an ended request left there."""

    count: int
    used: dict[int, Row] = field(default_factory=dict)
    left: dict[int, list[int]] = field(default_factory=dict)
    """Texts of free rows, that of the row which was freed last at the end."""

    @property
    def free(self) -> list[int]:
        """Free rows: those that hold nothing, then the others, the oldest text first."""
        empty = [each for each in range(self.count) if each not in self.used | self.left]
        return [*empty, *self.left]

    def take(self, row: Row) -> None:
        self.left.pop(row.slot, None)
        self.used[row.slot] = row

    def give(self, row: Row) -> None:
        """The row has ended. What the cache holds of its text may serve another."""
        del self.used[row.slot]
        if row.settled:
            self.left[row.slot] = row.tokens[: row.settled]

    def place(self, prompt: Sequence[int]) -> Place | None:
        """Where to put a prompt; None: no row is free, or a text that it shares is worth waiting
        for."""
        free = self.free
        if not free:
            return None
        texts = self.left | {slot: row.tokens[: row.settled] for slot, row in self.used.items()}
        shared = {slot: shared_length(text, prompt) for slot, text in texts.items()}
        source = max(shared, key=shared.__getitem__, default=None)
        if self._comes(prompt, shared[source] if source is not None else 0):
            return None
        if source is None or not shared[source]:
            return Place(free[0])
        known, others = shared[source], [slot for slot in free if slot != source]
        if source in self.left and (known >= MOSTLY * len(texts[source]) or not others):
            return Place(source, known)
        return Place(others[0], known, source)

    def _comes(self, prompt: Sequence[int], known: int) -> bool:
        """Whether a row is about to read more of the prompt than any row knows."""
        for row in self.used.values():
            if row.reading and row.settled >= known:
                shared = min(shared_length(row.tokens, prompt), len(prompt) - 1)
                if shared >= WORTH and shared > row.settled:
                    return True
        return False
