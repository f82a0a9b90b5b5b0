"""The table of families: where a model's modules are, and how its block differs from Llama's.

Only this file, `weights.py` and `unlisted.py` look up the parts of a transformers model by name. A
family that differs in names only is one line. `docs/adding-a-family.md` adds one that differs more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ..errors import OptionError, UnsupportedModel
from .compute.norms import NormKind


@dataclass(frozen=True)
class Scales:
    """Factors and soft caps from a config. A soft cap is cap * tanh(x / cap), and 0 is none."""

    embedding: float = 1.0
    residual: float = 1.0
    """Of what each half adds to the residual stream."""
    logits: float = 1.0
    score_cap: float = 0.0
    """Of attention scores."""
    logit_cap: float = 0.0


# the rotary table of each layer: "" where there is only one, None where nothing is rotated
Ropes = tuple[str | None, ...]

_RMS = NormKind()
_LAYER_NORM = NormKind(centred=True, wide=True)
_GEMMA = NormKind(offset=1.0, wide=True)


@dataclass(frozen=True)
class Family:
    """One architecture. The defaults are Llama's. Names are relative to the model or to a layer."""

    layers: str = "model.layers"
    embedding: str = "model.embed_tokens"
    positions: str | None = None
    """Learned embeddings of positions, which are added to those of the tokens."""
    rotary: str | None = "model.rotary_emb"
    final_norm: str = "model.norm"
    head: str = "lm_head"
    norms: NormKind = _RMS
    attention: str = "self_attn"
    attention_norm: str | None = "input_layernorm"
    """None: the half reads the residual stream as it is. The same holds for `mlp_norm`."""
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    by_head: bool = False
    """The fused projection is ordered by heads: query, key and value of one, then of the next."""
    out: str = "self_attn.o_proj"
    query_norm: str | None = None
    """Used in the layers that have it."""
    key_norm: str | None = None
    interleaved: bool = False
    """Rotary pairs are neighbours, not the two halves of a head."""
    attention_after: str | None = None
    """A norm of what the half adds to the residual stream. `mlp_after` is the MLP's."""
    mlp_norm: str | None = "post_attention_layernorm"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    """One name for a fused projection, and for an MLP without a gate."""
    gated: bool = True
    down: str = "mlp.down_proj"
    mlp_after: str | None = None
    experts: str | None = None
    """A mixture of experts, in the layers that have it."""
    parallel: bool = False
    """Both halves read the layer's input. Otherwise the MLP also reads what attention added."""
    scales: Callable[[Any], Scales] = lambda config: Scales()
    ropes: Callable[[Any], Ropes] = lambda config: ("",) * config.num_hidden_layers


def _gemma_scales(config: Any) -> Scales:
    def cap(name: str) -> float:
        return getattr(config, name, None) or 0.0

    return Scales(
        embedding=config.hidden_size**0.5,
        score_cap=cap("attn_logit_softcapping"),
        logit_cap=cap("final_logit_softcapping"),
    )


def _gemma3_scales(config: Any) -> Scales:
    # transformers ignores the cap on scores, although the config has it
    return replace(_gemma_scales(config), score_cap=0.0)


def _granite_scales(config: Any) -> Scales:
    return Scales(
        embedding=config.embedding_multiplier,
        residual=config.residual_multiplier,
        logits=1 / config.logits_scaling,
    )


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
        norms=_GEMMA,
        scales=_gemma3_scales,
        ropes=lambda config: tuple(config.layer_types),
        **_HEAD_NORMS,
        **_SANDWICH,
    ),
    "phi3": Family(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",)),
    "smollm3": Family(
        ropes=lambda config: tuple("" if rotates else None for rotates in config.no_rope_layers)
    ),
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
    """The table's entry for a config. None: the family is not in the table."""
    return FAMILIES.get(config.model_type)


def unsupported(config: Any, reason: str) -> UnsupportedModel:
    """The error for a family that neither the table nor its own modules can run."""
    return UnsupportedModel(
        f"models of type {config.model_type!r} are not supported: {reason}. Choose a known family "
        f"({', '.join(sorted(FAMILIES))}) or add this one to selfspec/model/families.py."
    )


def shape_of(config: Any, family: Family, long: bool = False) -> Shape:
    """The numbers in the config. `long`: for texts beyond the length where frequencies change."""
    heads: int = config.num_attention_heads
    names = ("hidden_act", "hidden_activation", "activation_function")
    activations = [getattr(config, name, None) for name in names]
    # up to the switch, since no text is read again, or everything by the frequencies of long texts
    context: int = config.max_position_embeddings
    if not long:
        context = min(context, switch_length(config) or context)
    return Shape(
        family=config.model_type,
        layers=config.num_hidden_layers,
        width=config.hidden_size,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_size=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocabulary=config.vocab_size,
        context=context,
        activation=next(filter(None, activations), "none"),
        windows=_windows(config),
        ropes=family.ropes(config),
        scales=family.scales(config),
        parallel=family.parallel and getattr(config, "use_parallel_residual", True),
    )


def switch_length(config: Any) -> int | None:
    """The length beyond which all positions of a text rotate by other frequencies ("longrope").

    There transformers reads the whole text again. None: the model has one set of frequencies.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return None
    switch: int | None = rope["original_max_position_embeddings"]
    return switch if switch is None or switch < config.max_position_embeddings else None


def checked_switch(config: Any, long_context: bool) -> int | None:
    """For `long_context`: the length where frequencies change. Raises if the model has none."""
    if not long_context:
        return None
    switch = switch_length(config)
    if switch is None or family_of(config) is None:
        raise OptionError(
            "long_context=True is for models whose frequencies change with a text's length "
            f"(longrope), and this {config.model_type} model has one set, or is run by its own "
            "modules. Leave it out."
        )
    return switch


def _windows(config: Any) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    if not getattr(config, "use_sliding_window", True):
        window = None
    usual = "sliding_attention" if window else "full_attention"
    kinds = getattr(config, "layer_types", None) or [usual] * config.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
