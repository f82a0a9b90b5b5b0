"""The table: architecture -> where its parts are and how its block differs from Llama's.

This is the only file that looks into a transformers model or config by name. A family that differs in names only is one
line; see `docs/architecture.md` for what a new kind of difference needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from ..errors import UnsupportedModel


@dataclass(frozen=True)
class Family:
    """How one architecture differs from Llama; the defaults are Llama. Names are relative to the model or to one layer."""

    layers: str = "model.layers"
    embedding: str = "model.embed_tokens"
    rotary: str = "model.rotary_emb"
    final_norm: str = "model.norm"
    head: str = "lm_head"
    attention_norm: str = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    out: str = "self_attn.o_proj"
    query_norm: str | None = None
    key_norm: str | None = None
    mlp_norm: str = "post_attention_layernorm"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"


FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(),
    "qwen3": Family(query_norm="self_attn.q_norm", key_norm="self_attn.k_norm"),
}


@dataclass(frozen=True)
class Shape:
    """The numbers of an architecture that running it needs."""

    family: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    context: int
    activation: str
    windows: tuple[int | None, ...]  # sliding window of each layer


@dataclass(frozen=True)
class Part:
    """A module's weight and what its norm or bias needs."""

    weight: Tensor
    bias: Tensor | None
    eps: float


def family_of(config: Any) -> Family:
    """The table's entry for a config, or an error that lists what is known."""
    known = FAMILIES.get(config.model_type)
    if known is None:
        raise UnsupportedModel(
            f"models of type {config.model_type!r} are not supported; known families: {', '.join(sorted(FAMILIES))}. "
            "Choose a model of one of these, or add the family to selfspec/model/families.py."
        )
    return known


def shape_of(config: Any) -> Shape:
    """The numbers, read from the config."""
    family_of(config)
    activation = getattr(config, "hidden_act", None) or config.hidden_activation
    return Shape(
        family=config.model_type,
        layers=config.num_hidden_layers,
        width=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_size=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        vocabulary=config.vocab_size,
        context=config.max_position_embeddings,
        activation=activation,
        windows=_windows(config),
    )


def _windows(config: Any) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    if not getattr(config, "use_sliding_window", True):
        window = None
    kinds = (
        getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * config.num_hidden_layers
    )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def module(root: nn.Module, path: str) -> nn.Module:
    """The sub-module at a dotted path."""
    found: nn.Module = attrgetter(path)(root)
    return found


def part(root: nn.Module, path: str) -> Part:
    """Weight, bias and epsilon of the linear or norm at a dotted path."""
    found: Any = module(root, path)
    return Part(found.weight, getattr(found, "bias", None), getattr(found, "variance_epsilon", 0.0))


def norm(root: nn.Module, path: str) -> Part:
    """The norm at a dotted path, its weight copied: a small view would keep a whole mapped checkpoint in memory."""
    found = part(root, path)
    return Part(found.weight.detach().clone(), found.bias, found.eps)


def attention_scale(layer: nn.Module) -> float:
    """What scores are multiplied with."""
    return float(attrgetter("self_attn.scaling")(layer))
