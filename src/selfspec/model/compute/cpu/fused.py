"""Many halves of layers, or a whole model, in one call to our kernels. Does not know which are
asked for, or why."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from ctypes import Array
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..cache import KVCache, TokenLayout
from ..halves import HalfParts
from ..norms import Norm
from ..ops import ACTIVATIONS
from ..plan import LayerPlan
from ..recurrence import Recurrence
from ..recurrent_cache import RecurrentCache
from ..rope import Angles
from .experts import mixture_struct
from .interface import (
    CallStruct,
    EndsStruct,
    EntryStruct,
    GivenStruct,
    HalfStruct,
    HeadsStruct,
    ProductStruct,
    RopeStruct,
    SightStruct,
    address,
    array_type,
    half_number,
    half_numbers,
    heads_struct,
    norm_address,
    room_of,
    rope_struct,
    sight_struct,
    where_struct,
)
from .latent import latent_struct
from .linear import PackedLinear
from .native import library
from .recurrent import KeptStruct, PassageStruct, kept_struct, passages, recurrence_struct
from .selective import selective_struct


class FusedHalves:
    """Halves of layers by (layer, is_attention), as our kernels read them."""

    def __init__(self, halves: Mapping[tuple[int, bool], HalfParts], layers: int) -> None:
        self._kept = halves  # the structs hold addresses of their tensors
        attentions = [half.heads for half in halves.values() if half.heads]
        self._ropes = list({id(heads.rope): heads.rope for heads in attentions}.values())
        self._known: tuple[Sequence[Angles | None], Array[RopeStruct]] | None = None
        self.windows = list(dict.fromkeys(heads.window for heads in attentions))
        self.recurrent = {
            layer: how for (layer, _), half in halves.items() if (how := half.recurrence)
        }
        self._behind: list[HalfStruct | None] = []  # to which others point
        # two places a layer, by `half_number`; those of halves that are not here stay empty
        self.structs = (HalfStruct * (2 * layers))()
        for (layer, attention), half in halves.items():
            self.structs[half_number(layer, attention)] = self._struct(layer, half)

    def run(
        self,
        x: Tensor,
        plan: LayerPlan,
        begin: int,
        end: int,
        cache: KVCache,
        layout: TokenLayout,
        entered: Tensor,
        of_tokens: Tensor | None = None,
    ) -> Tensor:
        """The stream (tokens, width) after the plan's halves [begin, end). `entered`: what entered
        the layer of the first. `of_tokens`: what layers read of the tokens themselves."""
        entered = entered.contiguous()
        x = x.clone(memory_format=torch.contiguous_format)
        halves = plan.halves[begin:end]
        call, _held = self.call(x, halves, cache, layout, entered, of_tokens)
        library().run_halves(
            x.data_ptr(),
            self.structs,
            ctypes.byref(half_numbers(plan), begin * ctypes.sizeof(ctypes.c_int64)),
            end - begin,
            call,
            torch.get_num_threads(),
        )
        return x

    def call(
        self,
        x: Tensor,
        halves: Sequence[tuple[int, bool]],
        cache: KVCache,
        layout: TokenLayout,
        entered: Tensor,
        of_tokens: Tensor | None,
    ) -> tuple[CallStruct, object]:
        """What the halves share, for one call: tables and cache may grow into other memory. And
        what has to be held meanwhile."""
        held, ropes = self.tables()
        sights = array_type(SightStruct, len(self.windows))(
            *(sight_struct(layout, window) for window in self.windows)
        )
        memories = self._memories(halves, cache, layout) if self.recurrent else None
        assert of_tokens is None or (of_tokens.stride(1) == 1 and of_tokens.dtype == torch.float32)
        call = CallStruct(
            *x.shape,
            where_struct(layout),
            ctypes.addressof(ropes),
            ctypes.addressof(sights),
            *room_of(cache),
            entered.data_ptr(),
            memories and ctypes.addressof(memories[0]),
            address(of_tokens),
            0 if of_tokens is None else of_tokens.stride(0),
        )
        return call, (held, ropes, sights, cache.room, memories, of_tokens)

    def _memories(
        self, halves: Sequence[tuple[int, bool]], cache: KVCache, layout: TokenLayout
    ) -> tuple[Array[KeptStruct], object]:
        """What happens to what recurrent layers keep. Most of them stand at the same places."""
        assert isinstance(cache, RecurrentCache) and layout.ancestors is None
        found, alike = (KeptStruct * len(cache.memories))(), dict[object, Array[PassageStruct]]()
        pieces = layout.pieces
        for layer, attention in halves:
            how = self.recurrent.get(layer) if attention else None
            if how is None:
                continue
            memory = cache.memories[how.index]
            state = tuple(memory.state_of(span.row) for span, _ in pieces)
            stretches = [
                (piece.start, span.row, stretch)
                for span, piece in pieces
                for stretch in cache.planned(how.index, span)
            ]
            if state not in alike:
                alike[state] = passages(stretches)
            found[how.index] = kept_struct(memory, alike[state])
        return found, alike

    def tables(self) -> tuple[Sequence[Angles | None], Array[RopeStruct]]:
        """The rotary tables as they are now, and as our kernels read them."""
        tables = [None if rope is None else rope.tables for rope in self._ropes]
        if self._known is None or self._known[0] != tables:
            self._known = tables, (RopeStruct * len(tables))(*map(rope_struct, tables))
        return self._known

    def _struct(self, layer: int, half: HalfParts) -> HalfStruct:
        into, out = half.into.native(), ProductStruct() if half.out is None else half.out.native()
        heads, how, mixture = half.heads, half.recurrence, half.mixture
        assert isinstance(into, ProductStruct) and isinstance(out, ProductStruct)
        if heads is not None:  # in the cache, where recurrent layers are not
            assert heads.layer == layer or not half.parallel
            layer = heads.layer
        behind = None if half.then is None else self._struct(layer, half.then)
        made = HalfStruct(
            layer=layer,
            attention=heads is not None,
            parallel=half.parallel,
            before=norm_address(half.before),
            inner=norm_address(half.inner),
            after=norm_address(half.after),
            into=into,
            out=out,
            heads=HeadsStruct() if heads is None else heads_struct(heads),
            rope=0 if heads is None else _index(self._ropes, heads.rope),
            sight=0 if heads is None else self.windows.index(heads.window),
            recurrence=None if how is None else ctypes.addressof(recurrence_struct(how)),
            mixture=None if mixture is None else ctypes.addressof(mixture_struct(mixture)),
            selective=_selective(how),
            latent=None if half.latent is None else ctypes.addressof(latent_struct(half.latent)),
            activation=ACTIVATIONS[half.activation] if half.activation else 0,
            gated=half.gated,
            scale=half.scale,
            stream=half.stream,
            curve=address(half.curve),
            given=-1 if half.given is None else half.given,
            held=half.held,
            reads=norm_address(half.reads),
            last=norm_address(half.last),
            then=None if behind is None else ctypes.addressof(behind),
        )
        self._behind.append(behind)
        return made


def _selective(how: Recurrence | None) -> int | None:
    """Where the struct of a selective recurrence's products lies."""
    if how is None or how.selective is None:
        return None
    return ctypes.addressof(selective_struct(how.selective))


@dataclass(frozen=True, eq=False)
class Entry:
    """How a guess enters a small part: its embedding and what came out before it, both of unit
    size, through a product each."""

    embedded: PackedLinear
    before: PackedLinear
    unit: Norm

    @cached_property
    def struct(self) -> EntryStruct:
        """As our kernels read it."""
        return EntryStruct(
            ctypes.pointer(self.embedded.native()),
            ctypes.pointer(self.before.native()),
            norm_address(self.unit),
        )


class ModelEnds:
    """The embedding, the last norm and the head of a model, as our kernels read them. Of a part
    also how its guesses enter."""

    def __init__(
        self,
        source: Tensor | PackedLinear,
        norm: Norm,
        head: PackedLinear,
        scales: tuple[float, float, float],
        entry: Entry | None = None,
    ) -> None:
        """`scales`: of the embedding, of logits, and the soft cap of these."""
        self._kept, self.head, self.entry = (source, norm), head, entry  # by address, in the struct
        table, rows = None, None
        if isinstance(source, Tensor):
            rows, self.tokens = source.data_ptr(), len(source)
        else:
            table, self.tokens = ctypes.pointer(source.native()), source.outputs
        self.struct = EndsStruct(
            *(table, rows, self.tokens, norm_address(norm)),
            ctypes.pointer(head.native()),
            None if entry is None else ctypes.pointer(entry.struct),
            *scales,
        )


class FusedModel:
    """All of a model in one call: halves, and what stands at their ends."""

    def __init__(self, halves: FusedHalves, ends: ModelEnds) -> None:
        self.halves, self.ends = halves, ends

    def __call__(
        self,
        tokens: Sequence[int],
        plan: LayerPlan,
        cache: KVCache,
        layout: TokenLayout,
        ranks: int,
        of_tokens: Tensor | None = None,
        collected: Sequence[int] = (),
        before: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, list[list[int]], Sequence[Tensor]]:
        """The last states of these tokens, their logits, the `ranks` likeliest tokens of each, as
        `likeliest_or_broken` finds them, and the states behind the `collected` layers. `before`:
        what came out before each, where the ends have an entry."""
        ends = self.ends
        assert (before is None) == (ends.entry is None)
        count, numbers = len(tokens), half_numbers(plan)
        ranks = min(ranks, ends.head.outputs)
        x = torch.empty((count, ends.head.inputs))
        logits = torch.empty((count, ends.head.outputs))
        best = array_type(array_type(ctypes.c_int64, ranks), count)()
        given = GivenStruct(x.data_ptr(), logits.data_ptr(), ctypes.addressof(best), ranks)
        tapped: Sequence[Tensor] = ()
        if collected:
            behind = [plan.halves.index((layer, False)) for layer in collected]
            places = array_type(ctypes.c_int64, len(behind))(*behind)
            taps = x.new_empty((len(behind), *x.shape))
            tapped = taps.unbind()
            given.taps, given.behind = len(behind), ctypes.addressof(places)
            given.tapped = taps.data_ptr()
        if before is not None:
            given.before = before.data_ptr()
        ids = array_type(ctypes.c_int64, count)(*tokens)
        call, _held = self.halves.call(x, plan.halves, cache, layout, x, of_tokens)
        wrong = library().run_model(
            ids, ends.struct, self.halves.structs, numbers, len(numbers), call, given,
            torch.get_num_threads(),
        )  # fmt: skip
        if wrong >= 0:
            raise IndexError(f"row {tokens[wrong]} was asked for, and there are {ends.tokens}")
        return x, logits, [row[:] for row in best] if ranks else [], tapped


def _index(found: Iterable[object], wanted: object) -> int:
    return next(index for index, each in enumerate(found) if each is wanted)
