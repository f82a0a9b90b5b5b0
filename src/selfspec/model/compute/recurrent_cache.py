"""A cache whose recurrent layers keep what entered at the last tokens, and two states a row.

A rollback stays a smaller length. A layer that is to go on at a token has a state there, or takes
the latest one before it and applies the entries between them once more: no product is run again,
and the bits are those of the first time. One state stays where the row can return to (what is
settled, at which every round begins), the other goes on with drafts. Who is
further back than the entries reach begins anew: a rollback gives a smaller length then. Trees are
not for it. Does not know what a state is made of.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .cache import KVCache, RowSpan, TokenLayout
from .memory import CacheShape
from .recurrence import RecurrentSize

REACH = 96  # tokens whose entries are kept
LONGEST = 64  # a draft, so that a round's tokens are among them
_UNKNOWN, _ZEROS = -1, -1  # a place; and instead of a buffer the state before the first token


@dataclass(frozen=True)
class Stretch:
    """Tokens [first, end) of a row, from one buffer of states to another. `again`: their entries
    are kept already, and nothing but the state is wanted."""

    first: int
    end: int
    source: int
    target: int
    again: bool = False


class Memory:
    """What one recurrent layer keeps of every row."""

    def __init__(self, size: RecurrentSize, rows: int, device: torch.device) -> None:
        self.size = size
        self.entries = torch.zeros(rows, REACH, size.entry, device=device)
        shape = (rows, 2, size.heads, size.key, size.value)
        self.states = torch.zeros(shape, device=device)
        # of each row: up to which token each of its two states goes, which our kernels write down
        # too, and the end of the last entry
        self.places = array("q", [_UNKNOWN, _UNKNOWN] * rows)
        self._ends = [0] * rows

    def reserve_rows(self, rows: int) -> None:
        more = rows - len(self._ends)
        if more <= 0:
            return
        for name in ("entries", "states"):
            old: Tensor = getattr(self, name)
            setattr(self, name, torch.cat([old, old.new_zeros(more, *old.shape[1:])]))
        self.places = self.places + array("q", [_UNKNOWN, _UNKNOWN] * more)
        self._ends += [0] * more

    def stretches(self, row: int, first: int, end: int, settled: int) -> Iterator[Stretch]:
        """How to go from where the row stands to tokens [first, end). What is written to counts as
        unknown until the next one is asked for, in case of an interruption."""
        for stretch in self.planned(row, first, end, settled):
            place = 2 * row + stretch.target
            self.places[place] = _UNKNOWN
            yield stretch
            self.places[place] = stretch.end

    def planned(self, row: int, first: int, end: int, settled: int) -> list[Stretch]:
        """The same for whoever writes down by himself what becomes of the states."""
        if first == 0:  # of whatever text there was
            self.places[2 * row] = self.places[2 * row + 1] = _UNKNOWN
            self._ends[row] = 0
        places, found = self._places_of(row), list[Stretch]()
        source = self._buffer_at(places, first)
        if source is None:
            base = self._latest(places, row, first)
            assert base is not None, f"row {row}: the layer's state at {first} is lost"
            begin = 0 if base == _ZEROS else places[base]
            source = 1 - base if base != _ZEROS else 0
            found.append(Stretch(begin, first, base, source, again=True))
            places[source] = first
        kept = self._latest(places, row, min(first, settled))
        place = 0 if kept in (None, _ZEROS) else places[kept or 0]
        if kept is None or first <= settled or end - place > REACH - self.size.taps:
            kept = source
        target = 1 - kept if kept != _ZEROS else max(source, 0)
        found.append(Stretch(first, end, source, target))
        self._ends[row] = max(self._ends[row], end)
        return found

    def state_of(self, row: int) -> tuple[int, ...]:
        """What `planned` depends on."""
        return (*self._places_of(row), self._ends[row])

    def _places_of(self, row: int) -> list[int]:
        return self.places[2 * row : 2 * row + 2].tolist()

    def _buffer_at(self, places: Sequence[int], place: int) -> int | None:
        if place == 0 or not self.size.heads:
            return _ZEROS
        return places.index(place) if place in places else None

    def go_on(self, row: int, stretch: Stretch) -> tuple[Tensor, Tensor]:
        """The state before a stretch, and where the one behind it goes, (heads, key, value)."""
        state = self.states[row, stretch.target]
        if stretch.source == _ZEROS:
            return state.zero_(), state
        return self.states[row, stretch.source], state

    def _latest(self, places: Sequence[int], row: int, place: int) -> int | None:
        """The buffer of the latest state that can be brought to a place."""
        found = [(at, buffer) for buffer, at in enumerate(places) if 0 <= at <= place]
        at, buffer = max([*found, (0, _ZEROS)])
        return buffer if self._reaches(row, at) or at == place == 0 else None

    def _reaches(self, row: int, place: int) -> bool:
        """Whether what the convolution reads there is kept."""
        return max(0, place - self.size.taps + 1) >= self._ends[row] - REACH

    def returns(self, row: int, place: int) -> bool:
        """Whether the layer can go on at a place. One that has not come so far stands where it was.
        States behind it need not be forgotten: who goes on from there overwrites them."""
        place = min(place, self._ends[row])
        if place == 0:
            return True
        if not self.size.heads:  # what the convolution reads is all
            return self._reaches(row, place)
        return (
            self._reaches(row, place) and self._latest(self._places_of(row), row, place) is not None
        )

    def before(self, row: int, first: int, count: int) -> Tensor:
        """Entries of the `count` tokens before one, zeros before the text."""
        known = min(count, first)
        slots = [place % REACH for place in range(first - known, first)]
        found = self.entries[row, slots]
        return torch.cat([found.new_zeros(count - known, found.shape[1]), found])

    def keep(self, row: int, first: int, entries: Tensor) -> None:
        """Keep the last of these entries, the first of which is a token's."""
        cut = max(0, len(entries) - REACH)
        slots = [place % REACH for place in range(first + cut, first + len(entries))]
        self.entries[row, slots] = entries[cut:]

    def copy(self, source: int, target: int) -> None:
        self.entries[target], self.states[target] = self.entries[source], self.states[source]
        self.places[2 * target : 2 * target + 2] = self.places[2 * source : 2 * source + 2]
        self._ends[target] = self._ends[source]

    def assume(self, length: int) -> None:
        self.places = array("q", [length, _UNKNOWN] * len(self._ends))
        self._ends = [length] * len(self._ends)

    @property
    def bytes(self) -> int:
        return self.entries.nbytes + self.states.nbytes


class RecurrentCache(KVCache):
    """Keys and values of the layers that attend, and memories of those that go on."""

    def __init__(
        self,
        shape: CacheShape,
        keyless: int,
        recurrent: int,
        size: RecurrentSize,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        unread: bool = False,
    ) -> None:
        """`shape`: of all layers, of which so many keep no keys, and so many are recurrent."""
        layers, rows, heads, width = shape
        own = layers - keyless, rows, heads, width
        super().__init__(own, capacity, dtype, device, keyless, unread)
        self._settled = [0] * rows
        self.memories = [Memory(size, rows, device) for _ in range(recurrent)]

    def stretches(self, index: int, row: int, first: int, count: int) -> Iterator[Stretch]:
        """How the recurrent layer of that index goes on with so many tokens."""
        return self.memories[index].stretches(row, first, first + count, self._settled[row])

    def planned(self, index: int, span: RowSpan) -> list[Stretch]:
        """The same for whoever writes down by himself what becomes of the states."""
        end = span.first + span.count
        return self.memories[index].planned(span.row, span.first, end, self._settled[span.row])

    def reserve_rows(self, rows: int) -> None:
        super().reserve_rows(rows)
        self._settled += [0] * (rows - len(self._settled))
        for memory in self.memories:
            memory.reserve_rows(rows)

    def layout(
        self, counts: Sequence[int], parents: Sequence[Sequence[int]] | None = None
    ) -> TokenLayout:
        assert parents is None, "recurrent layers read chains"
        return super().layout(counts)

    def rollback(self, row: int, length: int) -> None:
        """Forget what lies beyond `length`, or everything, if a layer cannot return there."""
        if length < max(self._lengths[row]) and not self._returns(row, length):
            length = 0
        super().rollback(row, length)
        self._settled[row] = min(length, self._settled[row])

    def settle(self, row: int, length: int) -> None:
        self._settled[row] = length

    def _returns(self, row: int, place: int) -> bool:
        return all(memory.returns(row, place) for memory in self.memories)

    def copy(self, source: int, target: int, length: int) -> None:
        super().copy(source, target, length)
        for memory in self.memories:
            memory.copy(source, target)
        self._settled[target] = self._settled[source]
        if not self._returns(target, length):
            super().rollback(target, 0)
            self._settled[target] = 0

    def assume(self, length: int) -> None:
        super().assume(length)
        self._settled = [length] * self.rows
        for memory in self.memories:
            memory.assume(length)

    def keep(self, row: int, first: int, path: Sequence[int]) -> None:
        assert list(path) == list(range(len(path))), "recurrent layers read chains"
        super().keep(row, first, path)

    @property
    def bytes(self) -> int:
        return super().bytes + sum(memory.bytes for memory in self.memories)
