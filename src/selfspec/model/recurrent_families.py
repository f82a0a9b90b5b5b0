"""The table's entries for families with recurrent layers. Part of families.py."""

from __future__ import annotations

from typing import Any

import torch

from .family import Factor, Family, RecurrentNames, Scales
from .family_parts import (
    AFTER,
    GEMMA,
    HEAD_NORMS,
    LAYER_HEAD_NORMS,
    WIDE,
    granite_scales,
    lacks,
    no_rope,
    rope,
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


def _base_of(config: Any) -> float | None:
    """Of rotary angles; None: nothing is rotated."""
    return (getattr(config, "rope_parameters", None) or {}).get("rope_theta")


_MAMBA = RecurrentNames("mamba-2", "mamba")
_DELTA = RecurrentNames(
    "delta rule", "linear_attn", ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b")
)
_QWEN_NEXT: dict[str, Any] = {"norms": GEMMA, "gated_attention": True, **HEAD_NORMS}
_LFM2: dict[str, Any] = {
    "final_norm": "model.embedding_norm",
    "attention_norm": "operator_norm",
    "out": "self_attn.out_proj",
    "mlp_norm": "ffn_norm",
    "gate_up": ("feed_forward.w1", "feed_forward.w3"),
    "down": "feed_forward.w2",
    "activation": "silu",
    "recurrent": RecurrentNames("short convolution", "conv"),
    **LAYER_HEAD_NORMS,
}

_ONLY_MAMBA: dict[str, Any] = {
    "layers": "backbone.layers",
    "embedding": "backbone.embeddings",
    "rotary": None,
    "final_norm": "backbone.norm_f",
    "attention_norm": "norm",
    "mlp_norm": None,
    "single": True,
    "ropes": no_rope,
}

RECURRENT: dict[str, Family] = {
    "bamba": Family(
        final_norm="model.final_layernorm",
        mlp_norm="pre_ff_layernorm",
        gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
        down="feed_forward.down_proj",
        recurrent=_MAMBA,
    ),
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
    "falcon_mamba": Family(
        recurrent=RecurrentNames("mamba-1", "mixer"),
        unless=lambda config: lacks("falcon_mamba", "mamba_selective_scan"),
        **_ONLY_MAMBA,
    ),
    "granitemoehybrid": Family(
        gate_up=("shared_mlp.input_linear",),
        down="shared_mlp.output_linear",
        experts="block_sparse_moe",
        experts_beside=True,
        recurrent=_MAMBA,
        scales=granite_scales,
        ropes=lambda config: (
            rope(config) if config.position_embedding_type == "rope" else no_rope(config)
        ),
    ),
    "jamba": Family(
        rotary=None,
        final_norm="model.final_layernorm",
        mlp_norm="pre_ff_layernorm",
        gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
        down="feed_forward.down_proj",
        experts="feed_forward",
        experts_normalised=False,
        recurrent=RecurrentNames("mamba-1", "mamba"),
        ropes=no_rope,
        unless=lambda config: lacks("jamba", "JambaTopKRouter"),
    ),
    "lfm2": Family(**_LFM2),
    "lfm2_moe": Family(
        **_LFM2,
        rotary="model.pos_emb",
        experts="feed_forward",
        expert_scores="sigmoid",
        least_weight=1e-6,
    ),
    "mamba": Family(
        recurrent=RecurrentNames("mamba-1", "mixer"),
        unless=lambda config: lacks("mamba", "mamba_selective_scan"),
        **_ONLY_MAMBA,
    ),
    "mamba2": Family(
        recurrent=RecurrentNames("mamba-2", "mixer"),
        unless=lambda config: lacks("mamba2", "mamba2_chunk_scan"),
        **_ONLY_MAMBA,
    ),
    "nemotron_h": Family(
        embedding="model.embeddings",
        rotary=None,
        final_norm="model.norm_f",
        norms=WIDE,
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
        experts="mixer",
        expert_scores="sigmoid",
        least_weight=1e-20,
        ropes=no_rope,
    ),
    "olmo_hybrid": Family(
        norms=WIDE,
        recurrent=RecurrentNames(
            "delta rule", "linear_attn", tuple(f"{name}_proj" for name in "qkvgab"), "o_proj"
        ),
        where_recurrent={
            "attention_norm": "input_layernorm",
            "attention_after": None,
            "mlp_norm": "post_attention_layernorm",
            "mlp_after": None,
        },
        ropes=lambda config: no_rope(config) if _base_of(config) is None else rope(config),
        as_configured=lambda config: {} if _base_of(config) is not None else {"rotary": None},
        **AFTER,
        **HEAD_NORMS,
    ),
    "qwen3_5_moe_text": Family(experts="mlp", recurrent=_DELTA, **_QWEN_NEXT),
    "qwen3_5_text": Family(recurrent=_DELTA, **_QWEN_NEXT),
    "qwen3_next": Family(
        experts="mlp",
        recurrent=RecurrentNames(
            "delta rule, by heads", "linear_attn", ("in_proj_qkvz", "in_proj_ba")
        ),
        **_QWEN_NEXT,
    ),
}
