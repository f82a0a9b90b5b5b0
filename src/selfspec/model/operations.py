"""Which operations run a model, by the two words that a user has for it.

`kernel`: who computes. `weights`: how our own kernels store the weights that they multiply by; what
torch computes with is stored in its dtype. Does not know models.
"""

from __future__ import annotations

import torch

from ..errors import OptionError, Unavailable, nearest
from .compute.cpu.kinds import KINDS
from .compute.cpu.native import NoNative
from .compute.cpu.operations import NativeOps
from .compute.linear import mkl_is_row_stable
from .compute.ops import Ops, TorchOps
from .family import Family

KERNELS = ("auto", "native", "mkl", "plain", "static")
EXPERTS = "a mixture of experts: which experts run is decided on the host, token by token"
UNEVEN = "layers whose heads differ in size: a recorded step reads one cache of one shape"
OF_TOKENS = "layers that read their tokens again: a recorded step is given states alone"
RECURRENT = "recurrent layers: where their states stand is decided on the host"
BY_TORCH = (
    "weights {0!r} says how our own kernels store weights, and here {1}, so it would change "
    "nothing; leave it at 'auto'{2}"
)


ON_A_GPU = (
    ". torchao and bitsandbytes keep weights in few bits on a GPU: load the model with "
    "transformers (quantization_config=TorchAoConfig(...) or BitsAndBytesConfig(...)) and pass it"
)


def check_weights(weights: str) -> None:
    """Raise unless it is a kind of weights."""
    kinds = ("auto", *KINDS)
    if weights not in kinds:
        raise OptionError(f"weights {weights!r} is unknown; {nearest(weights, kinds)}")


def operations_for(
    kernel: str, dtype: torch.dtype, device: torch.device, eager: str = "", weights: str = "auto"
) -> Ops:
    """The best operations for a dtype and device, or those asked for by name. `eager`: what in the
    model cannot be recorded, in words."""
    cpu_float = dtype == torch.float32 and device.type == "cpu"
    check_weights(weights)
    if kernel not in KERNELS:
        raise OptionError(f"kernel {kernel!r} is unknown; {nearest(kernel, KERNELS)}")
    if kernel in ("native", "mkl") and not cpu_float:
        raise OptionError(
            f"kernel {kernel!r} runs float32 on a CPU, not {dtype} on {device}; use kernel='auto'"
        )
    if kernel == "static" and eager:
        raise OptionError(f"kernel 'static' cannot run {eager}; use kernel='auto'")
    ours = cpu_float and kernel in ("auto", "native")
    if weights != "auto" and not ours:
        what = str(dtype).removeprefix("torch.")
        who = f"kernel {kernel!r} leaves products in {what} on {device} to torch"
        remedy = ", or use kernel='auto' with dtype='float32' on device='cpu'"
        if device.type == "cuda" and KINDS[weights].bits < 16:
            remedy += ON_A_GPU
        raise OptionError(BY_TORCH.format(weights, who, remedy))
    if kernel == "static" or (kernel == "auto" and device.type == "cuda" and not eager):
        from .compute.cuda.static_ops import StaticOps  # not before somebody has a GPU

        return StaticOps()
    if ours:
        try:
            return NativeOps("float32" if weights == "auto" else weights)
        except NoNative as reason:
            if kernel == "native" or weights != "auto":
                raise Unavailable(
                    f"the native kernels cannot be used: {reason}; install g++, or leave kernel "
                    f"and weights at 'auto'"
                ) from reason
    if cpu_float and (kernel == "mkl" or (kernel == "auto" and mkl_is_row_stable())):
        return TorchOps("mkl", row_stable=True)
    return TorchOps("plain", row_stable=False)


def for_guesses(ops: Ops, dtype: torch.dtype, device: torch.device) -> Ops:
    """What a part's guesses are multiplied by beside a model with these operations: 8 bits where
    our kernels run it, since a guess that is a little off costs less than reading four times as
    much."""
    return operations_for("auto", dtype, device, "", "int8" if ops.kernel == "native" else "auto")


def why_eager(family: Family) -> str:
    """What in a family cannot be recorded, in words; "" for nothing."""
    if family.recurrent is not None:
        return RECURRENT
    if family.kinds is not None:
        return UNEVEN
    if family.of_token is not None:
        return OF_TOKENS
    return "" if family.experts is None else EXPERTS


def why_not_recorded(kernel: str, device: torch.device, eager: str) -> str:
    """Why steps cannot be recorded as CUDA graphs, as far as the model decides it."""
    if device.type != "cuda":
        return f"there is nothing to record on a {device.type.upper()}"
    if kernel == "modules":
        return "transformers' own modules run this family, and what they do cannot be known"
    return eager or f"kernel {kernel!r} was asked for"
