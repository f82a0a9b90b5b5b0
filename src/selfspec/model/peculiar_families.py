"""The table's entries for families whose attention is another one: sinks, chunks, biases and
queries by position, angles and norms at other places. Part of families.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .compute.norms import NormKind
from .compute.ops import LIMIT, STEEPNESS, Temperature
from .family import BeforeHead, Family, Ropes, Scales, Slopes, Temperatures, Windows
from .family_parts import (
    H_TO_4H,
    HEAD_NORMS,
    LAYER_NORM,
    WIDE,
    granite_scales,
    has,
    lacks,
    no_rope,
    rope_by_kind,
    rope_in_windows,
)


def _ministral_temperatures(config: Any) -> Temperatures:
    rope = config.rope_parameters
    every = rope["original_max_position_embeddings"]
    return (Temperature(rope["llama_4_scaling_beta"], every),) * int(config.num_hidden_layers)


def _llama4_ropes(config: Any) -> Ropes:
    return tuple("" if rotates else None for rotates in config.no_rope_layers)


def _llama4_temperatures(config: Any) -> Temperatures:
    """Of the layers that do not rotate."""
    if not config.attn_temperature_tuning:
        return ()
    warm, even = Temperature(config.attn_scale, int(config.floor_scale), 1), Temperature()
    return tuple(even if rotates else warm for rotates in config.no_rope_layers)


def _falcon_layers(config: Any) -> Mapping[str, Any]:
    """Falcon has norms of three kinds of names, and two kinds of positions."""
    if not config.alibi:
        return _falcon_norms(config)
    slopes = [float(torch.tensor(each).bfloat16()) for each in _alibi(config.num_attention_heads)]
    return {
        **_falcon_norms(config),
        "rotary": None,
        "ropes": no_rope,
        "slopes": lambda config: tuple(slopes),
        "coarse_slopes": True,
    }


def _falcon_norms(config: Any) -> Mapping[str, Any]:
    if config.new_decoder_architecture and config.num_ln_in_parallel_attn != 1:
        return {"attention_norm": "ln_attn", "mlp_norm": "ln_mlp"}
    if config.new_decoder_architecture or config.parallel_attn:
        return {"mlp_norm": "input_layernorm"}
    return {"parallel": False}


def _falcon_keys(config: Any) -> int | None:
    if config.new_decoder_architecture:
        return int(config.num_kv_heads)
    return 1 if config.multi_query else None


def _is_clamped_otherwise(config: Any) -> bool:
    """Earlier versions of transformers have these numbers in their code."""
    steepness, limit = (getattr(config, f"swiglu_{name}", None) for name in ("alpha", "limit"))
    return steepness not in (None, STEEPNESS) or limit not in (None, LIMIT)


def _alibi(heads: int, most: float = 8) -> Slopes:
    """A geometric series. Where heads are no power of two, every other number of the series for
    the next power comes first."""
    power = 1 << (heads - 1).bit_length()
    series = [2 ** (-most * n / power) for n in range(1, power + 1)]
    return tuple(series if power == heads else (series[1::2] + series[::2])[:heads])


def _stays_quantised(config: Any) -> bool:
    """Experts in MXFP4, which transformers expands where its kernels for them are not."""
    how = getattr(config, "quantization_config", None)
    return getattr(how, "dequantize", True) is False


def _neo_windows(config: Any) -> Windows:
    return tuple(
        config.window_size if kind == "local" else None for kind in config.attention_layers
    )


def _cohere_ropes(config: Any) -> Ropes:
    """Layers with a window rotate, and dense ones ahead of the experts where all of them attend to
    everything."""
    always = config.prefix_dense_sliding_window_pattern == 1
    layers = zip(rope_in_windows(config), config.mlp_layer_types, strict=True)
    return tuple("" if always and mlp == "dense" else rope for rope, mlp in layers)


def _cohere_layers(config: Any) -> Mapping[str, Any]:
    by_softmax = config.expert_selection_fn == "softmax"
    return {
        "norms": LAYER_NORM if config.rms_norm_eps is None else NormKind(),
        "expert_scores": "softmax of the chosen" if by_softmax else "sigmoid",
    }


_GPTJ: dict[str, Any] = {
    "layers": "transformer.h",
    "embedding": "transformer.wte",
    "rotary": "transformer.h.0.attn.embed_positions",
    "final_norm": "transformer.ln_f",
    "norms": LAYER_NORM,
    "attention": "attn",
    "attention_norm": "ln_1",
    "key_heads": lambda config: None,
    "out": "attn.out_proj",
    "interleaved": True,
    "mlp_norm": "ln_1",
    "gate_up": ("mlp.fc_in",),
    "gated": False,
    "down": "mlp.fc_out",
    "parallel": True,
}


def _rope_by_theta(config: Any) -> Ropes:
    """By the place of a layer's base among all, which its module has in a list."""
    known = sorted({theta for theta in config.layer_rope_theta if theta})
    return tuple(str(known.index(theta)) if theta else None for theta in config.layer_rope_theta)


_HUNYUAN: dict[str, Any] = {
    "query_norm": "self_attn.query_layernorm",
    "key_norm": "self_attn.key_layernorm",
    "norms_behind": True,
}
_GRANITE_EXPERTS: dict[str, Any] = {
    "gate_up": ("shared_mlp.input_linear",),
    "down": "shared_mlp.output_linear",
    "experts": "block_sparse_moe",
    "scales": granite_scales,
    "as_configured": lambda config: {"experts_beside": config.shared_intermediate_size > 0},
}
_GRANITE_SINKS: dict[str, Any] = {
    "sinks": "self_attn.sinks",
    "rotary": "model.rotary_embs.{}",
    "ropes": _rope_by_theta,
}

PECULIAR: dict[str, Family] = {
    "apertus": Family(
        attention_norm="attention_layernorm",
        mlp_norm="feedforward_layernorm",
        gate_up=("mlp.up_proj",),
        gated=False,
        **HEAD_NORMS,
    ),
    "afmoe": Family(
        norms=WIDE,
        qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.gate_proj"),
        gated_attention=True,
        attention_after="post_attention_layernorm",
        mlp_norm="pre_mlp_layernorm",
        mlp_after="post_mlp_layernorm",
        experts="mlp",
        expert_scores="sigmoid",
        least_weight=1e-20,
        scales=lambda config: Scales(
            embedding=config.hidden_size**0.5 if config.mup_enabled else 1.0
        ),
        ropes=rope_in_windows,
        unless=lambda config: lacks("afmoe", "AfmoeSparseMoeBlock"),
        **HEAD_NORMS,
    ),
    "aria_text": Family(
        experts="mlp",
        experts_transposed=True,
        unless=lambda config: config.hidden_act != "silu" or lacks("aria", "AriaTextTopKRouter"),
    ),
    "bitnet": Family(attention_inner="self_attn.attn_sub_norm", mlp_inner="mlp.ffn_sub_norm"),
    "cohere2_moe": Family(
        interleaved=True,
        mlp_norm="input_layernorm",
        parallel=True,
        experts="mlp",
        scales=lambda config: Scales(logits=config.logit_scale),
        ropes=_cohere_ropes,
        as_configured=_cohere_layers,
    ),
    "codegen": Family(qkv=("attn.qkv_proj",), blocks=4, **_GPTJ),
    "gpt_neo": Family(
        layers="transformer.h",
        embedding="transformer.wte",
        positions="transformer.wpe",
        rotary=None,
        final_norm="transformer.ln_f",
        norms=LAYER_NORM,
        attention="attn.attention",
        attention_norm="ln_1",
        qkv=("attn.attention.q_proj", "attn.attention.k_proj", "attn.attention.v_proj"),
        key_heads=lambda config: None,
        out="attn.attention.out_proj",
        unscaled=True,
        windows=_neo_windows,
        ropes=no_rope,
        mlp_norm="ln_2",
        gate_up=("mlp.c_fc",),
        gated=False,
        down="mlp.c_proj",
    ),
    "granite_swa": Family(scales=granite_scales, **_GRANITE_SINKS),
    "granitemoe": Family(
        experts="block_sparse_moe",
        scales=granite_scales,
        unless=lambda config: lacks("granitemoe", "GraniteMoeExperts"),
    ),
    "granitemoe_swa": Family(**_GRANITE_EXPERTS, **_GRANITE_SINKS),
    "granitemoeshared": Family(
        unless=lambda config: lacks("granitemoeshared", "GraniteMoeSharedExperts"),
        **_GRANITE_EXPERTS,
    ),
    "flint": Family(
        norms=NormKind(wide=True),
        sinks="self_attn.sinks",
        experts="mlp",
        expert_scores="sigmoid",
        ropes=rope_in_windows,
        **HEAD_NORMS,
    ),
    "hunyuan_v1_dense": Family(**_HUNYUAN),
    "hunyuan_v1_moe": Family(
        gate_up=("mlp.shared_mlp.gate_proj", "mlp.shared_mlp.up_proj"),
        down="mlp.shared_mlp.down_proj",
        experts="mlp",
        experts_beside=True,
        **_HUNYUAN,
    ),
    "bloom": Family(
        layers="transformer.h",
        embedding="transformer.word_embeddings",
        embedding_norm="transformer.word_embeddings_layernorm",
        rotary=None,
        final_norm="transformer.ln_f",
        norms=LAYER_NORM,
        attention="self_attention",
        qkv=("self_attention.query_key_value",),
        by_head=True,
        key_heads=lambda config: None,
        out="self_attention.dense",
        slopes=lambda config: _alibi(config.num_attention_heads),
        ropes=no_rope,
        activation="gelu_new",
        unless=lambda config: config.apply_residual_connection_post_layernorm,
        **H_TO_4H,
    ),
    "falcon": Family(
        layers="transformer.h",
        embedding="transformer.word_embeddings",
        rotary="transformer.rotary_emb",
        final_norm="transformer.ln_f",
        norms=LAYER_NORM,
        attention="self_attention",
        qkv=("self_attention.query_key_value",),
        by_head=True,
        key_heads=_falcon_keys,
        out="self_attention.dense",
        **H_TO_4H,
        parallel=True,
        as_configured=_falcon_layers,
    ),
    "gpt_oss": Family(
        norms=NormKind(wide=True),
        sinks="self_attn.sinks",
        experts="mlp",
        experts_transposed=True,
        experts_interleaved=True,
        activation="clamped_swiglu",
        unless=lambda config: _is_clamped_otherwise(config) or _stays_quantised(config),
    ),
    "gptj": Family(qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"), **_GPTJ),
    "llama4_text": Family(
        interleaved=True,
        query_norm="self_attn.qk_norm",
        key_norm="self_attn.qk_norm",
        gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
        down="feed_forward.down_proj",
        experts="feed_forward",
        experts_transposed=True,
        expert_scores="sigmoid of inputs",
        ropes=_llama4_ropes,
        temperatures=_llama4_temperatures,
    ),
    "ministral3": Family(temperatures=_ministral_temperatures),
    "phimoe": Family(
        norms=LAYER_NORM,
        experts="mlp",
        expert_scores="near the best",
        experts_normalised=False,
        unless=lambda config: has("phimoe", "PhimoeRMSNorm"),
    ),
    "modernbert-decoder": Family(
        embedding="model.embeddings.tok_embeddings",
        embedding_norm="model.embeddings.norm",
        final_norm="model.final_norm",
        head="decoder",
        norms=LAYER_NORM,
        attention="attn",
        attention_norm="attn_norm",
        qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
        key_heads=lambda config: None,
        out="attn.Wo",
        mlp_norm="mlp_norm",
        gate_up=("mlp.Wi",),
        down="mlp.Wo",
        ropes=rope_by_kind,
        as_configured=lambda config: {
            "before_head": BeforeHead("lm_head.dense", config.classifier_activation, "lm_head.norm")
        },
    ),
    "mpt": Family(
        layers="transformer.blocks",
        embedding="transformer.wte",
        rotary=None,
        final_norm="transformer.norm_f",
        norms=LAYER_NORM,
        attention="attn",
        attention_norm="norm_1",
        qkv=("attn.Wqkv",),
        key_heads=lambda config: None,
        out="attn.out_proj",
        slopes=lambda config: _alibi(config.num_attention_heads, config.attn_config.alibi_bias_max),
        ropes=no_rope,
        scales=lambda config: Scales(clamp=config.attn_config.clip_qkv or 0.0),
        mlp_norm="norm_2",
        gate_up=("ffn.up_proj",),
        gated=False,
        down="ffn.down_proj",
        activation="gelu",
    ),
}
