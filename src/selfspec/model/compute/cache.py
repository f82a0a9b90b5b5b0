"""KVCache: rows x layers x positions, with a length per row and layer. Rollback is a smaller
length.

Nothing is copied or cleared on rejection: entries past a length are never looked at and are
overwritten later. A tree of drafts is the exception: `keep` moves the few accepted entries
together. What this module does not know: models, drafting.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .memo import Memo
from .memory import CacheShape, room_for
from .moving import move
from .windows import Window, reach

CHUNK = 512  # capacity grows by whole chunks

_TENSORS = ("rows", "slots", "positions", "stops")  # of a layout


@dataclass(frozen=True)
class RowSpan:
    """`count` new tokens of one row from slot `first` on."""

    row: int
    first: int
    count: int


@dataclass(frozen=True)
class Visibility:
    """What queries see in layers of one window: slots [start, stop), then the listed extras."""

    starts: Tensor
    stops: Tensor
    first_extra: Tensor | None
    extras: Tensor | None


@dataclass(frozen=True)
class TokenLayout(Memo):
    """Where each token of a call sits: its row, the slot its key goes to, its position, and what it
    sees.

    In a chain a token sees all slots of its row up to its own. In a tree it sees the row's
    committed slots, [0, stop), and its ancestors. Position is depth, so the branches of a tree
    share positions but not slots.
    """

    spans: tuple[RowSpan, ...]
    rows: Tensor  # (tokens,) long, like the next three
    slots: Tensor
    positions: Tensor
    stops: Tensor
    # slots, the token's own last; None for chains
    ancestors: tuple[tuple[int, ...], ...] | None = None

    @staticmethod
    def chains(spans: Sequence[RowSpan]) -> TokenLayout:
        spans = tuple(s for s in spans if s.count)
        rows, slots = list[int](), list[int]()
        for span in spans:
            rows += [span.row] * span.count
            slots += range(span.first, span.first + span.count)
        return ListedLayout(spans, rows, slots, slots, [slot + 1 for slot in slots])

    @staticmethod
    def trees(spans: Sequence[RowSpan], parents: Sequence[Sequence[int]]) -> TokenLayout:
        """`parents[i]`: for each token of span i its parent's index, -1 for the first."""
        rows, slots, positions, stops = list[int](), list[int](), list[int](), list[int]()
        ancestors: list[tuple[int, ...]] = []
        for span, family in zip(spans, parents, strict=True):
            paths: list[tuple[int, ...]] = []
            for index, parent in enumerate(family):
                assert -1 <= parent < index, "a parent comes before its children"
                own = span.first + index
                paths.append((*(paths[parent] if parent >= 0 else ()), own))
                slots.append(own)
                positions.append(span.first + len(paths[-1]) - 1)
            rows += [span.row] * len(paths)
            stops += [span.first] * len(paths)
            ancestors += paths
        return ListedLayout(tuple(spans), rows, slots, positions, stops, tuple(ancestors))

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def numbers(self) -> array[int] | None:
        """Rows, slots, positions and stops, one after the other, if they lie so."""
        return None

    @property
    def pieces(self) -> list[tuple[RowSpan, slice]]:
        """The spans, each with where its tokens are among all."""
        ends = accumulate(span.count for span in self.spans)
        return [(s, slice(end - s.count, end)) for s, end in zip(self.spans, ends, strict=True)]

    def select(self, tokens: Sequence[int]) -> TokenLayout:
        """The layout of some of the tokens, in their order."""
        index = torch.tensor(tokens)
        rows, slots = self.rows[index], self.slots[index]
        spans: list[RowSpan] = []
        for row, slot in zip(rows.tolist(), slots.tolist(), strict=True):
            last = spans[-1] if spans else None
            if last is not None and last.row == row and last.first + last.count == slot:
                spans[-1] = replace(last, count=last.count + 1)
            else:
                spans.append(RowSpan(row, slot, 1))
        ancestors = self.ancestors
        return TokenLayout(
            tuple(spans),
            rows,
            slots,
            self.positions[index],
            self.stops[index],
            None if ancestors is None else tuple(ancestors[token] for token in tokens),
        )

    def on(self, device: torch.device) -> TokenLayout:
        """The same with its tensors on a device, where what is seen is worked out too."""
        if self.rows.device == device:
            return self
        moved = {name: getattr(self, name).to(device) for name in _TENSORS}
        return replace(self, **moved)

    def visible(self, window: Window | None) -> Visibility:
        """What is seen with this window. It goes by position, not by slot."""
        return self.once(("visible", window), lambda: self._visible(window))

    def _visible(self, window: Window | None) -> Visibility:
        starts = torch.zeros_like(self.slots)
        if window is not None:
            starts = (self.positions - reach(window, self.positions) + 1).clamp_(min=0)
        first_extra = extras = None
        listed = self.listed(window)
        if listed is not None:
            first_extra, extras = map(torch.tensor, listed)
        return Visibility(starts, self.stops, first_extra, extras)

    def listed(self, window: Window | None) -> tuple[list[int], list[int]] | None:
        """The slots that tokens see beside [start, stop), one token's after the other's, and before
        them where those of each token begin and end. None if there are none."""
        beside = self._seen_beside(window)
        if beside is None:
            return None
        ends, slots = [0], list[int]()
        for path in beside:
            slots += path
            ends.append(len(slots))
        return ends, slots

    def _seen_beside(self, window: Window | None) -> Sequence[Sequence[int]] | None:
        """Those of each token: its ancestors, itself last."""
        if self.ancestors is None or window is None:
            return self.ancestors
        paths = zip(self.ancestors, self.positions.tolist(), strict=True)
        return [path[-reach(window, position) :] for path, position in paths]


class ListedLayout(TokenLayout):
    """The same from lists. Tensors are made of them when somebody asks: our kernels do not."""

    def __init__(
        self,
        spans: tuple[RowSpan, ...],
        rows: list[int],
        slots: list[int],
        positions: list[int],
        stops: list[int],
        ancestors: tuple[tuple[int, ...], ...] | None = None,
    ) -> None:
        self.__dict__.update(
            spans=spans, ancestors=ancestors, _kept={}, _lists=(rows, slots, positions, stops)
        )

    def __len__(self) -> int:
        rows: list[int] = self.__dict__["_lists"][0]
        return len(rows)

    @property
    def numbers(self) -> array[int]:
        numbers: array[int] | None = self.__dict__.get("_numbers")
        if numbers is None:
            made = array("q", [*chain(*self.__dict__["_lists"])])
            numbers = self.__dict__.setdefault("_numbers", made)  # addresses are taken of it
        return numbers

    def on(self, device: torch.device) -> TokenLayout:
        if device.type == "cpu":
            return self
        rows, slots, positions, stops = (getattr(self, name).to(device) for name in _TENSORS)
        return TokenLayout(self.spans, rows, slots, positions, stops, self.ancestors)

    def __getattr__(self, name: str) -> Tensor:
        """One of the tensors, kept from then on."""
        if name not in _TENSORS:
            raise AttributeError(name)
        made = torch.tensor(self.numbers).view(4, -1)
        self.__dict__.update(zip(_TENSORS, made, strict=True))
        tensor: Tensor = self.__dict__[name]
        return tensor


class KVCache:
    """Keys and values of some rows in all layers. `lengths[row, layer]` entries are valid."""

    def __init__(
        self,
        shape: CacheShape,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        keyless: int = 0,
        unread: bool = False,
    ) -> None:
        """`shape`: of layers that have keys. Of so many `keyless` ones only lengths are kept.
        `unread`: nobody reads slots that were not written."""
        _, rows, _, _ = self._shape = shape
        layers = self._layers = shape[0] + keyless  # whose lengths are kept
        # By row and layer. Lists: they are read and written every round, a few numbers at a time.
        self._lengths = [[0] * layers for _ in range(rows)]
        self._computed = [[0] * layers for _ in range(rows)]
        self._dtype, self._device, self._unread = dtype, device, unread
        self._tensors = self._room(rounded(capacity))
        self.seen: tuple[Tensor, Sequence[int]] | None = None
        """What our kernels keep of the keys and values here, and of which keys."""
        self.runner: object = None
        """What runs rounds of a row here by itself (cpu/rounds.py)."""
        self.again = 0
        """Tokens that the last call read once more beside new ones, for want of a way back."""

    def _room(self, capacity: int) -> tuple[Tensor, Tensor]:
        """Keys and values for so many slots."""
        return room_for(self._shape, capacity, self._dtype, self._device, self._unread)

    @property
    def room(self) -> tuple[Tensor, Tensor]:
        """Keys and values, as they are now."""
        return self._tensors

    @property
    def keys(self) -> Tensor:
        """(layers, rows, heads, slots, size), like the values."""
        return self._tensors[0]

    @property
    def values(self) -> Tensor:
        return self._tensors[1]

    def of_layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, (rows, heads, slots, size) each."""
        return self.keys[layer], self.values[layer]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """How many tokens each layer knows, (rows, layers)."""
        return np.array(self._lengths, dtype=np.int64)

    @property
    def computed(self) -> NDArray[np.int64]:
        """On how many tokens each layer's attention ever ran, kept or not, (rows, layers)."""
        return np.array(self._computed, dtype=np.int64)

    @property
    def rows(self) -> int:
        return self._shape[1]

    @property
    def capacity(self) -> int:
        return self.keys.shape[3]

    @property
    def bytes(self) -> int:
        return 2 * self.keys.numel() * self.keys.element_size()

    def length(self, row: int) -> int:
        """How many of the row's tokens every layer knows."""
        return min(self._lengths[row])

    def reserve(self, slots: int) -> None:
        """Make room for that many slots a row. Doubles, so that growing stays cheap."""
        if slots <= self.capacity:
            return
        self._grow(max(slots, min(2 * self.capacity, self.capacity + 4096)))

    def reserve_rows(self, rows: int) -> None:
        """Make room for that many rows."""
        more = rows - self.rows
        if more > 0:
            layers, _, heads, size = self._shape
            self._shape = (layers, rows, heads, size)
            self._grow(self.capacity)
            for known in (self._lengths, self._computed):
                known += [[0] * self._layers for _ in range(more)]

    def _grow(self, capacity: int) -> None:
        """Move what is known to a larger room. Both tensors are replaced at once, in case of an
        interruption."""
        room = self._room(rounded(capacity))
        self._carry_over(room, int(self.lengths.max(initial=0)))
        self.runner, self._tensors = None, room  # a runner holds the room that it was made for

    def _carry_over(self, room: tuple[Tensor, Tensor], known: int) -> None:
        """The first slots of each row, so many as are known, to another room."""
        for new, old in zip(room, self._tensors, strict=True):
            new[:, : old.shape[1], :, :known] = old[:, :, :, :known]

    def layout(
        self, counts: Sequence[int], parents: Sequence[Sequence[int]] | None = None
    ) -> TokenLayout:
        """Room for `counts[row]` more tokens of each row, right after what all layers know; a
        chain, or a tree by its parents."""
        spans = [RowSpan(row, self.length(row), count) for row, count in enumerate(counts) if count]
        return self.layout_at(spans, None if parents is None else [p for p in parents if p])

    def layout_at(
        self, spans: Sequence[RowSpan], parents: Sequence[Sequence[int]] | None = None
    ) -> TokenLayout:
        """Room for tokens at the named slots, whatever lies there now."""
        self.reserve(max(span.first + span.count for span in spans))
        return TokenLayout.chains(spans) if parents is None else TokenLayout.trees(spans, parents)

    def advance(self, layout: TokenLayout, layers: tuple[int, ...]) -> None:
        """Note that these layers hold the layout's tokens. They must have known all before them."""
        for span in layout.spans:
            row, count, end = span.row, span.count, span.first + span.count
            lengths, computed = self._lengths[row], self._computed[row]
            if len(layers) == self._layers and min(lengths) >= span.first:  # every round's
                self._lengths[row] = [end] * self._layers
                self._computed[row] = [before + count for before in computed]
                continue
            for layer in layers:
                assert lengths[layer] >= span.first, (
                    f"row {row}: layer {layer} is at {lengths[layer]}, tokens start at slot "
                    f"{span.first}"
                )
                computed[layer] += count
                lengths[layer] = end

    def passed(self, span: RowSpan, kept: int) -> None:
        """Note that all layers read these tokens, and that those that were kept of them lie
        together there already."""
        self._lengths[span.row] = [span.first + kept] * self._layers
        self._computed[span.row] = [before + span.count for before in self._computed[span.row]]

    def pass_over(self, row: int, length: int, layers: Sequence[int]) -> None:
        """Let these layers' entries go on behind `length`, whatever lies before it: whoever reads
        them leaves out what is not there."""
        for layer in layers:
            self._lengths[row][layer] = length

    def rollback(self, row: int, length: int) -> None:
        """Forget what the row's layers hold beyond `length`."""
        lengths = self._lengths[row]
        if max(lengths) > length:
            self._lengths[row] = [min(known, length) for known in lengths]

    def settle(self, row: int, length: int) -> None:
        """Nobody returns behind the first `length` tokens any more, but to an earlier text. What
        needs more than a length for that may let go of it."""

    def copy(self, source: int, target: int, length: int) -> None:
        """Let a row hold the first `length` tokens of another one, instead of its own."""
        for tensor in self._tensors:
            tensor[:, target, :, :length] = tensor[:, source, :, :length]
        self._lengths[target] = [min(known, length) for known in self._lengths[source]]

    def assume(self, length: int) -> None:
        """For measurements: as if all layers knew so many tokens of every row."""
        self._lengths = [[length] * self._layers for _ in range(self.rows)]

    def keep(self, row: int, first: int, path: Sequence[int]) -> None:
        """Of the tokens written from slot `first` on, keep those at the indices `path` (a
        root-to-leaf path), moved together."""
        if path and path[-1] >= len(path):  # else they lie together already
            self._move(row, first, [first + index for index in path])
        self.rollback(row, first + len(path))

    def _move(self, row: int, first: int, source: Sequence[int]) -> None:
        """The entries of a row at these slots to the slots from `first` on."""
        move(*self._tensors, row, first, source)


def rounded(slots: int) -> int:
    """A number of slots that whole chunks have room for."""
    return -(-max(slots, 1) // CHUNK) * CHUNK
