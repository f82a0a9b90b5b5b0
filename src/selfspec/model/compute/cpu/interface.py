"""The C interface: the structs and functions of kernels.cpp and its headers, and our values as they
read them.

A struct holds addresses, so what it was made of must outlive it. A norm, an attention's heads and
a call's layout keep the structs that were made of them (`Memo.once`): they are made once and live
exactly as long as the tensors they point to. Knows neither how the kernels are compiled nor who
calls them.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Sequence
from ctypes import POINTER, Array, c_float, c_int, c_int64, c_void_p
from typing import Any, TypeVar

from torch import Tensor

from ..cache import KVCache, TokenLayout
from ..norms import Norm
from ..ops import Heads
from ..plan import LayerPlan
from ..rope import Angles
from ..windows import Window

_Item = TypeVar("_Item", bound=Any)


class LayerStruct(ctypes.Structure):
    """Where one layer's keys and values lie."""

    _fields_ = [
        ("keys", c_void_p),
        ("values", c_void_p),
        ("row_stride", c_int64),
        ("head_stride", c_int64),
        ("size", c_int64),
    ]


class NormStruct(ctypes.Structure):
    """A norm: its weights, over how many numbers, and its kind."""

    _fields_ = [
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("size", c_int64),
        ("stride", c_int64),
        ("eps", c_float),
        ("centred", c_int),
    ]


class ProductStruct(ctypes.Structure):
    """Weights of some kind, the functions that multiply by them (product.h), and a bias."""

    _fields_ = [
        ("multiply", c_void_p),
        ("prepare", c_void_p),
        ("read", c_void_p),
        ("prepared", c_int64),
        ("weights", c_void_p),
        ("bias", c_void_p),
        ("outputs", c_int64),
        ("inputs", c_int64),
    ]


class TemperatureStruct(ctypes.Structure):
    """How queries grow with their position."""

    _fields_ = [("every", c_int64), ("first", c_int64), ("rate", c_float)]


class HeadsStruct(ctypes.Structure):
    """What an attention is, beside its projections."""

    _fields_ = [
        ("queries", c_int64),
        ("keys", c_int64),
        ("size", c_int64),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("value_norm", c_void_p),
        *((name, c_float) for name in ("scale", "cap", "clamp")),
        ("sinks", c_void_p),
        ("slopes", c_void_p),
        ("temperature", TemperatureStruct),
        *((name, c_int64) for name in ("norms_behind", "coarse", "borrowed")),
    ]


class RopeStruct(ctypes.Structure):
    """Angles by position."""

    _fields_ = [("cosines", c_void_p), ("sines", c_void_p), ("rotary", c_int64)]


class WhereStruct(ctypes.Structure):
    """Where the tokens of a call go."""

    _fields_ = [(name, c_void_p) for name in ("rows", "slots", "positions")]


class SightStruct(ctypes.Structure):
    """What each query of a call sees."""

    _fields_ = [(name, c_void_p) for name in ("rows", "starts", "stops", "first_extra", "extras")]
    held: object = None
    """What it points to, where nobody else holds that."""


class HalfStruct(ctypes.Structure):
    """Half of a layer."""

    _fields_ = [
        ("layer", c_int64),
        ("attention", c_int64),
        ("parallel", c_int64),
        *((name, c_void_p) for name in ("before", "inner", "after")),
        ("into", ProductStruct),
        ("out", ProductStruct),
        ("heads", HeadsStruct),
        ("rope", c_int64),
        ("sight", c_int64),
        ("recurrence", c_void_p),
        *((name, c_void_p) for name in ("mixture", "selective", "latent")),
        ("activation", c_int64),
        ("gated", c_int64),
        ("scale", c_float),
        ("stream", c_float),
        ("curve", c_void_p),
        ("given", c_int64),
        ("held", c_int64),
        ("reads", c_void_p),
        ("last", c_void_p),
        ("then", c_void_p),
    ]


class CallStruct(ctypes.Structure):
    """What all halves of a call share: how many tokens, where they go, what they see, the cache
    with its strides, and what entered the first half's layer."""

    _fields_ = [
        ("tokens", c_int64),
        ("width", c_int64),
        ("where", WhereStruct),
        ("ropes", c_void_p),
        ("sights", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("layer_stride", c_int64),
        ("row_stride", c_int64),
        ("slots", c_int64),
        ("entered", c_void_p),
        ("kept", c_void_p),
        ("of_tokens", c_void_p),
        ("of_token", c_int64),
    ]


class EntryStruct(ctypes.Structure):
    """How a guess enters a small part: products of its embedding and of what came out before it,
    and the norm of both."""

    _fields_ = [
        *((name, POINTER(ProductStruct)) for name in ("embedded", "before")),
        ("unit", c_void_p),
    ]


class EndsStruct(ctypes.Structure):
    """What stands at both ends of a model: an embedding, as a product or as its rows, of so many
    tokens, the last norm, the head, and how embeddings enter; scales of the embedding and of
    logits, and their cap."""

    _fields_ = [
        ("table", POINTER(ProductStruct)),
        ("rows", c_void_p),
        ("tokens", c_int64),
        ("norm", c_void_p),
        ("head", POINTER(ProductStruct)),
        ("entry", POINTER(EntryStruct)),
        *((name, c_float) for name in ("scale", "logits", "cap")),
    ]


class GivenStruct(ctypes.Structure):
    """Where a whole pass leaves its states, its logits, so many of the likeliest tokens, and the
    states behind some of its halves; and what came out before its tokens, for an entry."""

    _fields_ = [
        *((name, c_void_p) for name in ("states", "logits", "best")),
        *((name, c_int64) for name in ("count", "taps")),
        *((name, c_void_p) for name in ("behind", "tapped", "before")),
    ]


_TYPES = {
    "p": c_void_p,
    "n": c_int64,
    "f": c_float,
    "i": c_int,
    "L": POINTER(LayerStruct),
    "S": POINTER(SightStruct),
    "N": POINTER(NormStruct),
    "P": POINTER(ProductStruct),
    "H": POINTER(HeadsStruct),
    "R": POINTER(RopeStruct),
    "W": POINTER(WhereStruct),
    "C": POINTER(CallStruct),
    "E": POINTER(EndsStruct),
    "G": POINTER(GivenStruct),
}
_SIGNATURES = {  # a letter an argument
    "linear": "pnPppi",
    "normalise": "pnNpi",
    "gated": "pnnipi",
    "activated": "pnnipi",
    "soft_cap": "pnfi",
    "rotate_and_store": "pnHRWLi",
    "attend": "pnHLSpi",
    "run_halves": "pppnCi",
    "run_model": "pEppnCGi",
    "recur": "pppnpi",
    "recur_convolve": "pppnp",
    "recur_select": "pppnpp",
    "mix": "pppnnnppi",
    "times_sigmoid": "ppnnnn",
    "tune": "nnnnnn",
    "read_rows": "Ppnpi",
}


def declare(kernels: ctypes.CDLL) -> None:
    """Tell ctypes what the functions of kernels.cpp and its headers take and give."""
    for name, arguments in _SIGNATURES.items():
        getattr(kernels, name).argtypes = [_TYPES[letter] for letter in arguments]
        getattr(kernels, name).restype = None
    for name in ("panel_width", "most_rows", "read_rows", "run_model"):
        getattr(kernels, name).restype = c_int64


def function(kernels: ctypes.CDLL, name: str) -> int:
    """Where a function of the kernels lies."""
    found = ctypes.cast(getattr(kernels, name), c_void_p).value
    assert found is not None
    return found


def address(tensor: Tensor | None) -> int | None:
    """Where a tensor's numbers begin; None for none. The caller keeps the tensor alive."""
    return None if tensor is None else tensor.data_ptr()


def norm_struct(norm: Norm) -> NormStruct:
    """A norm; the kernels read float32."""
    stride = norm.size if norm.weight.dim() > 1 else 0
    return norm.once(
        "struct",
        lambda: NormStruct(
            address(norm.weight), address(norm.bias), norm.size, stride, norm.eps, norm.centred
        ),
    )


def norm_address(norm: Norm | None) -> int | None:
    """Where a norm's struct lies; it lives as long as the norm."""
    return None if norm is None else ctypes.addressof(norm_struct(norm))


def heads_struct(heads: Heads) -> HeadsStruct:
    """What an attention is."""
    warmth = heads.temperature
    return heads.once(
        "struct",
        lambda: HeadsStruct(
            heads.queries,
            heads.keys,
            heads.size,
            norm_address(heads.query_norm),
            norm_address(heads.key_norm),
            norm_address(heads.value_norm),
            heads.scale,
            heads.cap,
            heads.clamp,
            address(heads.sinks),
            address(heads.slopes),
            TemperatureStruct(warmth.every, warmth.first, warmth.rate),
            *(heads.norms_behind, heads.coarse, heads.borrowed),
        ),
    )


def rope_struct(tables: Angles | None) -> RopeStruct:
    """Tables of cosines and sines. A `RopeTable` may replace them at any time, so the caller holds
    these until the kernels have read them."""
    if tables is None:
        return RopeStruct(None, None, 0)
    return tables.once(
        "struct", lambda: RopeStruct(address(tables.cosines), address(tables.sines), tables.rotary)
    )


@functools.lru_cache(maxsize=4096)
def array_type(of: type[_Item], count: int) -> type[Array[_Item]]:
    """So many of these, side by side. ctypes forgets a type once nobody holds it, and makes it
    anew, which takes as long as filling ten arrays."""
    made: type[Array[_Item]] = of * count
    return made


def half_number(layer: int, attention: bool) -> int:
    """How the kernels count halves: a layer's attention is twice the layer, its MLP one more."""
    return 2 * layer + (not attention)


def half_numbers(plan: LayerPlan) -> Array[c_int64]:
    """A plan's halves by number."""

    def make() -> Array[c_int64]:
        numbers = [half_number(*half) for half in plan.halves]
        return (c_int64 * len(numbers))(*numbers)

    return plan.once("numbers", make)


def where_struct(layout: TokenLayout) -> WhereStruct:
    """Where a call's tokens go."""
    return layout.once("struct", lambda: WhereStruct(*_addresses(layout)[:3]))


def _addresses(layout: TokenLayout) -> tuple[int, ...]:
    """Where a call's rows, slots, positions and stops lie."""
    numbers = layout.numbers
    if numbers is None:
        tensors = (layout.rows, layout.slots, layout.positions, layout.stops)
        return tuple(tensor.data_ptr() for tensor in tensors)
    first, size = numbers.buffer_info()[0], 8 * len(layout)
    return first, first + size, first + 2 * size, first + 3 * size


def sight_struct(layout: TokenLayout, window: Window | None) -> SightStruct:
    """What a call's tokens see in layers of this window."""
    return layout.once(("struct", window), lambda: _sight(layout, window))


def _sight(layout: TokenLayout, window: Window | None) -> SightStruct:
    """Without a window no tensor is made: it is every round's."""
    if window is not None:
        seen = layout.visible(window)
        parts = (layout.rows, seen.starts, seen.stops, seen.first_extra, seen.extras)
        return SightStruct(*map(address, parts))
    rows, _, _, stops = _addresses(layout)
    starts = ctypes.addressof(_zeros(1 << (len(layout) - 1).bit_length()))
    listed = layout.listed(None)
    if listed is None:
        return SightStruct(rows, starts, stops)
    ends, slots = listed
    both = array("q", ends + slots)
    first = both.buffer_info()[0]
    sight = SightStruct(rows, starts, stops, first, first + both.itemsize * len(ends))
    sight.held = both
    return sight


@functools.cache
def _zeros(count: int) -> Array[c_int64]:
    return (c_int64 * count)()


def room_of(cache: KVCache) -> Sequence[int]:
    """Where a cache's keys and values begin, the keys' first two strides, and the slots. Kept with
    the cache until it grows into other memory."""
    keys, values = cache.room
    known = cache.seen
    if known is None or known[0] is not keys:
        numbers = (keys.data_ptr(), values.data_ptr(), *keys.stride()[:2], keys.shape[3])
        known = cache.seen = keys, numbers
    return known[1]


def layer_struct(cache: KVCache, heads: Heads) -> LayerStruct:
    """One layer of a cache. The cache may grow into other memory, so this is for one call."""
    keys, values = cache.keys, cache.values
    layer, row = keys.stride()[:2]
    offset, head = heads.layer * layer * keys.element_size(), keys.shape[3] * heads.size
    return LayerStruct(keys.data_ptr() + offset, values.data_ptr() + offset, row, head, heads.size)
