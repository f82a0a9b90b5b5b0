"""The table: architecture -> where its parts are and how its block differs from Llama's.

This and `weights.py` are the only files that look into a transformers model or config by name. A
family that differs in names only is one line; `docs/adding-a-family.md` goes through one that
differs in more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ..errors import OptionError, UnsupportedModel
from .compute.norms import NormKind


@dataclass(frozen=True)
class Scales:
    """Numbers of a config that multiply or bound something on the way."""

    embedding: float = 1.0
    """Of the embedded tokens."""
    residual: float = 1.0
    """Of what each half adds to the stream."""
    logits: float = 1.0
    score_cap: float = 0.0
    """Soft cap on attention scores, cap * tanh(score / cap); 0 is none."""
    logit_cap: float = 0.0
    """Soft cap on logits."""


# of each layer: which rotary table it uses, "" where there is but one, None: it rotates nothing
Ropes = tuple[str | None, ...]


_RMS = NormKind()
_LAYER_NORM = NormKind(centred=True, wide=True)
_GEMMA = NormKind(offset=1.0, wide=True)


def _one_rope(config: Any) -> Ropes:
    layers: int = config.num_hidden_layers
    return ("",) * layers


def _no_scales(config: Any) -> Scales:
    return Scales()


@dataclass(frozen=True)
class Family:
    """How one architecture differs from Llama; the defaults are Llama. Names are relative to the
    model or to one layer."""

    layers: str = "model.layers"
    embedding: str = "model.embed_tokens"
    positions: str | None = None
    """Learned embeddings of positions, added to those of the tokens."""
    rotary: str | None = "model.rotary_emb"
    final_norm: str = "model.norm"
    head: str = "lm_head"
    norms: NormKind = _RMS
    attention: str = "self_attn"
    attention_norm: str | None = "input_layernorm"
    """None: the half reads the stream as it is. So with `mlp_norm`."""
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    by_head: bool = False
    """The fused projection gives each head's query, key and value together, not first all
    queries."""
    out: str = "self_attn.o_proj"
    query_norm: str | None = None
    """A layer without it has none."""
    key_norm: str | None = None
    interleaved: bool = False
    """Rotary pairs are neighbours, not the two halves of a head."""
    attention_after: str | None = None
    """A norm of what the half adds to the stream. So `mlp_after`."""
    mlp_norm: str | None = "post_attention_layernorm"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    """One name for a fused projection, and for an MLP without a gate."""
    gated: bool = True
    down: str = "mlp.down_proj"
    mlp_after: str | None = None
    experts: str | None = None
    """A mixture of experts, in those layers that have one."""
    parallel: bool = False
    """Both halves read what enters the layer; else the MLP reads what attention has added to."""
    scales: Callable[[Any], Scales] = _no_scales
    ropes: Callable[[Any], Ropes] = _one_rope


def _gemma_scales(config: Any) -> Scales:
    def cap(name: str) -> float:
        return getattr(config, name, None) or 0.0

    return Scales(
        embedding=config.hidden_size**0.5,
        score_cap=cap("attn_logit_softcapping"),
        logit_cap=cap("final_logit_softcapping"),
    )


def _gemma3_scales(config: Any) -> Scales:
    scales = _gemma_scales(config)
    # transformers keeps the other number and ignores it
    return Scales(embedding=scales.embedding, logit_cap=scales.logit_cap)


def _granite_scales(config: Any) -> Scales:
    return Scales(
        embedding=config.embedding_multiplier,
        residual=config.residual_multiplier,
        logits=1 / config.logits_scaling,
    )


def _some_ropes(config: Any) -> Ropes:
    return tuple("" if rotates else None for rotates in config.no_rope_layers)


def _rope_by_kind(config: Any) -> Ropes:
    return tuple(config.layer_types)


def _rope_in_windows(config: Any) -> Ropes:
    return tuple("" if kind == "sliding_attention" else None for kind in config.layer_types)


_HEAD_NORMS: dict[str, Any] = {"query_norm": "self_attn.q_norm", "key_norm": "self_attn.k_norm"}
_SANDWICH: dict[str, Any] = {
    "attention_after": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_after": "post_feedforward_layernorm",
}
_COHERE: dict[str, Any] = {
    "norms": _LAYER_NORM,
    "interleaved": True,
    "mlp_norm": "input_layernorm",
    "parallel": True,
    "scales": lambda config: Scales(logits=config.logit_scale),
}

FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(),
    "qwen3": Family(**_HEAD_NORMS),
    "qwen3_moe": Family(**_HEAD_NORMS, experts="mlp"),
    "mixtral": Family(experts="mlp"),
    "gemma": Family(norms=_GEMMA, scales=_gemma_scales),
    "gemma2": Family(norms=_GEMMA, scales=_gemma_scales, **_SANDWICH),
    "gemma3_text": Family(
        norms=_GEMMA, scales=_gemma3_scales, ropes=_rope_by_kind, **_HEAD_NORMS, **_SANDWICH
    ),
    "phi3": Family(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",)),
    "smollm3": Family(ropes=_some_ropes),
    "olmo2": Family(
        norms=NormKind(wide=True),
        attention_norm=None,
        attention_after="post_attention_layernorm",
        mlp_norm=None,
        mlp_after="post_feedforward_layernorm",
        **_HEAD_NORMS,
    ),
    "granite": Family(scales=_granite_scales),
    "cohere": Family(**_COHERE, **_HEAD_NORMS),
    "cohere2": Family(**_COHERE, ropes=_rope_in_windows),
    "gpt_neox": Family(
        layers="gpt_neox.layers",
        embedding="gpt_neox.embed_in",
        rotary="gpt_neox.rotary_emb",
        final_norm="gpt_neox.final_layer_norm",
        norms=_LAYER_NORM,
        attention="attention",
        qkv=("attention.query_key_value",),
        by_head=True,
        out="attention.dense",
        gate_up=("mlp.dense_h_to_4h",),
        gated=False,
        down="mlp.dense_4h_to_h",
        parallel=True,
    ),
    "gpt2": Family(
        layers="transformer.h",
        embedding="transformer.wte",
        positions="transformer.wpe",
        rotary=None,
        final_norm="transformer.ln_f",
        norms=_LAYER_NORM,
        attention="attn",
        attention_norm="ln_1",
        qkv=("attn.c_attn",),
        out="attn.c_proj",
        mlp_norm="ln_2",
        gate_up=("mlp.c_fc",),
        gated=False,
        down="mlp.c_proj",
        ropes=lambda config: (None,) * config.num_hidden_layers,
    ),
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
    ropes: Ropes
    scales: Scales
    parallel: bool

    def first_layers(self, count: int) -> Shape:
        """The shape of the first `count` layers alone."""
        return replace(self, layers=count, windows=self.windows[:count], ropes=self.ropes[:count])


def family_of(config: Any) -> Family | None:
    """The table's entry for a config."""
    return FAMILIES.get(config.model_type)


def unsupported(config: Any, reason: str) -> UnsupportedModel:
    """The error for a family that is not in the table and cannot be run by its own modules
    either."""
    return UnsupportedModel(
        f"models of type {config.model_type!r} are not supported: {reason}. Known families: "
        f"{', '.join(sorted(FAMILIES))}. "
        "Choose a model of one of these, or add the family to selfspec/model/families.py."
    )


def shape_of(config: Any, family: Family, long: bool = False) -> Shape:
    """The numbers, read from the config; `long`: for texts beyond the length where frequencies
    change."""
    names = ("hidden_act", "hidden_activation", "activation_function")
    activation = next((found for name in names if (found := getattr(config, name, None))), "none")
    return Shape(
        family=config.model_type,
        layers=config.num_hidden_layers,
        width=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_size=getattr(config, "head_dim", None)
        or config.hidden_size // config.num_attention_heads,
        vocabulary=config.vocab_size,
        context=_context(config, long),
        activation=activation,
        windows=_windows(config),
        ropes=family.ropes(config),
        scales=family.scales(config),
        parallel=family.parallel and getattr(config, "use_parallel_residual", True),
    )


def switch_length(config: Any) -> int | None:
    """The length beyond which a text's positions rotate by other frequencies ("longrope"), all of
    them, which transformers answers by reading the whole text again; None for models that have one
    set."""
    rope = getattr(config, "rope_parameters", None) or {}
    switch: int | None = (
        rope["original_max_position_embeddings"] if rope.get("rope_type") == "longrope" else None
    )
    return switch if switch is None or switch < config.max_position_embeddings else None


def checked_switch(config: Any, long_context: bool) -> int | None:
    """For long texts: the first position whose frequencies are those of long texts. Raises if the
    model knows no such thing."""
    if not long_context:
        return None
    switch = switch_length(config)
    if switch is None or family_of(config) is None:
        raise OptionError(
            f"long_context=True is for models whose frequencies change with a text's length "
            f"(longrope), and this "
            f"{config.model_type} model has one set, or is run by its own modules; it would do "
            f"nothing. Leave it out."
        )
    return switch


def _context(config: Any, long: bool) -> int:
    """Positions that a model can be asked for: up to the switch, since we read no text again, or
    all by the frequencies of long texts from the first position on."""
    whole: int = config.max_position_embeddings
    return whole if long else min(whole, switch_length(config) or whole)


def _windows(config: Any) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    if not getattr(config, "use_sliding_window", True):
        window = None
    kinds = (
        getattr(config, "layer_types", None)
        or ["sliding_attention" if window else "full_attention"] * config.num_hidden_layers
    )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
