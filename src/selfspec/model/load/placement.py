"""Where a model's weights go and as what: the options `device` and `dtype`, in their users' words.

It does not know models, nor how much memory they need.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...core.door import shown
from ...errors import OptionError, nearest

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEVICES = ("auto", "cpu", "cuda")
_DEVICE_MAPS = ("balanced", "balanced_low_0", "sequential", "disk")  # accelerate's names


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype | None:
    """The dtype named by a user. None is "auto"."""
    if isinstance(dtype, str) and dtype == "auto":
        return None
    if isinstance(dtype, str) and dtype in DTYPES:
        return DTYPES[dtype]
    if isinstance(dtype, torch.dtype) and dtype in DTYPES.values():
        return dtype
    raise OptionError(f"dtype={shown(dtype)} is not known; {nearest(dtype, ['auto', *DTYPES])}")


def parse_device(device: str | torch.device | Mapping[str, object]) -> torch.device:
    """The device named by a user. A map that names one device is that device."""
    if isinstance(device, Mapping) and len(places := set(device.values())) == 1:
        place = places.pop()
        device = f"cuda:{place}" if isinstance(place, int) else str(place)
    if not isinstance(device, Mapping | str | torch.device | int):
        raise OptionError(f"device={shown(device)} names no device; {nearest('', DEVICES)}")
    if isinstance(device, Mapping) or device in _DEVICE_MAPS:
        raise OptionError(
            f"device={shown(device)} spreads a model over several places or keeps it on disk, and "
            "each round would wait for weights to arrive: selfspec needs the model whole on one "
            "device. Use device='cpu' or 'cuda', with a smaller dtype, quantised weights or a "
            "smaller model if it does not fit."
        )
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = str(device)
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise OptionError(f"device={name!r} is not known; {nearest(name, DEVICES)}") from error
    if parsed.type not in ("cpu", "cuda"):
        raise OptionError(f"device={name!r} is not supported; selfspec runs on cpu and cuda.")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if parsed.type == "cuda" and (parsed.index or 0) >= count:
        raise OptionError(
            f"device={name!r} cannot be used: torch sees {count} CUDA devices here. "
            "Use device='cpu'."
        )
    return parsed
