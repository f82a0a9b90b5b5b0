"""Configs of tiny random models, for tests: what a family needs so that what it does differently
matters at that size. Knows no model.
"""

from __future__ import annotations

from typing import Any

_LOUD = {"num_key_value_heads": None}  # every head has keys of its own
_DELTA: dict[str, Any] = {
    "layer_types": [*["linear_attention"] * 2, "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
_SHARED: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
_GRANITE_EXPERTS: dict[str, Any] = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.5,
    "logits_scaling": 0.7,
}
_GRANITE_SINKS: dict[str, Any] = {
    "sliding_window": 24,
    "layer_rope_theta": [10000.0, 0, 500.0, 10000.0],
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.5,
    "logits_scaling": 0.7,
}
# so that what a family does differently matters at this size
PECULIAR_CONFIGS: dict[str, dict[str, Any]] = {
    "gemma2": {
        "sliding_window": 24,
        "query_pre_attn_scalar": 40,
        "attn_logit_softcapping": 1.5,
        "final_logit_softcapping": 4.0,
    },
    "gemma3_text": {"sliding_window": 24, "sliding_window_pattern": 2, "query_pre_attn_scalar": 40},
    "gemma4_text": {
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "global_head_dim": 32,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
    },
    "granite": {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.5,
        "logits_scaling": 0.7,
    },
    "cohere": {"logit_scale": 0.4, "use_qk_norm": True},
    "cohere2": {"logit_scale": 0.4, "sliding_window": 24, "sliding_window_pattern": 2},
    "smollm3": {"no_rope_layer_interval": 2},
    "qwen3_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "mlp_only_layers": [1],
        "norm_topk_prob": True,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "hyperclovax": {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.5,
        "logits_scaling": 0.7,
    },
    "mellum": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "sliding_window": 24,
    },
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64, "init_std": 0.15},
    "phi": {"num_key_value_heads": 4},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "conv"], "conv_bias": True},
    "lfm2_moe": {
        "layer_types": ["conv", "full_attention", "conv", "conv"],
        "num_dense_layers": 1,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "routed_scaling_factor": 1.4,
    },
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": {**_DELTA, **_SHARED},
    "qwen3_next": {**_DELTA, **_SHARED, "mlp_only_layers": [1]},
    "qwen2_moe": _SHARED,
    "bamba": {
        "attn_layer_indices": [1],
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 12,
        "mamba_n_groups": 2,
    },
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention", "mamba", "mamba"],
        "num_local_experts": 0,
        "shared_intermediate_size": 96,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 12,
        "mamba_n_groups": 2,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.5,
        "logits_scaling": 0.7,
    },
    "falcon_h1": {
        "mamba_d_ssm": 128,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 12,
        "mamba_n_groups": 2,
        "embedding_multiplier": 3.0,
        "lm_head_multiplier": 0.7,
        "mlp_multipliers": [0.8, 1.3],
        "key_multiplier": 0.6,
        "attention_out_multiplier": 1.2,
        "attention_in_multiplier": 0.9,
        "ssm_multipliers": [0.7, 1.2, 0.8, 1.3, 0.9],
        "ssm_in_multiplier": 1.1,
        "ssm_out_multiplier": 0.8,
    },
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "full_attention", "mlp", "linear_attention"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 12,
        "n_groups": 2,
    },
    "vaultgemma": {
        "sliding_window": 24,
        "query_pre_attn_scalar": 40,
        "attn_logit_softcapping": 1.5,
        "final_logit_softcapping": 4.0,
    },
    "gpt_neox": {**_LOUD, "attention_bias": True},
    "gptj": {"rotary_dim": 8},
    "codegen": {"rotary_dim": 8, "num_attention_heads": 8, "hidden_size": 128},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 12},
    "granitemoe": _GRANITE_EXPERTS,
    "granitemoeshared": {**_GRANITE_EXPERTS, "shared_intermediate_size": 48},
    "granite_swa": _GRANITE_SINKS,
    "granitemoe_swa": {**_GRANITE_EXPERTS, **_GRANITE_SINKS, "shared_intermediate_size": 48},
    "aria_text": {"moe_num_experts": 4, "moe_topk": 2},
    "flint": {**_SHARED, "sliding_window": 24, "mlp_only_layers": [1]},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24},
    "falcon": {"num_kv_heads": 2},
    "llama4_text": {
        "intermediate_size": 32,
        "intermediate_size_mlp": 96,
        "moe_layers": [1, 2],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "no_rope_layers": [1, 0, 1, 0],
        "attention_chunk_size": 24,
        "floor_scale": 16,
        "attn_scale": 0.4,
    },
    "ministral3": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "llama_4_scaling_beta": 0.4,
        }
    },
    "gpt2": _LOUD,
}
