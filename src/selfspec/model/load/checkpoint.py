"""What a checkpoint on disk is made of, and what loading it takes: headers, hashes, memory, quiet.

All this is read before the first weight is. So a truncated file, a missing shard or too little
memory is an error with a name, not a crash half a minute later. It does not know configurations,
model classes or hubs.
"""

from __future__ import annotations

import hashlib
import logging
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from selfspec.errors import BrokenCheckpoint, ResourceError, UnsupportedModel

from ...core.json_text import from_json
from ...core.user_cache import CACHE_VARIABLE
from ..compute.memory import free_memory, gigabytes

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
QUANTISED = "selfspec-quantised.json"  # in a folder that `selfspec quantise` wrote
AGAIN = "Copy or download the checkpoint again."

_MAX_HEADER = 100_000_000  # the format's own limit
_LFS_POINTER = b"version https://git-lfs"
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})  # what the option dtype converts
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a safetensors file, as its header describes it."""

    dtype: str
    numel: int
    nbytes: int

    def bytes_as(self, dtype: torch.dtype | None) -> int:
        """Bytes once loaded. None is the dtype it is stored in."""
        if dtype is None or self.dtype not in _FLOATS:
            return self.nbytes
        return self.numel * dtype.itemsize


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a checkpoint's file. Anything else is a broken checkpoint."""
    try:
        if path.stat().st_size > _MAX_HEADER:
            raise BrokenCheckpoint(
                f"{path} has {path.stat().st_size} bytes, and no file of its kind has more than "
                f"{_MAX_HEADER}. {AGAIN}"
            )
        value = from_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise BrokenCheckpoint(
            f"{path} is missing, and the model cannot be loaded without it. {AGAIN}"
        ) from error
    except OSError as error:
        raise BrokenCheckpoint(f"{path} cannot be read ({error.strerror}). {AGAIN}") from error
    except ValueError as error:  # broken JSON and broken UTF-8 alike
        raise BrokenCheckpoint(
            f"{path} is not valid JSON ({error}): it is truncated or corrupt. {AGAIN}"
        ) from error
    if not isinstance(value, dict):
        raise BrokenCheckpoint(
            f"{path} holds a JSON {type(value).__name__} where an object is needed. {AGAIN}"
        )
    return value


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint: one, or the shards of its index. All of them exist."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / INDEX).is_file():
        raise _no_weights(folder)
    shards = read_json(folder / INDEX).get("weight_map")
    names = list(shards.values()) if isinstance(shards, dict) else []
    if not names or not all(isinstance(name, str) for name in names):
        raise BrokenCheckpoint(f"{folder / INDEX} has no weight_map of tensor to file. {AGAIN}")
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise BrokenCheckpoint(
            f"{folder / INDEX} names {outside[0]!r}, which is not in its folder, and nothing else "
            f"is read. {AGAIN}"
        )
    files = [folder / name for name in sorted(set(names))]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise BrokenCheckpoint(
            f"{folder} lacks {len(missing)} of the {len(files)} weight files that its index names, "
            f"first {missing[0]}. {AGAIN}"
        )
    return files


def _no_weights(folder: Path) -> BrokenCheckpoint | UnsupportedModel:
    if any(next(folder.glob(pattern), None) for pattern in _PICKLES):
        return UnsupportedModel(
            f"{folder} holds its weights as pickles only, and unpickling can run any code. Convert "
            "it once with code you trust: "
            "AutoModelForCausalLM.from_pretrained(...).save_pretrained(...) writes safetensors."
        )
    if any(file.suffix.lower() == ".gguf" for file in folder.iterdir()):
        return UnsupportedModel(
            f"{folder} holds a GGUF file and no safetensors. Pass the path of the .gguf file."
        )
    return BrokenCheckpoint(
        f"{folder} has neither {WEIGHTS} nor {INDEX}, so there are no weights to load. {AGAIN}"
    )


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file, whose size must be exactly what its header says."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(len(_LFS_POINTER))
        if start == _LFS_POINTER:
            raise BrokenCheckpoint(
                f"{path} is a git-lfs pointer, not the weights. Run `git lfs pull` in its folder."
            )
        length = int.from_bytes(start[:8], "little")
        if size < 8 or length > _MAX_HEADER or 8 + length > size:
            raise BrokenCheckpoint(
                f"{path} is truncated or not a safetensors file: {size} bytes cannot hold a header "
                f"of {length} bytes. {AGAIN}"
            )
        file.seek(8)
        raw = file.read(length)
    tensors: dict[str, StoredTensor] = {}
    needed = 8 + length
    try:
        for name, entry in from_json(raw).items():
            if name == "__metadata__":
                continue
            begin, stop = entry["data_offsets"]
            if not isinstance(entry["dtype"], str):
                raise TypeError(f"the dtype of {name} is {entry['dtype']!r}")
            tensors[name] = StoredTensor(entry["dtype"], math.prod(entry["shape"]), stop - begin)
            needed = max(needed, 8 + length + stop)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BrokenCheckpoint(f"{path} has a corrupt header ({error!r}). {AGAIN}") from error
    if size != needed:
        raise BrokenCheckpoint(
            f"{path} is truncated or corrupt: {size} bytes where its header needs {needed}. {AGAIN}"
        )
    return tensors


def require_promised(folder: Path, layers: int, promised: Callable[[], int]) -> None:
    """Raise if a config promises far more than the folder holds, before memory is taken for it.
    What lacks by little is named later, weight by weight. `promised` counts numbers; it takes as
    long as there are layers, and each of these has a tensor."""
    stored = [tensor for file in weight_files(folder) for tensor in read_header(file).values()]
    held = sum(tensor.numel for tensor in stored)
    if layers > len(stored):
        found, wanted = f"{len(stored)} tensors", f"{layers} layers"
    elif (count := promised()) > 1.5 * held + 10_000_000:
        found, wanted = f"{held} numbers", f"{count}"
    else:
        return
    raise BrokenCheckpoint(
        f"{folder} holds {found} where its config.json promises {wanted}: transformers would fill "
        f"the rest with random numbers. {AGAIN}"
    )


def bytes_while_loading(folder: Path, dtype: torch.dtype | None) -> int:
    """All weights of a folder in `dtype` (None: as stored), and the largest twice, since it is
    converted. The headers are checked on the way."""
    stored = [tensor for file in weight_files(folder) for tensor in read_header(file).values()]
    largest = max((tensor.nbytes for tensor in stored), default=0)
    return sum(tensor.bytes_as(dtype) for tensor in stored) + largest


def first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def available_memory(device: torch.device) -> int:
    """Bytes that can be taken on the device now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return free_memory(device)


def require_memory(needed: int, device: torch.device, what: str) -> None:
    """Raise ResourceError unless the device has `needed` bytes free."""
    available = available_memory(device)
    if needed > available:
        raise ResourceError(
            f"{what} needs about {gigabytes(needed)} of memory on {device} while loading, and "
            f"{gigabytes(available)} are available. Free some memory, or choose a smaller dtype "
            "(dtype='bfloat16'), another device or a smaller model."
        )


def require_disk(needed: int, folder: Path, what: str) -> None:
    """Raise ResourceError unless the cache's folder has room for `needed` bytes."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ResourceError(
            f"{what} needs {gigabytes(needed)} in {folder}, where {gigabytes(free)} are free. Free "
            f"some space, or name a folder on another disk in ${CACHE_VARIABLE}."
        )


@contextmanager
def quiet_transformers(bars: bool) -> Iterator[None]:
    """Silence transformers' warnings, and its progress bars unless `bars`.

    What the warnings would say, we check and raise. A user who asked transformers for more than its
    default keeps that.
    """
    import transformers  # here: headers are read where no model of theirs is made
    from huggingface_hub import utils as hub_utils

    hf: Any = transformers.utils.logging
    hub: Any = hub_utils
    level, had_bars = hf.get_verbosity(), hf.is_progress_bar_enabled()
    had_hub_bars = not hub.are_progress_bars_disabled()
    bars = bars and had_hub_bars  # who has switched those off wants none
    if level == logging.WARNING:
        hf.set_verbosity_error()
    if not bars:
        hf.disable_progress_bar()  # this switches the hub's bars too, and so does its opposite
    try:
        yield
    finally:
        hf.set_verbosity(level)
        if not bars and had_bars:
            hf.enable_progress_bar()
        if not bars:
            (hub.enable_progress_bars if had_hub_bars else hub.disable_progress_bars)()
