"""Mixtures of experts by our kernels: the C interface of experts.h."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import Array, c_float, c_int64, c_void_p

import torch
from torch import Tensor

from ..linear import Linear
from ..mixture import Mixture
from ..ops import ACTIVATIONS
from .interface import ProductStruct, address
from .native import library


class MixtureStruct(ctypes.Structure):
    """One layer's mixture."""

    _fields_ = [
        *((name, c_int64) for name in ("count", "chosen", "shared", "weighed")),
        *((name, c_void_p) for name in ("into", "out", "narrow", "favour", "shares")),
        *((name, c_int64) for name in ("sigmoid", "of_inputs", "normalised")),
        *((name, c_int64) for name in ("groups", "kept", "best")),
        *((name, c_float) for name in ("margin", "least", "scale")),
        *((name, c_int64) for name in ("activation", "gated")),
    ]
    held: object = None
    """The arrays that it points to."""


def mixture_struct(mixture: Mixture) -> MixtureStruct:
    """One layer's mixture; the kernels read float32."""

    def products(linears: Sequence[Linear]) -> Array[ProductStruct]:
        found = (ProductStruct * len(linears))()
        for place, linear in enumerate(linears):
            struct = linear.native()
            assert isinstance(struct, ProductStruct)
            found[place] = struct
        return found

    def make() -> MixtureStruct:
        favour, shares = mixture.favour, mixture.shares
        assert mixture.chosen <= mixture.count
        for each in (favour, shares):
            assert each is None or (each.dtype == torch.float32 and each.is_contiguous())
        into, out = products(mixture.into), products(mixture.out)
        narrow = None if mixture.narrow is None else products([mixture.narrow])
        made = MixtureStruct(
            *(mixture.count, mixture.chosen, mixture.shared, mixture.weighed),
            *(ctypes.addressof(into), ctypes.addressof(out)),
            *(narrow and ctypes.addressof(narrow), address(favour), address(shares)),
            *(mixture.sigmoid, mixture.of_inputs, mixture.normalised),
            *(mixture.groups, mixture.kept, mixture.best),
            *(mixture.margin, mixture.least, mixture.scale),
            *(ACTIVATIONS[mixture.activation], mixture.gated),
        )
        made.held = into, out, narrow
        return made

    return mixture.once("struct", make)


def mixed(x: Tensor, logits: Tensor, mixture: Mixture, residual: Tensor | None) -> Tensor:
    """What the experts of each token give, plus the residual if there is one."""
    assert x.is_contiguous() and logits.is_contiguous() and x.dtype == torch.float32
    out = torch.empty_like(x)
    library().mix(
        ctypes.addressof(mixture_struct(mixture)),
        *(x.data_ptr(), logits.data_ptr(), logits.shape[1], *x.shape),
        *(address(residual), out.data_ptr(), torch.get_num_threads()),
    )
    return out
