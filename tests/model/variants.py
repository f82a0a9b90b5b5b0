"""The tiny models that every conformance test runs on: each family, and the peculiarities that hide
in configs."""

from __future__ import annotations

from typing import Any

from selfspec.testing import tiny_model

_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 2.0, 2.5, 3.0],
    "long_factor": [1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 9.0, 9.5],
}
_GEMMA3_LONG = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-odd-sizes": (
        "llama",
        {"hidden_size": 52, "head_dim": 12, "intermediate_size": 70, "vocab_size": 259},
    ),
    "llama-many-groups": (
        "llama",
        {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 64},
    ),
    "llama-no-groups": ("llama", {"num_key_value_heads": 4, "head_dim": 80}),
    "llama-rope-linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    ),
    "llama-rope-llama3": ("llama", {"rope_parameters": {**_LLAMA3, "rope_theta": 500000.0}}),
    "llama-rope-yarn": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 10000.0,
                "original_max_position_embeddings": 128,
            }
        },
    ),
    "llama-rope-dynamic": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
    ),
    "mistral": ("mistral", {"sliding_window": 24}),
    "mistral-no-window": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2-windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3-moe": ("qwen3_moe", {}),
    "qwen3-moe-weights-as-they-are": (
        "qwen3_moe",
        {"norm_topk_prob": False, "mlp_only_layers": []},
    ),
    "mixtral": ("mixtral", {"sliding_window": 24}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {}),
    "gemma2-no-caps": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma3": ("gemma3_text", {}),
    "gemma3-long": (
        "gemma3_text",
        {"rope_parameters": _GEMMA3_LONG, "final_logit_softcapping": 4.0, "sliding_window": 7},
    ),
    "gemma4": ("gemma4_text", {"num_global_key_value_heads": 1, "final_logit_softcapping": 4.0}),
    "gemma4-own-values": (
        "gemma4_text",
        {"attention_k_eq_v": False, "num_global_key_value_heads": 2, "global_head_dim": 24},
    ),
    "gemma4-small": (
        "gemma4_text",
        {
            "attention_k_eq_v": False,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 24,
            "use_double_wide_mlp": True,
        },
    ),
    "gemma3n": ("gemma3n_text", {}),
    "gemma4-experts": (
        "gemma4_text",
        {
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 40,
            "num_global_key_value_heads": 1,
        },
    ),
    "phi3": ("phi3", {}),
    "phi3-longrope": ("phi3", {"rope_parameters": _LONG, "original_max_position_embeddings": 128}),
    "phi3-window-partial": (
        "phi3",
        {
            "sliding_window": 24,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "smollm3": ("smollm3", {}),
    "smollm3-windows": ("smollm3", {"use_sliding_window": True, "sliding_window": 24}),
    "olmo2": ("olmo2", {}),
    "granite": ("granite", {}),
    "granite-biases-tied": (
        "granite",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "cohere": ("cohere", {}),
    "cohere-no-head-norms": ("cohere", {"use_qk_norm": False}),
    "cohere2": ("cohere2", {}),
    "gpt-neox": ("gpt_neox", {}),
    "gpt-neox-in-sequence": ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False}),
    "gpt2": ("gpt2", {}),
    "gpt2-scaled-by-layer": (
        "gpt2",
        {"scale_attn_by_inverse_layer_idx": True, "activation_function": "relu"},
    ),
}


_MIXED = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
    "moe_latent_size": 24,
}
_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 128,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
}

# Families that are a line or a field: a shorter set of tests (test_listed_families.py) sees them.
SHORT: dict[str, tuple[str, dict[str, Any]]] = {
    "apertus": ("apertus", {}),
    "arcee": ("arcee", {}),
    "aria": ("aria_text", {}),
    "afmoe": ("afmoe", {}),
    "biogpt": ("biogpt", {}),
    "bitnet": ("bitnet", {}),
    "bloom": ("bloom", {}),
    "bloom-six-heads": ("bloom", {"num_attention_heads": 6, "hidden_size": 96}),
    "codegen": ("codegen", {}),
    "cohere2_moe": ("cohere2_moe", {"norm_topk_prob": False}),
    "cohere2_moe-sigmoid": (
        "cohere2_moe",
        {
            "expert_selection_fn": "sigmoid",
            "rms_norm_eps": 1e-6,
            "num_shared_experts": 0,
            "prefix_dense_sliding_window_pattern": 1,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
        },
    ),
    "cwm": ("cwm", {"sliding_window": 24}),
    "deepseek_v2": ("deepseek_v2", {}),
    "deepseek_v2-greedy": (
        "deepseek_v2",
        {"topk_method": "greedy", "q_lora_rank": None, "rope_parameters": _YARN},
    ),
    "deepseek_v3": ("deepseek_v3", {}),
    "deepseek_v3-yarn": (
        "deepseek_v3",
        {
            "rope_parameters": _YARN,
            "q_lora_rank": None,
            "rope_interleave": False,
            "v_head_dim": 40,
            "attention_bias": True,
        },
    ),
    "dots1": ("dots1", {}),
    "ernie4_5": ("ernie4_5", {}),
    "ernie4_5_moe": ("ernie4_5_moe", {}),
    "ernie4_5_moe-none-shared": ("ernie4_5_moe", {"moe_num_shared_experts": 0}),
    "exaone4": ("exaone4", {"sliding_window": 24, "sliding_window_pattern": 2}),
    "falcon": ("falcon", {}),
    "falcon-alibi": ("falcon", {"alibi": True}),
    "falcon-alibi-twelve-heads": (
        "falcon",
        {"alibi": True, "num_attention_heads": 12, "hidden_size": 192, "num_kv_heads": 12},
    ),
    "falcon-heads": ("falcon", {"multi_query": False, "num_kv_heads": None}),
    "falcon-in-sequence": ("falcon", {"parallel_attn": False, "bias": True}),
    "falcon-new": ("falcon", {"new_decoder_architecture": True}),
    "falcon-new-one-norm": (
        "falcon",
        {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1},
    ),
    "flint": ("flint", {}),
    "exaone_moe": ("exaone_moe", {}),
    "flex_olmo": ("flex_olmo", {"num_experts": 4, "num_experts_per_tok": 2}),
    "gemma3n-three-streams": (
        "gemma3n_text",
        {"altup_num_inputs": 3, "altup_active_idx": 1, "altup_correct_scale": False},
    ),
    "gemma4-unified": (
        "gemma4_unified_text",
        {
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
        },
    ),
    "glm": ("glm", {}),
    "glm4": ("glm4", {}),
    "glm4_moe": ("glm4_moe", {}),
    "glm4_moe_lite": ("glm4_moe_lite", {}),
    "gpt_bigcode": ("gpt_bigcode", {"num_key_value_heads": None}),
    "gpt_neo": ("gpt_neo", {}),
    "gpt_oss": ("gpt_oss", {}),
    "gptj": ("gptj", {}),
    "granite_swa": ("granite_swa", {}),
    "granitemoe": ("granitemoe", {}),
    "granitemoe_swa": ("granitemoe_swa", {}),
    "granitemoe_swa-alone": ("granitemoe_swa", {"shared_intermediate_size": 0}),
    "granitemoeshared": ("granitemoeshared", {}),
    "gpt_bigcode-heads": ("gpt_bigcode", {"multi_query": False, "num_key_value_heads": None}),
    "helium": ("helium", {}),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {}),
    "hunyuan-alpha": (
        "hunyuan_v1_dense",
        {
            "rope_parameters": {
                "rope_type": "dynamic",
                "factor": 1.0,
                "alpha": 9.0,
                "rope_theta": 10000.0,
            }
        },
    ),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", {}),
    "hy_v3": ("hy_v3", {}),
    "hyperclovax": ("hyperclovax", {}),
    "hyperclovax-no-after": ("hyperclovax", {"use_post_norm": False}),
    "internlm3": ("internlm3", {}),
    "iquestcoder": ("iquestcoder", {}),
    "jais2": ("jais2", {}),
    "llama4": ("llama4_text", {}),
    "llama4-no-norms": ("llama4_text", {"use_qk_norm": False, "attn_temperature_tuning": False}),
    "mellum": ("mellum", {}),
    "minicpm3": ("minicpm3", {}),
    "minimax_m2": ("minimax_m2", {}),
    "ministral": ("ministral", {"sliding_window": 24}),
    "ministral3": ("ministral3", {}),
    "ministral3-window": ("ministral3", {"sliding_window": 24}),
    "modernbert": ("modernbert-decoder", {}),
    "mpt": ("mpt", {}),
    "mpt-six-heads": ("mpt", {"num_attention_heads": 6, "hidden_size": 96}),
    "mpt-clamp": ("mpt", {"attn_config": {"clip_qkv": 0.5, "softmax_scale": 0.3}}),
    "nanochat": ("nanochat", {"final_logit_softcapping": 4.0}),
    "nemotron": ("nemotron", {}),
    "olmo": ("olmo", {}),
    "olmo-clamp": ("olmo", {"clip_qkv": 0.5}),
    "olmo3": ("olmo3", {"sliding_window": 24}),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "olmoe-clamp": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2, "clip_qkv": 0.5}),
    "opt": ("opt", {}),
    "persimmon": ("persimmon", {"num_key_value_heads": None}),
    "phi": ("phi", {}),
    "phi-head-norms": ("phi", {"qk_layernorm": True}),
    "phimoe": ("phimoe", {}),
    "phi4": ("phi4_multimodal", {}),
    "qwen2_moe": ("qwen2_moe", {}),
    "seed_oss": ("seed_oss", {}),
    "solar_open": ("solar_open", {}),
    "stablelm": ("stablelm", {}),
    "stablelm-head-norms": ("stablelm", {"qk_layernorm": True}),
    "stablelm-parallel": ("stablelm", {"use_parallel_residual": True}),
    "starcoder2": ("starcoder2", {"sliding_window": 24}),
    "vaultgemma": ("vaultgemma", {}),
    "xglm": ("xglm", {}),
    "youtu": ("youtu", {}),
}

# Families with recurrent layers, which read chains and have a suite of their own (test_recurrent).
RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": ("lfm2", {}),
    "qwen3_5": ("qwen3_5_text", {}),
    "qwen3_5-moe": ("qwen3_5_moe_text", {}),
    "qwen3-next": ("qwen3_next", {}),
    "bamba": ("bamba", {}),
    "granite-hybrid": ("granitemoehybrid", {}),
    "falcon-h1": ("falcon_h1", {}),
    "falcon-h1-normed": ("falcon_h1", {"mamba_rms_norm": True, "attention_bias": True}),
    "falcon-h1-gated-first": (
        "falcon_h1",
        {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_proj_bias": True},
    ),
    "nemotron-h": ("nemotron_h", {}),
    "nemotron-h-moe": ("nemotron_h", {**_MIXED, "moe_latent_size": None, "num_hidden_layers": 4}),
    "nemotron-h-narrow": ("nemotron_h", {**_MIXED, "seed": 2}),
    "nemotron-h-narrow-biases": ("nemotron_h", {**_MIXED, "mlp_bias": True}),
    "falcon-mamba": ("falcon_mamba", {}),
    "jamba": ("jamba", {}),
    "mamba": ("mamba", {"use_bias": True}),
    "mamba2": ("mamba2", {}),
    "olmo-hybrid": ("olmo_hybrid", {}),
    "olmo-hybrid-rotating": (
        "olmo_hybrid",
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "linear_allow_neg_eigval": False,
        },
    ),
    "lfm2-moe": ("lfm2_moe", {}),
    "granite-hybrid-moe": ("granitemoehybrid", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "granite-hybrid-rotating": ("granitemoehybrid", {"position_embedding_type": "rope"}),
}


def build(variant: str, **changes: Any):
    family, options = {**VARIANTS, **SHORT, **RECURRENT}[variant]
    return tiny_model(family, **{**options, **changes})
