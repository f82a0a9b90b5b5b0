"""The kinds of weights that our kernels multiply by: what `weights=` may be.

To add one, write its kernel (two or three functions of product.h's form) and its class: a subclass
of `PackedLinear` that packs a matrix, names the functions, and knows how many bytes it reads. Then
give it a line here. Nothing else has to know of it.
"""

from __future__ import annotations

from ..grouped import STORED
from .few_bits import BFloat16, Int4, Int8, Stored
from .linear import Float32, PackedLinear

KINDS: dict[str, type[PackedLinear]] = {
    "float32": Float32,
    "bfloat16": BFloat16,
    "int8": Int8,
    "int4": Int4,
    STORED: Stored,
}
