"""Counting trained successors: what the model tends to say after a token and after a pair of
tokens, in text that it wrote.

For every context the probabilities that the model gave to its likeliest next tokens are added up
over all places, and divided by the number of places plus a half, so that a context that was met
once promises less. Nothing is trained by gradient; half an hour of the model's own text is of use.
Knows no part's folder and no drafting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import OptionError
from .states import States

PRIOR = 0.5
LEAST = 0.01  # successors less likely than this are not kept: a draft of one would be in vain
Array = np.ndarray[Any, Any]
Guess = Callable[[tuple[int, ...]], Sequence[tuple[int, float]]]


@dataclass(frozen=True)
class CountOptions:
    """How much of a table is kept."""

    pairs: int = 100_000
    """How many pairs of tokens the table keeps: those that were met most often."""
    after_token: int = 7
    """How many successors the table keeps of a single token."""
    after_pair: int = 4
    """How many successors the table keeps of a pair of tokens."""

    def __post_init__(self) -> None:
        for name in ("pairs", "after_token", "after_pair"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name}={getattr(self, name)} would keep nothing; use 1 or more")


@dataclass(frozen=True)
class Seen:
    """Every place at which the model's choice is known: the token before the last, the last, and
    the model's likeliest next tokens, (places, top), with their probabilities."""

    before: Array
    last: Array
    tokens: Array
    chances: Array


def places(states: States, numbers: Sequence[int]) -> Seen:
    """The places of some conversations."""
    found = [_places_of(states, number) for number in numbers]
    before, last, tokens, chances = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
    return Seen(before, last, tokens, chances)


def _places_of(states: States, number: int) -> tuple[Array, Array, Array, Array]:
    batch = states.batch([number])
    tokens, chances = batch["tokens"][0].numpy().astype(np.int64), batch["chances"][0].numpy()
    where = np.flatnonzero(chances[:, 0])
    where = where[where > 0]
    return (
        tokens[where - 1],
        tokens[where],
        batch["ids"][0].numpy()[where].astype(np.int64),
        chances[where].astype(np.float64),
    )


def count(seen: Seen, vocabulary: int, options: CountOptions) -> dict[str, Tensor]:
    """The tensors of a part, see `model/successors.py`."""
    singles = _table(seen.last, seen, vocabulary, options.after_token, vocabulary)
    pairs = _table(
        seen.before * vocabulary + seen.last, seen, vocabulary, options.after_pair, options.pairs
    )
    named = {"tokens": singles, "pairs": pairs}
    small = torch.uint16 if vocabulary <= 1 << 16 else torch.int32
    tensors = {}
    for name, (keys, successors, chances) in named.items():
        tensors[f"{name}.keys"] = torch.from_numpy(keys)
        tensors[f"{name}.successors"] = torch.from_numpy(successors).to(small)
        tensors[f"{name}.chances"] = torch.from_numpy(chances).half()
    return tensors


def _table(
    contexts: Array, seen: Seen, vocabulary: int, kept: int, most: int
) -> tuple[Array, Array, Array]:
    """Contexts in order, (n,), and of each its successors and their chances, (n, kept), filled up
    with chances of 0."""
    keys, index, times = np.unique(contexts, return_inverse=True, return_counts=True)
    often = np.sort(np.argsort(-times, kind="stable")[:most])
    new = np.full(len(keys), -1)
    new[often] = np.arange(len(often))
    top = seen.tokens.shape[1]
    owner = np.repeat(new[index], top)
    valid = (owner >= 0) & (seen.chances.reshape(-1) > 0)
    pairs, where = np.unique(
        owner[valid] * vocabulary + seen.tokens.reshape(-1)[valid], return_inverse=True
    )
    weight = np.bincount(where, weights=seen.chances.reshape(-1)[valid])
    owner, token = np.divmod(pairs, vocabulary)
    chance = weight / (times[often][owner] + PRIOR)
    order = np.lexsort((-chance, owner))
    owner, token, chance = owner[order], token[order], chance[order]
    rank = np.arange(len(owner)) - np.searchsorted(owner, owner)
    keep = (rank < kept) & (chance >= LEAST)
    successors, chances = np.zeros((len(often), kept), dtype=np.int64), np.zeros((len(often), kept))
    successors[owner[keep], rank[keep]] = token[keep]
    chances[owner[keep], rank[keep]] = chance[keep]
    return keys[often], successors, chances


def measure(
    guess: Guess, states: States, numbers: Sequence[int], depths: int = 4
) -> tuple[float, ...]:
    """By depth: how often the best guess is the text's own next token, among those whose
    predecessors were."""
    tried, right = np.zeros(depths), np.zeros(depths)
    for number in numbers:
        tokens = states.batch([number])["tokens"][0].tolist()
        for end in _ends(states, number):
            for depth in range(min(depths, len(tokens) - end)):
                context = tuple(tokens[end + depth - 2 : end + depth])
                known = guess(context) or guess(context[-1:])
                tried[depth] += 1
                if not known or max(known, key=lambda each: each[1])[0] != tokens[end + depth]:
                    break
                right[depth] += 1
    return tuple((right / np.maximum(tried, 1)).tolist())


def _ends(states: States, number: int) -> Iterator[int]:
    """Where the text may end that is guessed on: at every token of the answer but its first."""
    _, first, stop, begin = states.where[number]
    return iter(range(max(2, begin + 1), stop - first))
