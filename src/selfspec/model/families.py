"""The table of families: where a model's modules are, and how its block differs from Llama's.

Only this file, `weights.py` and `unlisted.py` look up the parts of a transformers model by name. A
family that differs in names only is one line. `docs/adding-a-family.md` adds one that differs more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..errors import OptionError, UnsupportedModel
from .compute.norms import NormKind
from .family import BesideMlpNames, Family, Lenders, OfTokenNames, Scales
from .family_parts import (
    AFTER,
    FC,
    GEMMA,
    H_TO_4H,
    HEAD_NORMS,
    LAYER_HEAD_NORMS,
    LAYER_NORM,
    SANDWICH,
    UNGATED,
    WIDE,
    granite_scales,
    no_rope,
    rope_by_kind,
    rope_in_any_windows,
    rope_in_windows,
)
from .peculiar_families import PECULIAR
from .recurrent_families import RECURRENT
from .shaping import switch_length


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


def _gemma4_kinds(config: Any) -> tuple[tuple[int, int], ...]:
    layers = [config.per_layer_config[layer] for layer in range(config.num_hidden_layers)]
    return tuple((layer.num_key_value_heads, layer.head_dim) for layer in layers)


def _gemma4_more(config: Any) -> Mapping[str, Any]:
    """What the small ones have, and those with experts."""
    more: dict[str, Any] = {}
    if getattr(config, "hidden_size_per_layer_input", None):
        more["of_token"] = OfTokenNames()
    if getattr(config, "enable_moe_block", None):
        own = BesideMlpNames()
        more |= {"experts": "experts", "router": "router", "experts_normed": own}
    return more


def _last_of_kind(config: Any) -> Lenders:
    """The last layers read the keys of the last one of their kind that has its own."""
    kinds, count = config.layer_types, config.num_hidden_layers
    own = count - (getattr(config, "num_kv_shared_layers", None) or 0)
    if own == count:
        return ()
    last = {kinds[layer]: layer for layer in range(own)}
    return (*range(own), *(last[kinds[layer]] for layer in range(own, count)))


def _fairseq_scales(config: Any) -> Scales:
    return Scales(embedding=config.hidden_size**0.5 if config.scale_embedding else 1.0)


def _clamped(config: Any) -> Scales:
    return Scales(clamp=config.clip_qkv or 0.0)


_PHI3: dict[str, Any] = {"qkv": ("self_attn.qkv_proj",), "gate_up": ("mlp.gate_up_proj",)}
_GEMMA4: dict[str, Any] = {
    "norms": WIDE,
    "scales": _gemma3_scales,
    "ropes": rope_by_kind,
    "kinds": _gemma4_kinds,
    "value_norm": "self_attn.v_norm",
    "stream": "layer_scalar",
    "lenders": _last_of_kind,
    "as_configured": _gemma4_more,
    "unless": lambda config: config.use_bidirectional_attention == "all",
}
_GPT2: dict[str, Any] = {
    "layers": "transformer.h",
    "embedding": "transformer.wte",
    "positions": "transformer.wpe",
    "rotary": None,
    "final_norm": "transformer.ln_f",
    "norms": LAYER_NORM,
    "attention": "attn",
    "attention_norm": "ln_1",
    "qkv": ("attn.c_attn",),
    "out": "attn.c_proj",
    "mlp_norm": "ln_2",
    "gate_up": ("mlp.c_fc",),
    "gated": False,
    "down": "mlp.c_proj",
    "ropes": no_rope,
}
# OPT's names, which are fairseq's
_FAIRSEQ: dict[str, Any] = {
    "rotary": None,
    "first_position": 2,
    "key_heads": lambda config: None,
    "norms": LAYER_NORM,
    "attention_norm": "self_attn_layer_norm",
    "out": "self_attn.out_proj",
    "mlp_norm": "final_layer_norm",
    "gate_up": ("fc1",),
    "gated": False,
    "down": "fc2",
    "ropes": no_rope,
}
_GLM: dict[str, Any] = {"interleaved": True, "gate_up": ("mlp.gate_up_proj",)}
_COHERE: dict[str, Any] = {
    "norms": LAYER_NORM,
    "interleaved": True,
    "mlp_norm": "input_layernorm",
    "parallel": True,
    "scales": lambda config: Scales(logits=config.logit_scale),
}

_LATENT: dict[str, Any] = {"latent": True, "key_heads": lambda config: None}
_DEEPSEEK: dict[str, Any] = {"experts": "mlp", "expert_scores": "sigmoid", "least_weight": 1e-20}

FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(),
    "qwen3": Family(**HEAD_NORMS),
    "qwen3_moe": Family(**HEAD_NORMS, experts="mlp"),
    "mixtral": Family(experts="mlp"),
    "gemma": Family(norms=GEMMA, scales=_gemma_scales),
    "gemma2": Family(norms=GEMMA, scales=_gemma_scales, **SANDWICH),
    "gemma3_text": Family(
        norms=GEMMA, scales=_gemma3_scales, ropes=rope_by_kind, **HEAD_NORMS, **SANDWICH
    ),
    "gemma4_text": Family(**_GEMMA4, **HEAD_NORMS, **SANDWICH),
    "gemma4_unified_text": Family(**_GEMMA4, **HEAD_NORMS, **SANDWICH),
    "gemma3n_text": Family(
        norms=WIDE,
        scales=_gemma3_scales,
        ropes=rope_by_kind,
        value_norm="self_attn.v_norm",
        lenders=_last_of_kind,
        of_token=OfTokenNames(),
        streams=lambda config: config.altup_num_inputs,
        # older versions of transformers read other keys there without a cache than with one
        unless=lambda config: not hasattr(type(config), "kv_sharing_modes"),
        **HEAD_NORMS,
        **SANDWICH,
    ),
    "phi3": Family(**_PHI3),
    "phi4_multimodal": Family(**_PHI3),
    "smollm3": Family(
        ropes=lambda config: tuple("" if rotates else None for rotates in config.no_rope_layers)
    ),
    "olmo2": Family(norms=WIDE, **AFTER, **HEAD_NORMS),
    "granite": Family(scales=granite_scales),
    "cohere": Family(**_COHERE, **HEAD_NORMS),
    "cohere2": Family(**_COHERE, ropes=rope_in_windows),
    "gpt_neox": Family(
        layers="gpt_neox.layers",
        embedding="gpt_neox.embed_in",
        rotary="gpt_neox.rotary_emb",
        final_norm="gpt_neox.final_layer_norm",
        norms=LAYER_NORM,
        attention="attention",
        qkv=("attention.query_key_value",),
        by_head=True,
        out="attention.dense",
        parallel=True,
        **H_TO_4H,
    ),
    "gpt2": Family(**_GPT2),
    "gpt_bigcode": Family(
        **_GPT2,
        key_heads=lambda config: 1 if config.multi_query else None,
        as_configured=lambda config: {"by_head": not config.multi_query},
    ),
    "arcee": Family(**UNGATED),
    "biogpt": Family(
        layers="biogpt.layers",
        embedding="biogpt.embed_tokens",
        positions="biogpt.embed_positions",
        final_norm="biogpt.layer_norm",
        scales=_fairseq_scales,
        **_FAIRSEQ,
    ),
    "cwm": Family(),
    "ernie4_5": Family(interleaved=True),
    "exaone4": Family(ropes=rope_in_any_windows, **AFTER, **HEAD_NORMS),
    "deepseek_v2": Family(experts="mlp", experts_normalised=False, interleaved=True, **_LATENT),
    "deepseek_v3": Family(**_DEEPSEEK, **_LATENT),
    "dots1": Family(**_DEEPSEEK, **HEAD_NORMS),
    "ernie4_5_moe": Family(experts="mlp", interleaved=True),
    "exaone_moe": Family(ropes=rope_in_any_windows, **_DEEPSEEK, **HEAD_NORMS),
    "flex_olmo": Family(norms=WIDE, experts="mlp", **AFTER, **HEAD_NORMS),
    "glm": Family(**_GLM),
    "glm4": Family(
        attention_after="post_self_attn_layernorm", mlp_after="post_mlp_layernorm", **_GLM
    ),
    "glm4_moe": Family(**_DEEPSEEK, **HEAD_NORMS),
    "glm4_moe_lite": Family(**_DEEPSEEK, **_LATENT),
    "helium": Family(norms=WIDE, interleaved=True),
    "hy_v3": Family(**_DEEPSEEK, **HEAD_NORMS),
    "hyperclovax": Family(
        as_configured=lambda config: (
            {"attention_after": "post_norm1", "mlp_after": "post_norm2"}
            if config.use_post_norm
            else {}
        ),
        scales=lambda config: replace(granite_scales(config), logits=config.logits_scaling),
    ),
    "internlm3": Family(),
    "iquestcoder": Family(),
    "jais2": Family(norms=LAYER_NORM, **UNGATED),
    "mellum": Family(experts="mlp", ropes=rope_by_kind, **HEAD_NORMS),
    "ministral": Family(),
    "minicpm3": Family(
        scales=lambda config: Scales(
            embedding=config.scale_emb,
            residual=config.scale_depth / config.num_hidden_layers**0.5,
            logits=1 / config.logits_scaling,
        ),
        **_LATENT,
    ),
    "minimax_m2": Family(experts="mlp", expert_scores="sigmoid", **HEAD_NORMS),
    "nanochat": Family(
        embedding_norm="model.norm",
        backwards=True,
        scales=lambda config: Scales(logit_cap=config.final_logit_softcapping or 0.0),
        **FC,
        **HEAD_NORMS,
    ),
    "nemotron": Family(norms=NormKind(centred=True, offset=1.0, wide=True), **UNGATED),
    "olmo": Family(norms=LAYER_NORM, scales=_clamped),
    "olmo3": Family(norms=WIDE, ropes=rope_by_kind, **AFTER, **HEAD_NORMS),
    "olmoe": Family(experts="mlp", scales=_clamped, **HEAD_NORMS),
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
        norms=LAYER_NORM,
        qkv=("self_attn.query_key_value",),
        by_head=True,
        out="self_attn.dense",
        **H_TO_4H,
        **LAYER_HEAD_NORMS,
    ),
    "phi": Family(
        final_norm="model.final_layernorm",
        norms=LAYER_NORM,
        out="self_attn.dense",
        mlp_norm="input_layernorm",
        parallel=True,
        **FC,
        **LAYER_HEAD_NORMS,
    ),
    "qwen2_moe": Family(experts="mlp"),
    "seed_oss": Family(),
    "solar_open": Family(**_DEEPSEEK),
    "stablelm": Family(
        norms=LAYER_NORM,
        parallel=True,
        as_configured=lambda config: (
            {"mlp_norm": "input_layernorm"} if config.use_parallel_residual else {}
        ),
        **LAYER_HEAD_NORMS,
    ),
    "starcoder2": Family(norms=LAYER_NORM, gate_up=("mlp.c_fc",), gated=False, down="mlp.c_proj"),
    **PECULIAR,
    **RECURRENT,
    "xglm": Family(
        positions="model.embed_positions.weights",
        final_norm="model.layer_norm",
        scales=_fairseq_scales,
        **_FAIRSEQ,
    ),
    "vaultgemma": Family(norms=GEMMA, scales=_gemma_scales, mlp_norm="pre_feedforward_layernorm"),
    "youtu": Family(**_LATENT),
}


def family_of(config: Any) -> Family | None:
    """The table's entry for a config. None: the family is not in the table, or not so."""
    found = FAMILIES.get(config.model_type)
    if found is None or found.unless(config):
        return None
    return replace(found, **found.as_configured(config))


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
