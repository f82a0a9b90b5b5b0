"""Caches of past conversations, so that a following turn reads only what is new. One that is in use
is not in here."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..model.compute.cache import KVCache


@dataclass
class ChatCaches:
    """The last few conversations: their tokens and the cache that holds them."""

    most: int = 2
    _kept: list[tuple[list[int], KVCache]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, prompt: Sequence[int]) -> KVCache | None:
        """The cache that shares the longest beginning with the prompt, rolled back to it; it is the
        caller's until given back."""
        with self._lock:
            shared = [_shared(tokens, prompt) for tokens, _ in self._kept]
            if not shared or max(shared) == 0:
                return None
            best = shared.index(max(shared))
            _, cache = self._kept.pop(best)
        cache.rollback(0, max(shared))
        return cache

    def give(self, known: list[int], cache: KVCache) -> None:
        """`known`: what the cache holds for good. Rejected drafts may lie behind it."""
        if known:
            cache.rollback(0, len(known))
            with self._lock:
                self._kept = [*self._kept, (known, cache)][-self.most :]


def _shared(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two texts have in common at their beginning."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((index for index, (x, y) in pairs if x != y), min(len(a), len(b)))
