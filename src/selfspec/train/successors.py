"""Counting trained successors: what the model says after a token, after two and after three.

For every context in text that the model wrote, the probabilities that it gave to its likeliest next
tokens are added up over all places, and divided by the number of places plus a half, so that a
context that was met once promises less. Knows no part's folder and no drafting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import OptionError
from ..trained.kinds import CONTEXTS
from .exit_adapter import MEASURED_DEPTHS, in_a_row
from .states import States

PRIOR = 0.5
LEAST = 0.01  # successors less likely than this are not kept, as drafting one would be in vain
Array = np.ndarray[Any, Any]
Guess = Callable[[Sequence[int]], Sequence[tuple[int, float]]]


@dataclass(frozen=True)
class CountOptions:
    """How much of a table is kept."""

    pairs: int = 70_000
    """How many pairs of tokens the table keeps: those that were met most often."""
    triples: int = 40_000
    """The same of three tokens in a row."""
    after_token: int = 7
    """How many successors the table keeps of a single token."""
    after_pair: int = 4
    """How many successors the table keeps of a pair of tokens, and of three."""

    def __post_init__(self) -> None:
        for name in vars(self):
            if getattr(self, name) < 1:
                raise OptionError(f"{name}={getattr(self, name)} would keep nothing; use 1 or more")


@dataclass(frozen=True)
class Seen:
    """Every place at which the model's choice is known."""

    earlier: Array  # the last token but two
    before: Array  # the last but one
    last: Array
    tokens: Array  # (places, top) the model's likeliest next tokens
    chances: Array  # their probabilities


def places(states: States, numbers: Sequence[int]) -> Seen:
    """The places of some conversations."""
    columns = []
    for number in numbers:
        batch = {name: values[0].numpy() for name, values in states.batch([number]).items()}
        tokens, chances = batch["tokens"].astype(np.int64), batch["chances"].astype(np.float64)
        where = np.flatnonzero(chances[:, 0])
        where = where[where > 1]
        likeliest = batch["ids"][where].astype(np.int64)
        context = (tokens[where - back] for back in (2, 1, 0))
        columns.append((*context, likeliest, chances[where]))
    return Seen(*(np.concatenate(arrays) for arrays in zip(*columns, strict=True)))


def count(seen: Seen, vocabulary: int, options: CountOptions) -> dict[str, Tensor]:
    """The tensors of a part, see `trained/successors.py`."""
    pairs = seen.before * vocabulary + seen.last
    triples = seen.earlier * vocabulary**2 + pairs
    named = {
        "tokens": _table(seen.last, seen, vocabulary, options.after_token, vocabulary),
        "pairs": _table(pairs, seen, vocabulary, options.after_pair, options.pairs),
        "triples": _table(triples, seen, vocabulary, options.after_pair, options.triples),
    }
    small = torch.uint16 if vocabulary <= 1 << 16 else torch.int32
    tensors = {}
    for name, (keys, successors, chances) in named.items():
        tensors[f"{name}.keys"] = torch.from_numpy(keys)
        tensors[f"{name}.successors"] = torch.from_numpy(successors).to(small)
        tensors[f"{name}.chances"] = torch.from_numpy(chances).half()
    return tensors


def _table(
    contexts: Array, seen: Seen, vocabulary: int, kept: int, limit: int
) -> tuple[Array, Array, Array]:
    """The `limit` most frequent contexts in order, (n,), and successors of each with their chances,
    (n, kept), filled up with chances of 0."""
    keys, index, times = np.unique(contexts, return_inverse=True, return_counts=True)
    often = np.sort(np.argsort(-times, kind="stable")[:limit])
    new = np.full(len(keys), -1)
    new[often] = np.arange(len(often))
    tokens, likely = seen.tokens.reshape(-1), seen.chances.reshape(-1)
    owner = np.repeat(new[index], seen.tokens.shape[1])
    valid = (owner >= 0) & (likely > 0)
    pairs, where = np.unique(owner[valid] * vocabulary + tokens[valid], return_inverse=True)
    weight = np.bincount(where, weights=likely[valid])
    owner, token = np.divmod(pairs, vocabulary)
    chance = weight / (times[often][owner] + PRIOR)
    order = np.lexsort((-chance, owner))
    owner, token, chance = owner[order], token[order], chance[order]
    rank = np.arange(len(owner)) - np.searchsorted(owner, owner)
    keep = (rank < kept) & (chance >= LEAST)
    successors = np.zeros((len(often), kept), dtype=np.int64)
    chances = np.zeros((len(often), kept))
    successors[owner[keep], rank[keep]] = token[keep]
    chances[owner[keep], rank[keep]] = chance[keep]
    return keys[often], successors, chances


def measure(guess: Guess, states: States, numbers: Sequence[int]) -> tuple[float, ...]:
    """By depth: how often the best guess is the text's own next token, if those before were."""
    counts = torch.zeros(2, MEASURED_DEPTHS, dtype=torch.long)
    for number in numbers:
        tokens = states.batch([number])["tokens"][0].tolist()
        hits = []
        # guesses begin at every token of the answer but its first
        for end in range(max(2, states.where[number].begin + 1), len(tokens)):
            guesses = guess(tokens[max(0, end - len(CONTEXTS)) : end])
            best = max(guesses, key=itemgetter(1), default=(None, 0.0))
            hits.append([best[0] == tokens[end]])
        row = torch.tensor(hits).T
        counts += torch.stack(in_a_row(row, torch.ones_like(row)))
    return tuple(right / max(1, tried) for tried, right in counts.T.tolist())
