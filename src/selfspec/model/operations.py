"""Which operations run a model: by name, or the best for its dtype and device."""

from __future__ import annotations

import torch

from ..errors import OptionError, Unavailable, nearest
from .compute.cpu.native import NoNative
from .compute.cpu.operations import NativeOps
from .compute.cuda.static_ops import StaticOps
from .compute.linear import mkl_is_row_stable
from .compute.ops import Ops, TorchOps

KERNELS = ("auto", "native", "mkl", "plain", "static")
HOST_DECIDES = "which experts run is decided on the host, token by token"


def operations_for(
    kernel: str, dtype: torch.dtype, device: torch.device, experts: bool = False
) -> Ops:
    """The best operations for a dtype and device, or those asked for by name. `experts`: the model
    is a mixture of them."""
    cpu_float = dtype == torch.float32 and device.type == "cpu"
    if kernel not in KERNELS:
        raise OptionError(f"kernel {kernel!r} is unknown; {nearest(kernel, KERNELS)}")
    if kernel in ("native", "mkl") and not cpu_float:
        raise OptionError(
            f"kernel {kernel!r} runs float32 on a CPU, not {dtype} on {device}; use kernel='auto'"
        )
    if kernel == "static" and experts:
        raise OptionError(
            f"kernel 'static' cannot run a mixture of experts: {HOST_DECIDES}; use kernel='auto'"
        )
    if kernel == "static" or (kernel == "auto" and device.type == "cuda" and not experts):
        return StaticOps()
    if cpu_float and kernel in ("auto", "native"):
        try:
            return NativeOps()
        except NoNative as reason:
            if kernel == "native":
                raise Unavailable(
                    f"the native kernels cannot be used: {reason}; install g++, or use "
                    f"kernel='auto'"
                ) from reason
    if cpu_float and (kernel == "mkl" or (kernel == "auto" and mkl_is_row_stable())):
        return TorchOps("mkl", row_stable=True)
    return TorchOps("plain", row_stable=False)


def why_not_recorded(kernel: str, device: torch.device, experts: bool) -> str:
    """Why steps cannot be recorded as CUDA graphs, as far as the model decides it."""
    if device.type != "cuda":
        return f"there is nothing to record on a {device.type.upper()}"
    if kernel == "modules":
        return "transformers' own modules run this family, and what they do cannot be known"
    return (
        f"a mixture of experts: {HOST_DECIDES}" if experts else f"kernel {kernel!r} was asked for"
    )
