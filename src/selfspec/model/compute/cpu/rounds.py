"""Several rounds of one row in one call: lookups guess, or nobody does, and a whole model verifies,
both by our kernels (rounds.cpp). Knows neither the engine nor what it makes of a round.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Callable, Collection, Sequence
from ctypes import Array, c_double, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard, cast

import torch

from ....core.price import Price
from ..cache import KVCache
from ..plan import LayerPlan
from ..rope import Angles
from .fused import FusedModel
from .interface import (
    CallStruct,
    GivenStruct,
    RopeStruct,
    SightStruct,
    WhereStruct,
    half_numbers,
    room_of,
)
from .lookups import Lookups
from .moving import moving_kernel, where_row
from .native import function_of, library

_SOURCE = Path(__file__).with_name("rounds.cpp")
ROUNDS = 8  # for so many there is room at least
Ropes = tuple[Sequence[Angles | None], Array[RopeStruct]]
"""As `FusedHalves.tables` gives them."""


@dataclass(frozen=True)
class Asked:
    """What rounds are asked for. All of the text but its last token is in the cache."""

    text: Sequence[int]
    room: int  # tokens that may still come
    ends: Collection[int]  # tokens that end the text
    most: int  # guesses of a round
    price: Price | None
    ranks: int  # so many of the likeliest tokens are wanted of every node
    rounds: int  # at most
    seconds: float  # after which none begins, but the first
    angles: int  # by how many positions the model can rotate now


@dataclass(frozen=True)
class Round:
    """What a round consisted of: a tree, the likeliest tokens behind each of its nodes, and what
    guessing and the pass took, in seconds. What was kept lies together in the cache."""

    tokens: Sequence[int]
    parents: Sequence[int]
    best: Sequence[Sequence[int]]
    guessing: float
    passing: float

    @property
    def seconds(self) -> float:
        return self.guessing + self.passing


class GuessingStruct(ctypes.Structure):
    """Fields are named and explained in rounds.cpp, like those of the next ones."""

    _fields_ = [
        *((name, c_void_p) for name in ("row", "enter", "guess", "learn")),
        ("most", c_int64),
        ("least", c_double),
        *((name, c_void_p) for name in ("floors", "lowest", "costs")),
    ]


class PassingStruct(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("run_model", "ends", "halves", "numbers")),
        ("count", c_int64),
        *((name, c_void_p) for name in ("call", "given")),
        ("threads", c_int64),
        *((name, c_void_p) for name in ("slots", "positions", "stops", "first_extra", "extras")),
        ("best", c_void_p),
        ("ranks", c_int64),
    ]


class MovingStruct(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("move", "keys", "values")),
        *((name, c_int64) for name in ("layers", "layer_stride", "heads", "head_stride", "slot")),
    ]


class TextStruct(ctypes.Structure):
    _fields_ = [
        ("tokens", c_void_p),
        *((name, c_int64) for name in ("first", "length", "known", "room", "slots")),
        ("ends", c_void_p),
        ("end_count", c_int64),
    ]


class ToldStruct(ctypes.Structure):
    _fields_ = [
        ("width", c_int64),
        *((name, c_void_p) for name in ("nodes", "tokens", "parents", "best", "seconds")),
    ]


def fits(model: object, cache: KVCache) -> TypeGuard[FusedModel]:
    """Whether rounds of this model can be run here: it reads all of the text in each layer, and the
    way back is a smaller length."""
    if type(cache) is not KVCache or not isinstance(model, FusedModel) or model.ends.entry:
        return False
    halves = model.halves
    return halves.windows == [None] and not halves.recurrent and _rounds() is not None


def run_rounds(
    model: FusedModel,
    plan: LayerPlan,
    cache: KVCache,
    row: int,
    lookups: Lookups | None,
    asked: Asked,
) -> list[Round]:
    """The rounds that there were, none where the first one has no room in the cache or a guess that
    is no token. `row`: of the cache. `lookups`: None if nobody guesses."""
    ranks, ropes = min(asked.ranks, model.ends.head.outputs), model.halves.tables()
    runner = cache.runner
    if not isinstance(runner, _Runner) or not runner.suits(model, ropes, row, ranks, asked):
        runner = cache.runner = _Runner(model, plan, cache, ropes, row, ranks, asked)
    return runner.run(lookups, asked)


class _Runner:
    """Rounds of one row, as long as all that they read stays where it is. To tell kernels anew
    where everything lies takes longer than a round does beside its pass."""

    def __init__(
        self,
        model: FusedModel,
        plan: LayerPlan,
        cache: KVCache,
        ropes: Ropes,
        row: int,
        ranks: int,
        asked: Asked,
    ) -> None:
        run, move = _rounds(), moving_kernel()
        assert run is not None and move is not None
        self._run, self._model, self._ropes, self._room = run, model, ropes, cache.room
        self._row, self._ranks, self._rounds = row, ranks, max(ROUNDS, asked.rounds)
        self._nodes = nodes = 1 + asked.most
        best = (c_int64 * (nodes * ranks))()
        states = torch.empty((nodes, model.ends.head.inputs))
        logits = torch.empty((nodes, model.ends.head.outputs))
        given = GivenStruct(states.data_ptr(), logits.data_ptr(), *_where(best), ranks)
        rows, zeros, slots, positions, stops = ((c_int64 * nodes)() for _ in range(5))
        rows[:] = [row] * nodes
        starts, paths = (c_int64 * (nodes + 1))(), (c_int64 * (nodes * (nodes + 1) // 2))()
        sight = SightStruct(*_where(rows, zeros, stops, starts, paths))
        call = CallStruct(
            *states.shape,
            WhereStruct(*_where(rows, slots, positions)),
            *_where(ropes[1], sight),
            *room_of(cache),
            states.data_ptr(),
        )
        numbers = half_numbers(plan)
        self._passing = PassingStruct(
            _address(library(), "run_model"),
            *_where(model.ends.struct, model.halves.structs, numbers),
            len(numbers),
            *_where(call, given),
            torch.get_num_threads(),
            *_where(slots, positions, stops, starts, paths, best),
            ranks,
        )
        self._moving = MovingStruct(
            ctypes.cast(cast(Any, move), c_void_p), *where_row(*cache.room, row)
        )
        size = self._rounds * nodes
        self._counts, self._seconds = (c_int64 * self._rounds)(), (c_double * (2 * self._rounds))()
        self._tokens, self._parents = (c_int64 * size)(), (c_int64 * size)()
        self._best = (c_int64 * (size * ranks))()
        told = self._counts, self._tokens, self._parents, self._best, self._seconds
        self._told = ToldStruct(nodes, *_where(*told))
        self._read = states, logits, given, zeros, sight, call, numbers  # by address only, like
        self._written = best, rows, slots, positions, stops, starts, paths

    def suits(self, model: FusedModel, ropes: Ropes, row: int, ranks: int, asked: Asked) -> bool:
        """Whether all lies where it did, and there is room for as much. A cache that moves forgets
        what ran rounds in it."""
        same = self._model is model and self._ropes is ropes
        enough = asked.most < self._nodes and asked.rounds <= self._rounds
        return same and enough and (self._row, self._ranks) == (row, ranks)

    def run(self, lookups: Lookups | None, asked: Asked) -> list[Round]:
        """As they are asked for."""
        length, price = len(asked.text), asked.price
        known = lookups.surely_known(asked.text) if lookups else length
        first = max(0, min(known, length - 2))  # the token before the last one is looked at
        room = [0] * (asked.rounds * (1 + asked.most))
        tokens, ends = array("i", [*asked.text[first:], *room]), array("q", asked.ends)
        text = TextStruct(
            tokens.buffer_info()[0],
            *(first, length, known, asked.room, min(self._room[0].shape[3], asked.angles)),
            *ends.buffer_info(),
        )
        bars = [array("d", s) for s in (price.floors, price.lowest, price.costs)] if price else []
        guessing = GuessingStruct()
        if lookups:
            guessing = GuessingStruct(
                lookups.row,
                *(_address(lookups.native, name) for name in ("enter", "guess", "learn")),
                asked.most,
                lookups.least,
                *(each.buffer_info()[0] for each in bars),
            )
        self._passing.threads = torch.get_num_threads()
        count = self._run(
            guessing, self._passing, self._moving, text, self._told, asked.rounds, asked.seconds
        )
        if lookups:
            lookups.went_on(text.known, count)
        return list(map(self._round, range(count)))

    def _round(self, number: int) -> Round:
        first, ranks = number * self._nodes, self._ranks
        end = first + self._counts[number]
        best = [self._best[node * ranks : (node + 1) * ranks] for node in range(first, end)]
        seconds = self._seconds[2 * number : 2 * number + 2]
        return Round(self._tokens[first:end], self._parents[first:end], best, *seconds)


def _where(*things: Any) -> list[int]:
    return [ctypes.addressof(each) for each in things]


@functools.cache
def _address(kernels: ctypes.CDLL, name: str) -> int | None:
    return ctypes.cast(kernels[name], c_void_p).value


@functools.cache
def _rounds() -> Callable[..., int] | None:
    structs = GuessingStruct, PassingStruct, MovingStruct, TextStruct, ToldStruct
    types = (*map(ctypes.POINTER, structs), c_int64, c_double)
    return function_of(_SOURCE, "rounds", c_int64, *types)
