"""A GGUF file as an ordinary folder: expanded to float32 by transformers and kept in the cache.

A file is known by its path, size and time of change, so one that was replaced is converted again.
Before that we check that the file is whole, that transformers knows its architecture, that its
quantisations can be read, and that memory and disk suffice. Does not know how a model is loaded.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock

from ...core.user_cache import cache_root
from ...errors import BrokenCheckpoint, ModelError, UnsupportedModel
from ..compute.memory import gigabytes
from .checkpoint import AGAIN, first_line, quiet_transformers, require_disk, require_memory
from .demo import convert_gguf, make_cache

_COPIES = 2.5  # of the expanded weights, in memory at the peak of a conversion
_OTHER = "Use another quantisation of the model (Q4_K_M and Q8_0 are read)."


def converted(path: Path) -> Path:
    """The folder made from a GGUF file, which is converted unless it is in the cache."""
    facts = path.stat()
    identity = f"{path.resolve()}\n{facts.st_size}\n{facts.st_mtime_ns}"
    root = cache_root() / "gguf"
    folder = root / f"{path.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    if folder.is_dir():  # there by a rename, so it is whole
        return folder
    expanded = 4 * _checked_elements(path)  # bytes, as float32
    require_memory(int(_COPIES * expanded), torch.device("cpu"), f"converting {path}")
    make_cache(root)
    with FileLock(root / f".{folder.name}.lock"):
        if not folder.is_dir():
            _make(path, folder, expanded)
    return folder


def _make(path: Path, folder: Path, expanded: int) -> None:
    """Fill a folder beside the result, then rename it."""
    require_disk(int(1.1 * expanded), folder.parent, f"converting {path}")
    warnings.warn(
        f"{path} is expanded to float32 once, which can take minutes. The result "
        f"({gigabytes(expanded)}) is kept in {folder}",
        stacklevel=5,
    )
    work = folder.parent / f".making-{folder.name}"  # ours alone, under the lock
    shutil.rmtree(work, ignore_errors=True)  # a process that was killed may have left one
    work.mkdir()
    try:
        with quiet_transformers(bars=False):
            convert_gguf(path, work)
        os.replace(work, folder)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ModelError(
            f"transformers cannot convert {path}: {first_line(error)}. Use a safetensors copy of "
            "the model, or a newer transformers."
        ) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _checked_elements(path: Path) -> int:
    """How many numbers the file holds. Raises if one of them cannot be read."""
    import gguf  # here: slow to import and hardly ever needed
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    try:
        reader: Any = gguf.GGUFReader(path)  # checks the magic number and the table of tensors
        architecture = str(reader.fields["general.architecture"].contents())
    except (ValueError, IndexError, KeyError, OverflowError, UnicodeDecodeError) as error:
        if "GGMLQuantizationType" in str(error):
            raise UnsupportedModel(
                f"{path} is quantised in a way that the installed gguf package does not know "
                f"({error}). {_OTHER} Or install a newer gguf package."
            ) from error
        raise BrokenCheckpoint(
            f"{path} cannot be read as GGUF ({error}): it is truncated or corrupt. {AGAIN}"
        ) from error
    known = set(GGUF_SUPPORTED_ARCHITECTURES) - {"general", "tokenizer"}
    spellings = (architecture.replace("moe", "_moe"), architecture.replace("-", "_"))
    if known.isdisjoint((architecture, *spellings)):
        raise UnsupportedModel(
            f"{path} holds a model of architecture {architecture!r}, which transformers cannot "
            f"read from GGUF. It reads {', '.join(sorted(known))}. Use a safetensors copy."
        )
    for kind in {tensor.tensor_type for tensor in reader.tensors}:
        _, size = gguf.GGML_QUANT_SIZES[kind]
        try:
            gguf.dequantize(np.zeros((1, size), dtype=np.uint8), kind)
        except NotImplementedError as error:
            raise UnsupportedModel(
                f"{path} holds weights quantised as {kind.name}, which the gguf package cannot "
                f"expand. {_OTHER}"
            ) from error
    return sum(int(tensor.n_elements) for tensor in reader.tensors)
