"""The kinds of trained parts: what the description of each says and which tensors it holds.

All of it is checked once, when a part is read: a file of somebody else's may say anything. What a
description says of the base is compared with the model later. Does not know folders.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..core.schema import Unfit, made
from .blocks import BlockSize

CONTEXTS = ("tokens", "pairs", "triples")  # whose successors are counted: one token, two, three
_LARGEST = 1 << 20  # of any number in a description but the vocabulary
_LORA = re.compile(r"layers/(\d+)/[\w/]+\.([ab]|weight)")
Sizes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Base:
    """What a description says of the model: its sizes, and some of what it computes."""

    family: str
    layers: int
    width: int
    vocabulary: int
    values: list[float]


@dataclass(frozen=True)
class Described:
    """A description."""

    schema: int
    kind: str
    base: Base
    settings: dict[str, Any]
    facts: dict[str, Any]


@dataclass(frozen=True)
class HeadSettings:
    """A draft head: which layers it reads, and its block."""

    layers: list[int]
    block: BlockSize

    def sizes(self, base: Base, held: Mapping[str, Tensor]) -> Sizes:
        _require_layers("layers", self.layers, 0, base.layers)
        width = base.width
        entered = {
            "vocabulary": (len(held["vocabulary"]),),
            "enter.weight": (width, (1 + len(self.layers)) * width),
            "again.weight": (width, width),
        }
        return {**entered, **_block(self.block, base, 0)}


@dataclass(frozen=True)
class AdapterSettings:
    """An exit adapter: after which layer, how many blocks, and how large they are."""

    exit: int
    blocks: int
    block: BlockSize

    def sizes(self, base: Base, held: Mapping[str, Tensor]) -> Sizes:
        _require_layers("exit", [self.exit], 1, base.layers)
        _require_layers("blocks", [self.blocks], 1, base.layers)
        sizes = {"vocabulary": (len(held["vocabulary"]),), "enter.weight": (base.width, base.width)}
        for index in range(self.blocks):
            sizes |= _block(self.block, base, index)
        return sizes


@dataclass(frozen=True)
class LoraSettings:
    """A draft-LoRA: which layers a draft skips, and the rank of the matrices beside the others. At
    rank 0 it has weights in place of theirs."""

    attention: list[int]
    mlp: list[int]
    rank: int

    def sizes(self, base: Base, held: Mapping[str, Tensor]) -> Sizes:
        """Of the matrices only the rank is known here; `lora.py` compares the rest."""
        for name in ("attention", "mlp"):
            _require_layers(name, getattr(self, name), 0, base.layers)
        _require_layers("rank", [self.rank], 0, _LARGEST)
        sizes: dict[str, tuple[int, ...]] = {"vocabulary": (len(held["vocabulary"]),)}
        for name, tensor in held.items():
            layer = _LORA.fullmatch(name)
            if layer is None or (layer[2] == "weight") != (self.rank == 0):
                continue
            _require_layers(name, [int(layer[1])], 0, base.layers)
            if not self.rank:
                sizes[name] = tuple(tensor.shape) if tensor.dim() == 2 else (0, 0)
                continue
            other = f"{name[:-1]}{'b' if name.endswith('a') else 'a'}"
            if other not in held:
                raise Unfit(f"it lacks the tensor {other!r}")
            down = name.endswith("a")
            shape = tuple(tensor.shape)
            sizes[name] = (self.rank, *shape[1:2]) if down else (*shape[:1], self.rank)
        return sizes


@dataclass(frozen=True)
class SuccessorSettings:
    """Successors: how many tokens there are."""

    vocabulary: int

    def sizes(self, base: Base, held: Mapping[str, Tensor]) -> Sizes:
        if self.vocabulary != base.vocabulary:
            raise Unfit(f"settings.vocabulary is {self.vocabulary}, the base's {base.vocabulary}")
        sizes: dict[str, tuple[int, ...]] = {}
        for size, name in enumerate(CONTEXTS, 1):
            if size > 2 and f"{name}.keys" not in held:  # tables from before have none
                continue
            most = self.vocabulary**size
            keys, successors = held[f"{name}.keys"], held[f"{name}.successors"]
            rows = (len(keys), successors.shape[1] if successors.dim() == 2 else 1)
            sizes |= {f"{name}.keys": rows[:1]}
            sizes |= {f"{name}.{what}": rows for what in ("successors", "chances")}
            _require_ids(f"{name}.keys", keys, most, ascending=True)
            _require_ids(f"{name}.successors", successors, self.vocabulary)
            chances = held[f"{name}.chances"].float()
            if not bool(((chances >= 0) & (chances <= 1)).all()):
                raise Unfit(f"{name}.chances holds numbers that are no chances (0 to 1)")
        return sizes


@dataclass(frozen=True)
class PredictorSettings:
    """Predictors of exits: after which layers, from how many candidates and whose, how wide, and
    how often each layer was left when they were fitted."""

    candidates: int
    source: str
    hidden: int
    layers: list[int]
    exits: list[float]

    def sizes(self, base: Base, held: Mapping[str, Tensor]) -> Sizes:
        _require_layers("layers", self.layers, 1, base.layers)
        if not self.layers or sorted({*self.layers}) != self.layers:
            raise Unfit("settings.layers are not at least one, ascending")
        if len(self.exits) != len(self.layers) or not all(0 <= share <= 1 for share in self.exits):
            raise Unfit("settings.exits are no shares, one a layer")
        _require_layers("candidates", [self.candidates], 1, base.vocabulary)
        _require_layers("hidden", [self.hidden], 1, _LARGEST)
        count, hidden = len(self.layers), self.hidden
        sizes: dict[str, tuple[int, ...]] = {
            "first.weight": (count, 3 * self.candidates, hidden),
            "first.bias": (count, hidden),
            "second.weight": (count, hidden),
            "second.bias": (count,),
        }
        if "vocabulary" in held:
            sizes["vocabulary"] = (len(held["vocabulary"]),)
            _require_layers("candidates", [self.candidates], 1, len(held["vocabulary"]) + 1)
        if {"svm.weight", "svm.bias"} & {*held}:
            sizes |= {"svm.weight": (count, 2), "svm.bias": (count,)}
        return sizes


@dataclass(frozen=True)
class PartKind:
    """What all parts of one kind have in common."""

    drafter: str
    """The drafter that takes such a part, by name."""
    settings: type[Any]
    """The class of its settings."""
    tensors: tuple[str, ...] = field(default=("vocabulary",))
    """Tensors that every such part holds. There may be more, as many as it has blocks or layers."""
    command: str = "train MODEL --recipe {kind}"
    """What makes one for a model."""

    def check(self, described: Described, tensors: Mapping[str, Tensor]) -> None:
        """Raise Unfit unless settings and tensors are those of such a part."""
        settings = made(self.settings, described.settings, "settings")
        if missing := sorted({*self.tensors}.difference(tensors)):
            raise Unfit(f"it lacks the tensor {missing[0]!r}")
        if not all(tensors[name].dim() for name in self.tensors):
            raise Unfit("a tensor of it is a single number")
        sizes = settings.sizes(described.base, tensors)
        if odd := sorted(set(sizes).symmetric_difference(tensors)):
            raise Unfit(f"it {'lacks' if odd[0] in sizes else 'has'} the tensor {odd[0]!r}")
        for name, size in sizes.items():
            if tuple(tensors[name].shape) != size:
                found = tuple(tensors[name].shape)
                raise Unfit(f"the tensor {name!r} has shape {found}, not {size}")
            if tensors[name].is_floating_point() and not bool(tensors[name].isfinite().all()):
                raise Unfit(f"the tensor {name!r} holds numbers that are not finite")
        if "vocabulary" in tensors:
            _require_ids(
                "vocabulary", tensors["vocabulary"], described.base.vocabulary, unique=True
            )


KINDS: Mapping[str, PartKind] = {
    "draft-head": PartKind(
        "draft-head", HeadSettings, ("vocabulary", "enter.weight", "again.weight")
    ),
    "exit-adapter": PartKind("early-exit", AdapterSettings, ("vocabulary", "enter.weight")),
    "draft-lora": PartKind("layer-skip", LoraSettings),
    "successors": PartKind(
        "recycle",
        SuccessorSettings,
        (
            *("tokens.keys", "tokens.successors", "tokens.chances"),
            *("pairs.keys", "pairs.successors", "pairs.chances"),
        ),
    ),
    "exit-predictors": PartKind(
        "dynamic-exit",
        PredictorSettings,
        ("first.weight", "first.bias", "second.weight", "second.bias"),
        "fit-exits MODEL",
    ),
}


def command_for(kind: str) -> str:
    """What makes a part of that kind."""
    return "selfspec " + KINDS[kind].command.format(kind=kind)


def _require_layers(name: str, values: list[int], first: int, end: int) -> None:
    for value in values:
        if not first <= value < end:
            raise Unfit(f"{name} is {value}, outside {first} to {end - 1}")


def _require_ids(
    name: str, ids: Tensor, end: int, unique: bool = False, ascending: bool = False
) -> None:
    """Whole numbers from 0 to `end` - 1."""
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise Unfit(f"{name} holds {ids.dtype}, not whole numbers")
    ids = ids.flatten().long()
    if not ids.numel():
        if unique:
            raise Unfit(f"{name} is empty, so nothing could be drafted")
        return
    if int(ids.min()) < 0 or int(ids.max()) >= end:
        raise Unfit(f"{name} holds {int(ids.min())} to {int(ids.max())}, outside 0 to {end - 1}")
    if unique and len(ids.unique()) < len(ids):
        raise Unfit(f"{name} names a token twice")
    if ascending and not bool((ids[1:] > ids[:-1]).all()):
        raise Unfit(f"{name} is not in order")


def _block(size: BlockSize, base: Base, index: int) -> Sizes:
    """The tensors of a small block."""
    for name, value in vars(size).items():
        if not 0 < value <= _LARGEST or not math.isfinite(value):
            raise Unfit(f"settings.block.{name} is {value}, outside 1 to {_LARGEST}")
    if size.width != base.width or size.heads % size.kv_heads or size.head_size % 2:
        raise Unfit(
            f"settings.block ({size}) is none for states of {base.width} numbers: the width has to "
            "be equal, heads a multiple of kv_heads, and head_size even"
        )
    width, inner = size.width, size.inner
    queries, keys = size.heads * size.head_size, size.kv_heads * size.head_size
    shapes = {
        "self_attn.q_proj": (queries, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (width, queries),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
        "input_layernorm": (width,),
        "post_attention_layernorm": (width,),
    }
    return {f"blocks.{index}.{name}.weight": shape for name, shape in shapes.items()}
