"""Caches of past conversations, so that the next turn reads only what is new.

A cache that is in use is not in here.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..model.compute.cache import KVCache


@dataclass
class ChatCaches:
    """The last few conversations, each with its tokens and its cache."""

    limit: int = 2
    _kept: list[tuple[list[int], KVCache]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, prompt: Sequence[int]) -> KVCache | None:
        """The cache that shares the longest beginning with the prompt, rolled back to it.

        It belongs to the caller until it is given back.
        """
        with self._lock:
            shared = [shared_length(tokens, prompt) for tokens, _ in self._kept]
            if not shared or max(shared) == 0:
                return None
            best = shared.index(max(shared))
            _, cache = self._kept.pop(best)
        cache.rollback(0, max(shared))
        return cache

    def give(self, tokens: list[int], cache: KVCache) -> None:
        """Keep a cache for these tokens. An interrupted round may have left drafts behind them."""
        if tokens:
            cache.rollback(0, len(tokens))
            with self._lock:
                self._kept = [*self._kept, (tokens, cache)][-self.limit :]


def shared_length(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two texts share at their beginning."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((index for index, (x, y) in pairs if x != y), min(len(a), len(b)))
