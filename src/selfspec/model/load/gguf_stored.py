"""A GGUF file as a model whose matrices stay in the file's own blocks.

Configuration and tokenizer are written once into a small folder in the cache, with a table of
where each tensor lies in the file. The weights stay where they are and are read matrix by matrix.
Does not know kernels.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...errors import BrokenCheckpoint
from ..compute.grouped import Blocks, Grouped
from ..compute.stored import StoredEmbedding, StoredLinear
from .checkpoint import AGAIN, read_json
from .gguf_blocks import FLOATS, FORMATS, decoded, row_bytes
from .gguf_file import (
    architecture_of,
    by_transformers,
    made_once,
    opened_file,
    place,
    require_sizes,
)

TABLE = "tensors.json"
VERSION = "-blocks-1"  # of the table, and of what our kernels run
_LLAMA = ("llama",)  # whose rows of queries and keys are in another order in the file
_LESS = ("gemma2", "gemma3")  # whose norms are stored with 1 added
KNOWN = (*_LLAMA, *_LESS, "qwen2", "qwen3", "phi3")
"""Architectures whose tensors we know by name."""


def stored_folder(path: Path) -> tuple[Path, str]:
    """The small folder of a GGUF file, or why its matrices cannot stay in their blocks."""
    folder = place(path, VERSION)
    made_once(folder, lambda work: _write(path, work))
    return folder, str(read_json(folder / TABLE).get("why_expanded", ""))


def _write(path: Path, work: Path) -> None:
    reader = opened_file(path)
    require_sizes(path, reader)
    table: dict[str, Any] = {"why_expanded": _why_expanded(reader)}
    if not table["why_expanded"]:
        table |= _tensors(path, reader)
        _write_others(path, work)
    (work / TABLE).write_text(json.dumps(table), encoding="utf-8")


def _why_expanded(reader: Any) -> str:
    architecture = architecture_of(reader)
    if architecture not in KNOWN:
        return f"tensors of {architecture!r} are not known by name here, but of {', '.join(KNOWN)}"
    kinds = {tensor.tensor_type.name for tensor in reader.tensors}
    if unknown := sorted(kinds - FORMATS.keys() - FLOATS.keys()):
        return (
            f"no kernel here runs {', '.join(unknown)}; there are some for {', '.join(FORMATS)}, "
            f"and {', '.join(FLOATS)} run in float32"
        )
    return ""


def _tensors(path: Path, reader: Any) -> dict[str, Any]:
    """Where each tensor lies."""
    tensors = {
        tensor.name: {
            "kind": tensor.tensor_type.name,
            "offset": int(tensor.data_offset),
            "shape": [int(size) for size in reversed(tensor.shape)],
        }
        for tensor in reader.tensors
    }
    facts = {"file": str(path.resolve()), "architecture": architecture_of(reader)}
    return {**facts, "tensors": tensors}


def _write_others(path: Path, work: Path) -> None:
    """Configuration and tokenizer, by transformers."""
    import transformers

    config_of: Any = transformers.AutoConfig
    folder, where = str(path.parent), {"gguf_file": path.name}
    with by_transformers(path):
        config = config_of.from_pretrained(folder, **where)
        config.dtype = "float32"
        config.save_pretrained(work)
        transformers.GenerationConfig.from_model_config(config).save_pretrained(work)
        transformers.AutoTokenizer.from_pretrained(folder, **where).save_pretrained(work)


@dataclass(frozen=True)
class StoredTensors:
    """The tensors of a GGUF file, by the names that it gives them."""

    file: Path
    architecture: str
    tensors: dict[str, Any]

    @staticmethod
    def of(folder: Path) -> StoredTensors:
        facts = read_json(folder / TABLE)
        return StoredTensors(Path(facts["file"]), facts["architecture"], facts["tensors"])

    def matrix(self, name: str, order: Tensor | None = None) -> Blocks:
        """A tensor of two dimensions. `order`: which of its rows stands at each place."""
        facts = self._facts(name, 2)
        (outputs, inputs), kind = facts["shape"], facts["kind"]

        def read(begin: int, end: int) -> Grouped | Tensor:
            if order is None:
                return decoded(kind, self._rows(facts, begin, end))
            return decoded(kind, self._rows(facts, 0, outputs)[order[begin:end]])

        floats = f"{kind} in the file" if kind in FLOATS else ""
        return Blocks(outputs, inputs, read, kind, floats)

    def vector(self, name: str) -> Tensor:
        """A tensor of one dimension, float32."""
        facts = self._facts(name, 1)
        found = decoded(facts["kind"], self._rows({**facts, "shape": [1, *facts["shape"]]}, 0, 1))
        return found.float()[0]

    def require(self, name: str, least: Sequence[int]) -> None:
        """Raise unless a tensor is as large as the model needs it. A matrix may have more rows."""
        shape = self._facts(name, len(least))["shape"]
        rows = shape[0] - least[0]
        if shape[1:] != [*least[1:]] or rows < 0 or (rows and len(least) == 1):
            raise BrokenCheckpoint(
                f"{self.file} has {name} of shape {shape}, and its own numbers ask for "
                f"{[*least]}. {AGAIN}"
            )

    def _facts(self, name: str, dimensions: int) -> dict[str, Any]:
        if name not in self.tensors:
            raise BrokenCheckpoint(
                f"{self.file} lacks the tensor {name}, without which its {self.architecture} model "
                f"cannot run. {AGAIN}"
            )
        facts: dict[str, Any] = self.tensors[name]
        if len(facts["shape"]) != dimensions:
            raise BrokenCheckpoint(
                f"{self.file} has {name} of shape {facts['shape']}, not of {dimensions} "
                f"dimensions. {AGAIN}"
            )
        return facts

    def _rows(self, facts: dict[str, Any], begin: int, end: int) -> Tensor:
        """(rows, bytes) of the file; not mapped, so that they do not stay in memory."""
        size = row_bytes(facts["kind"], facts["shape"][1])
        at = facts["offset"] + begin * size
        raw = np.fromfile(self.file, np.uint8, (end - begin) * size, offset=at)
        return torch.from_numpy(raw.reshape(end - begin, size))


def stored_bytes(folder: Path) -> int:
    """The peak memory of loading: packed weights take about what the file does, and the largest
    matrix is there as bytes meanwhile."""
    tensors = StoredTensors.of(folder).tensors.values()
    packed = sum(
        math.prod(each["shape"][:-1]) * row_bytes(each["kind"], each["shape"][-1])
        for each in tensors
    )
    return int(1.1 * packed + 2 * max(math.prod(each["shape"]) for each in tensors))


def stored_model(folder: Path, config: Any, options: dict[str, Any]) -> Any:
    """transformers' model of a small folder, its matrices left in the file. It can be called."""
    from .empty import empty_model  # here: a model that was loaded before needs none

    model = empty_model(config, options)
    places = places_of(model, folder)
    _require_vectors(model, places, StoredTensors.of(folder))
    fill(model, places, folder)
    return model.eval().requires_grad_(False)


def _require_vectors(
    model: nn.Module, places: Iterable[dict[str, Any]], held: StoredTensors
) -> None:
    """Raise unless norms, biases and the embedding are those of this model. Other matrices are
    compared when they are put into their places."""
    for spot in places:
        part = model.get_submodule(spot["path"])
        for each in spot["vectors"]:
            held.require(f"{spot['name']}.{each}", [part.get_parameter(each).numel()])
        if isinstance(part, nn.Embedding):
            held.require("token_embd.weight", [part.num_embeddings, part.embedding_dim])


def places_of(model: nn.Module, folder: Path) -> list[dict[str, Any]]:
    """For each part of a model that has weights: its path, its name in the file, what it is, its
    numbers besides the matrix."""
    import gguf

    config: Any = model.config
    architecture = StoredTensors.of(folder).architecture
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    places = []
    part: Any
    for path, part in model.named_modules():
        embeds = isinstance(part, (nn.Embedding, StoredEmbedding))
        linear = isinstance(part, (nn.Linear, StoredLinear))
        vectors = [name for name, each in part.named_parameters(recurse=False) if each.dim() == 1]
        if embeds or linear or vectors:
            spot: dict[str, Any] = {"path": path, "vectors": vectors}
            spot["name"] = str(names.get_name(path))
            if embeds:
                scale = getattr(part, "embed_scale", getattr(part, "scale", 1.0))
                spot |= {"kind": "embedding", "scale": float(scale)}
            elif linear:
                spot |= {"kind": "linear", "shape": [part.out_features, part.in_features]}
            places.append(spot)
    return places


def fill(model: nn.Module, places: Iterable[dict[str, Any]], folder: Path) -> None:
    """Put the weights of a file into their places."""
    held, config = StoredTensors.of(folder), model.config
    embedding = held.matrix("token_embd.weight")
    for spot in places:
        path, name, kind = spot["path"], spot["name"], spot.get("kind")
        order = _row_order(name, held.architecture, config)
        vectors = {each: held.vector(f"{name}.{each}") for each in spot["vectors"]}
        if kind == "embedding":
            model.set_submodule(path, StoredEmbedding(embedding, spot["scale"]))
        elif kind == "linear":
            tied = name == "output" and "output.weight" not in held.tensors
            blocks = embedding if tied else held.matrix(f"{name}.weight", order)
            if list(blocks.shape) != spot["shape"]:
                raise BrokenCheckpoint(
                    f"{held.file} has {name} of shape {blocks.shape}, and its own numbers ask for "
                    f"{spot['shape']}. {AGAIN}"
                )
            bias = vectors.get("bias")
            bias = bias if bias is None or order is None else bias[order]
            model.set_submodule(path, StoredLinear(blocks, bias))
        else:
            for each, vector in vectors.items():
                wanted = vector - 1 if held.architecture in _LESS else vector
                part = model.get_submodule(path)
                part.register_parameter(each, nn.Parameter(wanted, requires_grad=False))


def _row_order(name: str, architecture: str, config: Any) -> Tensor | None:
    """Which row of the file stands at each place: pairs that are rotated together lie side by side
    in files of Llama's."""
    short = name.rpartition(".")[2]
    if architecture not in _LLAMA or short not in ("attn_q", "attn_k"):
        return None
    heads = config.num_attention_heads if short == "attn_q" else config.num_key_value_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return torch.arange(heads * size).view(heads, size // 2, 2).transpose(1, 2).flatten()
