"""A GGUF file as an ordinary folder: expanded to float32 by transformers and kept in the cache.

A file is known by its path, size and time of change, so one that was replaced is converted again.
Before that we check that the file is whole, that transformers knows its architecture, that its
quantisations can be read, and that memory and disk suffice. Files whose blocks our kernels run
(gguf_stored.py) need none of this. Does not know how a model is loaded.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock

from ...core.door import is_whole, shown
from ...core.user_cache import cache_root
from ...errors import BrokenCheckpoint, ModelError, UnsupportedModel
from ..compute.memory import gigabytes
from .checkpoint import AGAIN, first_line, quiet_transformers, require_disk, require_memory
from .demo import convert_gguf, make_cache

_HEADS = ("attention.head_count", "attention.head_count_kv")
_SIZES = ("embedding_length", "feed_forward_length", *_HEADS)
_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_COPIES = 2.5  # of the expanded weights, in memory at the peak of a conversion
_OTHER = "Use another quantisation of the model (Q4_K_M and Q8_0 are read)."


def converted(path: Path, why: str = "") -> Path:
    """The folder made from a GGUF file, which is converted unless it is in the cache. `why`: what
    keeps it from being run as it is."""
    folder = place(path)
    if folder.is_dir():  # there by a rename, so it is whole
        return folder
    expanded = 4 * _checked_elements(path)  # bytes, as float32
    require_memory(int(_COPIES * expanded), torch.device("cpu"), f"converting {path}")
    made_once(folder, lambda work: _convert(path, work, folder, expanded, why))
    return folder


def place(path: Path, kind: str = "") -> Path:
    """The folder in the cache for what is made of a file."""
    facts = path.stat()
    identity = f"{path.resolve()}\n{facts.st_size}\n{facts.st_mtime_ns}"
    digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
    return cache_root() / "gguf" / f"{path.stem}{kind}-{digest}"


def made_once(folder: Path, make: Callable[[Path], None]) -> None:
    """Unless it is there, have a folder filled beside its place, then rename it."""
    if folder.is_dir():
        return
    make_cache(folder.parent)
    with FileLock(folder.parent / f".{folder.name}.lock"):
        if folder.is_dir():
            return
        work = folder.parent / f".making-{folder.name}"  # ours alone, under the lock
        shutil.rmtree(work, ignore_errors=True)  # a process that was killed may have left one
        work.mkdir()
        try:
            make(work)
            os.replace(work, folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)


def _convert(path: Path, work: Path, folder: Path, expanded: int, why: str) -> None:
    require_disk(int(1.1 * expanded), folder.parent, f"converting {path}")
    because = f" ({why})" if why else ""
    warnings.warn(
        f"{path} is expanded to float32 once, which can take minutes{because}. The result "
        f"({gigabytes(expanded)}) is kept in {folder}",
        stacklevel=6,
    )
    with by_transformers(path):
        convert_gguf(path, work)


@contextmanager
def by_transformers(path: Path) -> Iterator[None]:
    """Work of transformers on a file; what it raises gets our words."""
    try:
        with quiet_transformers(bars=False):
            yield
    except Exception as error:  # whatever it is: the file is another's, and so is its reader
        if isinstance(error, OSError) and error.errno:  # of the disk
            raise
        raise ModelError(
            f"transformers cannot convert {path}: {first_line(error)}. Use a safetensors copy of "
            "the model, or a newer transformers."
        ) from error


def opened_file(path: Path) -> Any:
    """The gguf package's reader of a file. Raises if the file is not whole, or too new."""
    with path.open("rb") as file:
        start = file.read(8)
    version = int.from_bytes(start[4:], "little")
    if start[:4] == _MAGIC and len(start) == 8 and version not in _VERSIONS:
        raise UnsupportedModel(
            f"{path} is GGUF of version {version}, and selfspec reads {_VERSIONS[0]} and "
            f"{_VERSIONS[-1]}. Convert the model again with a llama.cpp that writes one of these, "
            "or install a newer selfspec."
        )
    try:
        reader = _reader()(path)  # checks the table of tensors
        for name, field in reader.fields.items():  # and no field: each is decoded when asked for
            if not name.startswith("tokenizer."):  # long, and transformers' to read
                field.contents()
        return reader
    except (ValueError, IndexError, KeyError, OverflowError, UnicodeDecodeError) as error:
        if "GGMLQuantizationType" in str(error):
            raise UnsupportedModel(
                f"{path} is quantised in a way that the installed gguf package does not know "
                f"({error}). {_OTHER} Or install a newer gguf package."
            ) from error
        raise BrokenCheckpoint(
            f"{path} cannot be read as GGUF ({error}): it is truncated or corrupt. {AGAIN}"
        ) from error


def _reader() -> type[Any]:
    """The gguf package's reader, which reads behind a file's end without a word: a list that is
    said to be long is then read for ever."""
    import gguf  # here: slow to import and hardly ever needed

    class Reader(gguf.GGUFReader):
        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            end = offset + int(count) * np.dtype(dtype).itemsize
            if end > len(self.data):
                raise ValueError(f"it goes on to byte {end}, and has {len(self.data)}")
            return super()._get(offset, dtype, count, override_order)

    return Reader


def architecture_of(reader: Any) -> str:
    """What a file calls its kind of model; "" if it does not say."""
    field = reader.fields.get("general.architecture")
    return "" if field is None else str(field.contents())


def require_sizes(path: Path, reader: Any) -> None:
    """Raise if a file says that its model has more layers than the file has tensors, or is wider
    than all of them: such a model would be built for hours, or fill the memory."""
    widest = max((int(size) for tensor in reader.tensors for size in tensor.shape), default=0)
    limits = dict.fromkeys(_SIZES, widest) | {"block_count": len(reader.tensors)}
    for name, most in limits.items():
        field = reader.fields.get(f"{architecture_of(reader)}.{name}")
        said = None if field is None else field.contents()
        for value in said if isinstance(said, list) else [] if said is None else [said]:
            if not is_whole(value) or not 0 <= value <= most:
                raise BrokenCheckpoint(
                    f"{path} says {name}={shown(value)}, and its tensors allow 0 to {most}: it "
                    f"is corrupt. {AGAIN}"
                )


def _checked_elements(path: Path) -> int:
    """How many numbers the file holds. Raises if one of them cannot be read."""
    import gguf
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    reader = opened_file(path)
    require_sizes(path, reader)
    architecture = architecture_of(reader)
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
