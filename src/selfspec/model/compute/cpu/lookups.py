"""What lookups know of one row's text, held by kernels, and the tree of guesses that they grow from
it. The drafters say by which rules, and draft by the same ones without kernels. Knows no drafter.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Mapping, Sequence
from ctypes import c_double, c_int64, c_void_p
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor

from .interface import address
from .native import NoNative, compiled

_SOURCE = Path(__file__).with_name("lookups.cpp")
_MOST_FACTORS = _MOST_CONTEXT = 8  # as in lookups.cpp
WITHDRAWN = 64  # how many last tokens of a text may be replaced by others
_UNTOLD = 64  # trees that kernels have not heard of, at most
Counted = tuple[Tensor, Tensor, Tensor]
"""Contexts of one size: sorted keys (n,) as int64, their tokens (n, each) as uint16, and these
ones' chances as float16; or as int32 and float32."""


class FactorsStruct(ctypes.Structure):
    _fields_ = [("count", c_int64), ("of", c_double * _MOST_FACTORS)]


class CountedStruct(ctypes.Structure):
    _fields_ = [
        *((name, c_int64) for name in ("count", "width", "wide")),
        *((name, c_void_p) for name in ("keys", "tokens", "chances")),
    ]


_COUNTED, _TWO = CountedStruct * 3, c_double * 2


class RulesStruct(ctypes.Structure):
    """Fields are named and explained in lookups.cpp."""

    _fields_ = [
        *((name, c_int64) for name in ("shortest", "longest", "branches", "look_back")),
        *((name, FactorsStruct) for name in ("matched", "followed")),
        *((name, c_int64) for name in ("successors", "paired", "kept")),
        *((name, FactorsStruct) for name in ("pair", "single")),
        ("vocabulary", c_int64),
        ("counted", _COUNTED),
        *((name, _TWO) for name in ("factors", "powers")),
        ("surest", c_double),
        *((name, c_double) for name in ("start", "doubt", "teaches", "least")),
        ("reach", c_int64),
    ]


_KINDS = {field[0]: field[1] for field in RulesStruct._fields_}


class Rules:
    """By which rules lookups of some rows guess: numbers by the names of `RulesStruct`."""

    def __init__(self, native: ctypes.PyDLL, numbers: Mapping[str, Any]) -> None:
        assert numbers["reach"] <= _MOST_CONTEXT and numbers["shortest"] <= numbers["longest"]
        self.native, self.struct = native, RulesStruct()
        self._counted: Sequence[Counted] = numbers["counted"]  # held here: kernels know addresses
        for name, kind in _KINDS.items():
            setattr(self.struct, name, _as_field(kind, numbers[name]))


def _as_field(kind: Any, value: Any) -> Any:
    if kind is FactorsStruct:
        return FactorsStruct(len(value), (c_double * _MOST_FACTORS)(*value))
    if kind is _COUNTED:
        return _COUNTED(*map(_counted, value))
    return _TWO(*value) if kind is _TWO else value


def _counted(tensors: Counted) -> CountedStruct:
    keys, tokens, chances = tensors
    assert tokens.itemsize == chances.itemsize
    wide = tokens.itemsize > 2
    return CountedStruct(len(keys), tokens.shape[1], wide, *map(address, tensors))


def rules(parts: Sequence[Mapping[str, Any] | None]) -> Rules | None:
    """The rules that several sources give the numbers of. None: these are not all that kernels
    need, or there are no kernels here."""
    numbers = {name: value for part in parts for name, value in (part or {}).items()}
    native = _native() if set(numbers) == set(_KINDS) else None
    return None if native is None else Rules(native, numbers)


class Lookups:
    """One row. None of its guesses' paths is less likely than `least`."""

    def __init__(self, rules: Rules, prompt: Sequence[int], least: float = 0.0) -> None:
        self._rules, self.native, self.least, self._known = rules, rules.native, least, 0
        self._learned = 0  # rounds of which kernels know all that they will be told
        self._untold: list[tuple[int, Sequence[int], Sequence[int], Sequence[Sequence[int]]]] = []
        self._row: int = self.native.begin(rules.struct)
        tokens = array("i", prompt)
        self.native.read(self._row, *tokens.buffer_info())

    def __del__(self) -> None:
        if row := getattr(self, "_row", None):
            self.native.end(row)

    @property
    def row(self) -> int:
        """What kernels know, once they have heard of all trees."""
        self._tell()
        return self._row

    def _tell(self) -> None:
        """Let kernels hear of the trees that they have not heard of. Until somebody asks they need
        not: of several rows few may be asked for guesses, and telling takes as long as guessing."""
        untold, self._untold = self._untold, []
        for before, tokens, parents, likeliest in untold:
            nodes, each = len(tokens), len(likeliest[0])
            tree = array("i", chain(tokens, parents))
            said = array("i", chain.from_iterable(likeliest))
            assert len(tree) == 2 * nodes and len(said) == each * nodes
            places = tree.buffer_info()[0], nodes, said.buffer_info()[0], each
            self.native.learn(self._row, before, *places)

    def surely_known(self, text: Sequence[int]) -> int:
        """How many of the text's first tokens are those that kernels saw last."""
        return max(0, min(self._known, len(text)) - WITHDRAWN)

    def went_on(self, known: int, rounds: int) -> None:
        """Kernels ran so many rounds by themselves (rounds.cpp), up to a text of which they saw so
        many tokens. They have learned of them, before they are told."""
        self._known, self._learned = known, rounds

    def guess(
        self,
        text: Sequence[int],
        most: int,
        floors: array[float] | None = None,
        lowest: array[float] | None = None,
    ) -> tuple[Sequence[int], Sequence[int], Sequence[float]]:
        """At most so many guesses at what follows the text, the likeliest path first: the number of
        each one's parent, 0 for the text's last token, its token, and its path's chance.
        `floors` and `lowest` are those of a price (core/price.py), as "d"."""
        row, first = self.row, self.surely_known(text)
        end = array("i", text[first:])
        self.native.enter(row, first, *end.buffer_info())
        self._known = len(text)
        guesses = array("i", [0]) * most, array("i", [0]) * most, array("d", [0.0]) * most
        numbers = floors, lowest, *guesses
        places = (None if some is None else some.buffer_info()[0] for some in numbers)
        count = self.native.guess(row, most, self.least, *places)
        parents, tokens, chances = guesses
        return parents[:count], tokens[:count], chances[:count]

    def learn(
        self,
        before: int | None,
        tokens: Sequence[int],
        parents: Sequence[int],
        likeliest: Sequence[Sequence[int]],
    ) -> None:
        """A tree that was verified, and the model's likeliest tokens behind each of its nodes.
        `before`: the token before the root."""
        if self._learned:
            self._learned -= 1
            return
        self._untold.append((-1 if before is None else before, tokens, parents, likeliest))
        if len(self._untold) >= _UNTOLD:
            self._tell()


@functools.cache
def _native() -> ctypes.PyDLL | None:
    """The kernels, if they can be had. Calls are short, so Python's lock is kept meanwhile: to ask
    for it anew may take longer than all of them."""
    try:
        library = compiled(_SOURCE)
    except NoNative:
        return None
    native = ctypes.PyDLL(str(_SOURCE), handle=library._handle)
    types: dict[str, tuple[Any, list[Any]]] = {
        "begin": (c_void_p, [ctypes.POINTER(RulesStruct)]),
        "end": (None, [c_void_p]),
        "enter": (None, [c_void_p, c_int64, c_void_p, c_int64]),
        "read": (None, [c_void_p, c_void_p, c_int64]),
        "learn": (None, [c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_int64]),
        "guess": (c_int64, [c_void_p, c_int64, c_double, *[c_void_p] * 5]),
    }
    for name, (result, arguments) in types.items():
        function = getattr(native, name)
        function.restype, function.argtypes = result, arguments
    return native
