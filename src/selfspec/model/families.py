"""The table of families: where a model's modules are, and how its block differs from Llama's.

Only this file, `weights.py` and `unlisted.py` look up the parts of a transformers model by name. A
family that differs in names only is one line. `docs/adding-a-family.md` adds one that differs more.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ..errors import OptionError, UnsupportedModel
from .compute.norms import NormKind
from .family import Factor, Family, RecurrentNames, Ropes, Scales
from .shaping import switch_length

_WIDE = NormKind(wide=True)
_LAYER_NORM = NormKind(centred=True, wide=True)
_GEMMA = NormKind(offset=1.0, wide=True)


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


def _falcon_factors(config: Any) -> dict[str, Factor]:
    inner, states = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
    inner = int(config.mamba_expand * config.hidden_size) if inner is None else inner
    sizes = torch.tensor([inner, inner, states, states, config.mamba_n_heads])
    sections = torch.tensor(config.ssm_multipliers).repeat_interleave(sizes)
    gate, down = config.mlp_multipliers
    into = config.attention_in_multiplier
    return {
        "self_attn.q_proj": Factor(into),
        "self_attn.k_proj": Factor(into, config.key_multiplier),
        "self_attn.v_proj": Factor(into),
        "self_attn.o_proj": Factor(outputs=config.attention_out_multiplier),
        "mamba.in_proj": Factor(config.ssm_in_multiplier, sections),
        "mamba.out_proj": Factor(outputs=config.ssm_out_multiplier),
        "feed_forward.gate_proj": Factor(outputs=gate),
        "feed_forward.down_proj": Factor(outputs=down),
    }


def _rope(config: Any) -> Ropes:
    return ("",) * int(config.num_hidden_layers)


def _no_rope(config: Any) -> Ropes:
    return (None,) * int(config.num_hidden_layers)


def _rope_by_kind(config: Any) -> Ropes:
    return tuple(config.layer_types)


def _rope_in_windows(config: Any) -> Ropes:
    return tuple("" if kind == "sliding_attention" else None for kind in config.layer_types)


def _rope_in_any_windows(config: Any) -> Ropes:
    return _rope_in_windows(config) if config.sliding_window else _rope(config)


_HEAD_NORMS: dict[str, Any] = {"query_norm": "self_attn.q_norm", "key_norm": "self_attn.k_norm"}
_LAYER_HEAD_NORMS: dict[str, Any] = {
    "query_norm": "self_attn.q_layernorm",
    "key_norm": "self_attn.k_layernorm",
}
_SANDWICH: dict[str, Any] = {
    "attention_after": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_after": "post_feedforward_layernorm",
}
_AFTER: dict[str, Any] = {
    "attention_norm": None,
    "attention_after": "post_attention_layernorm",
    "mlp_norm": None,
    "mlp_after": "post_feedforward_layernorm",
}
_UNGATED: dict[str, Any] = {"gate_up": ("mlp.up_proj",), "gated": False}
_FC: dict[str, Any] = {"gate_up": ("mlp.fc1",), "gated": False, "down": "mlp.fc2"}
_H_TO_4H: dict[str, Any] = {
    "gate_up": ("mlp.dense_h_to_4h",),
    "gated": False,
    "down": "mlp.dense_4h_to_h",
}
_GPT2: dict[str, Any] = {
    "layers": "transformer.h",
    "embedding": "transformer.wte",
    "positions": "transformer.wpe",
    "rotary": None,
    "final_norm": "transformer.ln_f",
    "norms": _LAYER_NORM,
    "attention": "attn",
    "attention_norm": "ln_1",
    "qkv": ("attn.c_attn",),
    "out": "attn.c_proj",
    "mlp_norm": "ln_2",
    "gate_up": ("mlp.c_fc",),
    "gated": False,
    "down": "mlp.c_proj",
    "ropes": _no_rope,
}
# OPT's names, which are fairseq's
_FAIRSEQ: dict[str, Any] = {
    "rotary": None,
    "first_position": 2,
    "key_heads": lambda config: None,
    "norms": _LAYER_NORM,
    "attention_norm": "self_attn_layer_norm",
    "out": "self_attn.out_proj",
    "mlp_norm": "final_layer_norm",
    "gate_up": ("fc1",),
    "gated": False,
    "down": "fc2",
    "ropes": _no_rope,
}
_GLM: dict[str, Any] = {"interleaved": True, "gate_up": ("mlp.gate_up_proj",)}
_COHERE: dict[str, Any] = {
    "norms": _LAYER_NORM,
    "interleaved": True,
    "mlp_norm": "input_layernorm",
    "parallel": True,
    "scales": lambda config: Scales(logits=config.logit_scale),
}

_LATENT: dict[str, Any] = {"latent": True, "key_heads": lambda config: None}
_DEEPSEEK: dict[str, Any] = {"experts": "mlp", "expert_scores": "sigmoid", "least_weight": 1e-20}
_MAMBA = RecurrentNames("mamba-2", "mamba")
_DELTA = RecurrentNames(
    "delta rule", "linear_attn", ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b")
)
_QWEN_NEXT: dict[str, Any] = {"norms": _GEMMA, "gated_attention": True, **_HEAD_NORMS}
_LFM2: dict[str, Any] = {
    "final_norm": "model.embedding_norm",
    "attention_norm": "operator_norm",
    "out": "self_attn.out_proj",
    "mlp_norm": "ffn_norm",
    "gate_up": ("feed_forward.w1", "feed_forward.w3"),
    "down": "feed_forward.w2",
    "activation": "silu",
    "recurrent": RecurrentNames("short convolution", "conv"),
    **_LAYER_HEAD_NORMS,
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
    "smollm3": Family(
        ropes=lambda config: tuple("" if rotates else None for rotates in config.no_rope_layers)
    ),
    "olmo2": Family(norms=_WIDE, **_AFTER, **_HEAD_NORMS),
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
        parallel=True,
        **_H_TO_4H,
    ),
    "gpt2": Family(**_GPT2),
    "gpt_bigcode": Family(
        **_GPT2, key_heads=lambda config: 1, unless=lambda config: not config.multi_query
    ),
    "arcee": Family(**_UNGATED),
    "bamba": Family(
        final_norm="model.final_layernorm",
        mlp_norm="pre_ff_layernorm",
        gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
        down="feed_forward.down_proj",
        recurrent=_MAMBA,
    ),
    "biogpt": Family(
        layers="biogpt.layers",
        embedding="biogpt.embed_tokens",
        positions="biogpt.embed_positions",
        final_norm="biogpt.layer_norm",
        scales=lambda config: Scales(
            embedding=config.hidden_size**0.5 if config.scale_embedding else 1.0
        ),
        **_FAIRSEQ,
    ),
    "cwm": Family(),
    "ernie4_5": Family(interleaved=True),
    "exaone4": Family(ropes=_rope_in_any_windows, **_AFTER, **_HEAD_NORMS),
    "deepseek_v2": Family(experts="mlp", experts_normalised=False, interleaved=True, **_LATENT),
    "deepseek_v3": Family(**_DEEPSEEK, **_LATENT),
    "dots1": Family(**_DEEPSEEK, **_HEAD_NORMS),
    "ernie4_5_moe": Family(experts="mlp", interleaved=True),
    "exaone_moe": Family(ropes=_rope_in_any_windows, **_DEEPSEEK, **_HEAD_NORMS),
    "falcon_h1": Family(
        final_norm="model.final_layernorm",
        mlp_norm="pre_ff_layernorm",
        gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
        down="feed_forward.down_proj",
        recurrent=RecurrentNames("mamba-2", "mamba", beside=True),
        scales=lambda config: Scales(
            embedding=config.embedding_multiplier, logits=config.lm_head_multiplier
        ),
        factors=_falcon_factors,
    ),
    "flex_olmo": Family(norms=_WIDE, experts="mlp", **_AFTER, **_HEAD_NORMS),
    "glm": Family(**_GLM),
    "glm4": Family(
        attention_after="post_self_attn_layernorm", mlp_after="post_mlp_layernorm", **_GLM
    ),
    "glm4_moe": Family(**_DEEPSEEK, **_HEAD_NORMS),
    "glm4_moe_lite": Family(**_DEEPSEEK, **_LATENT),
    "granitemoe": Family(experts="block_sparse_moe", scales=_granite_scales),
    "helium": Family(norms=_WIDE, interleaved=True),
    "granitemoehybrid": Family(
        gate_up=("shared_mlp.input_linear",),
        down="shared_mlp.output_linear",
        experts="block_sparse_moe",
        experts_beside=True,
        recurrent=_MAMBA,
        scales=_granite_scales,
        ropes=lambda config: (
            _rope(config) if config.position_embedding_type == "rope" else _no_rope(config)
        ),
    ),
    "hyperclovax": Family(
        attention_after="post_norm1",
        mlp_after="post_norm2",
        unless=lambda config: not config.use_post_norm,
        scales=lambda config: replace(_granite_scales(config), logits=config.logits_scaling),
    ),
    "internlm3": Family(),
    "iquestcoder": Family(),
    "jais2": Family(norms=_LAYER_NORM, **_UNGATED),
    "lfm2": Family(**_LFM2),
    "lfm2_moe": Family(
        **_LFM2,
        rotary="model.pos_emb",
        experts="feed_forward",
        expert_scores="sigmoid",
        least_weight=1e-6,
    ),
    "mellum": Family(experts="mlp", ropes=_rope_by_kind, **_HEAD_NORMS),
    "ministral": Family(),
    "minicpm3": Family(
        scales=lambda config: Scales(
            embedding=config.scale_emb,
            residual=config.scale_depth / config.num_hidden_layers**0.5,
            logits=1 / config.logits_scaling,
        ),
        **_LATENT,
    ),
    "minimax_m2": Family(experts="mlp", expert_scores="sigmoid", **_HEAD_NORMS),
    "nanochat": Family(
        embedding_norm="model.norm",
        backwards=True,
        scales=lambda config: Scales(logit_cap=config.final_logit_softcapping or 0.0),
        **_FC,
        **_HEAD_NORMS,
    ),
    "nemotron": Family(norms=NormKind(centred=True, offset=1.0, wide=True), **_UNGATED),
    "nemotron_h": Family(
        embedding="model.embeddings",
        rotary=None,
        final_norm="model.norm_f",
        norms=_WIDE,
        attention="mixer",
        attention_norm="norm",
        qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
        out="mixer.o_proj",
        mlp_norm="norm",
        gate_up=("mixer.up_proj",),
        gated=False,
        down="mixer.down_proj",
        recurrent=RecurrentNames("mamba-2", "mixer"),
        single=True,
        ropes=_no_rope,
        unless=lambda config: "moe" in config.layer_types,
    ),
    "olmo": Family(norms=_LAYER_NORM, unless=lambda config: config.clip_qkv),
    "olmo3": Family(norms=_WIDE, ropes=_rope_by_kind, **_AFTER, **_HEAD_NORMS),
    "olmoe": Family(experts="mlp", unless=lambda config: config.clip_qkv, **_HEAD_NORMS),
    "opt": Family(
        layers="model.decoder.layers",
        embedding="model.decoder.embed_tokens",
        positions="model.decoder.embed_positions",
        final_norm="model.decoder.final_layer_norm",
        unless=lambda config: (
            not config.do_layer_norm_before or config.word_embed_proj_dim != config.hidden_size
        ),
        **_FAIRSEQ,
    ),
    "persimmon": Family(
        final_norm="model.final_layernorm",
        norms=_LAYER_NORM,
        qkv=("self_attn.query_key_value",),
        by_head=True,
        out="self_attn.dense",
        **_H_TO_4H,
        **_LAYER_HEAD_NORMS,
    ),
    "phi": Family(
        final_norm="model.final_layernorm",
        norms=_LAYER_NORM,
        out="self_attn.dense",
        mlp_norm="input_layernorm",
        parallel=True,
        **_FC,
        **_LAYER_HEAD_NORMS,
    ),
    "qwen2_moe": Family(experts="mlp"),
    "qwen3_5_moe_text": Family(experts="mlp", recurrent=_DELTA, **_QWEN_NEXT),
    "qwen3_5_text": Family(recurrent=_DELTA, **_QWEN_NEXT),
    "qwen3_next": Family(
        experts="mlp",
        recurrent=RecurrentNames(
            "delta rule, by heads", "linear_attn", ("in_proj_qkvz", "in_proj_ba")
        ),
        **_QWEN_NEXT,
    ),
    "seed_oss": Family(),
    "solar_open": Family(**_DEEPSEEK),
    "stablelm": Family(
        norms=_LAYER_NORM, unless=lambda config: config.use_parallel_residual or config.qk_layernorm
    ),
    "starcoder2": Family(norms=_LAYER_NORM, gate_up=("mlp.c_fc",), gated=False, down="mlp.c_proj"),
    "vaultgemma": Family(norms=_GEMMA, scales=_gemma_scales, mlp_norm="pre_feedforward_layernorm"),
    "youtu": Family(**_LATENT),
}


def family_of(config: Any) -> Family | None:
    """The table's entry for a config. None: the family is not in the table, or not so."""
    found = FAMILIES.get(config.model_type)
    return None if found is None or found.unless(config) else found


def unsupported(config: Any, reason: str) -> UnsupportedModel:
    """The error for a family whose layers neither the table nor its own modules can run."""
    error = UnsupportedModel(
        f"models of type {config.model_type!r} are not supported: {reason}. "
        f"Choose a known family ({', '.join(sorted(FAMILIES))}) or add this one to "
        "selfspec/model/families.py."
    )
    error.reason = reason
    return error


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
