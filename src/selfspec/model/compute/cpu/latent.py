"""Latent attention as our kernels read it: the C struct of kernels.cpp."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_int64, c_void_p

from ..latent import Latent
from ..linear import Linear
from .interface import ProductStruct, norm_address


class LatentStruct(ctypes.Structure):
    """One layer's latent attention."""

    _fields_ = [
        ("queries", POINTER(ProductStruct)),
        ("rest", POINTER(ProductStruct)),
        ("query_norm", c_void_p),
        ("norm", c_void_p),
        *((name, c_int64) for name in ("rotary", "plain", "value")),
    ]


def latent_struct(latent: Latent) -> LatentStruct:
    """One layer's latent attention, whose products keep their structs."""

    def product(linear: Linear | None) -> object:
        struct = None if linear is None else linear.native()
        assert struct is None or isinstance(struct, ProductStruct)
        return None if struct is None else ctypes.pointer(struct)

    return latent.once(
        "struct",
        lambda: LatentStruct(
            *map(product, (latent.queries, latent.rest)),
            *map(norm_address, (latent.query_norm, latent.norm)),
            *(latent.rotary, latent.plain, latent.value),
        ),
    )
