"""What entries of the table share: kinds of norms, groups of names, which layers rotate. Part of
families.py.
"""

from __future__ import annotations

import sys
from typing import Any

from .compute.norms import NormKind
from .family import Ropes, Scales

WIDE = NormKind(wide=True)
LAYER_NORM = NormKind(centred=True, wide=True)
GEMMA = NormKind(offset=1.0, wide=True)


def lacks(kind: str, name: str) -> bool:
    """Whether transformers' code of a type has no such class or function: older versions keep
    experts, or run recurrent layers, in another way."""
    code = sys.modules.get(f"transformers.models.{kind}.modeling_{kind}")
    return code is not None and not hasattr(code, name)


def has(kind: str, name: str) -> bool:
    """Whether it has one that only older versions have."""
    code = sys.modules.get(f"transformers.models.{kind}.modeling_{kind}")
    return hasattr(code, name)


def granite_scales(config: Any) -> Scales:
    return Scales(
        embedding=config.embedding_multiplier,
        residual=config.residual_multiplier,
        logits=1 / config.logits_scaling,
    )


def rope(config: Any) -> Ropes:
    return ("",) * int(config.num_hidden_layers)


def no_rope(config: Any) -> Ropes:
    return (None,) * int(config.num_hidden_layers)


def rope_by_kind(config: Any) -> Ropes:
    kinds = tuple(config.layer_types)
    return kinds if set(kinds) <= set(config.rope_parameters) else rope(config)


def rope_in_windows(config: Any) -> Ropes:
    return tuple("" if kind == "sliding_attention" else None for kind in config.layer_types)


def rope_in_any_windows(config: Any) -> Ropes:
    return rope_in_windows(config) if config.sliding_window else rope(config)


HEAD_NORMS: dict[str, Any] = {"query_norm": "self_attn.q_norm", "key_norm": "self_attn.k_norm"}
LAYER_HEAD_NORMS: dict[str, Any] = {
    "query_norm": "self_attn.q_layernorm",
    "key_norm": "self_attn.k_layernorm",
}
SANDWICH: dict[str, Any] = {
    "attention_after": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_after": "post_feedforward_layernorm",
}
AFTER: dict[str, Any] = {
    "attention_norm": None,
    "attention_after": "post_attention_layernorm",
    "mlp_norm": None,
    "mlp_after": "post_feedforward_layernorm",
}
UNGATED: dict[str, Any] = {"gate_up": ("mlp.up_proj",), "gated": False}
FC: dict[str, Any] = {"gate_up": ("mlp.fc1",), "gated": False, "down": "mlp.fc2"}
H_TO_4H: dict[str, Any] = {
    "gate_up": ("mlp.dense_h_to_4h",),
    "gated": False,
    "down": "mlp.dense_4h_to_h",
}
