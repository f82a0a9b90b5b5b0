"""A tiny random model of any causal type that the installed transformers has.

The type's own default config is shrunken by the names of its fields: sizes, layers, heads, experts,
lists that have an entry a layer. A few types have shapes that no name tells (`SPECIAL`). Does not
know selfspec.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from unittest.mock import patch

import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

VOCABULARY = 259
LAYERS = 4

# The first pattern that a field's name matches whole says its value. None: left as it is.
SIZES: Sequence[tuple[str, int | None]] = (
    (r"(n_shared|num_shared|moe_num_shared)_experts|type_vocab_size|task_type_vocab_size", None),
    (r"vocab_size|vocab_size_per_layer_input", VOCABULARY),
    (r"num_hidden_layers|n_layers?|num_layers|(de|en)coder_layers|text_config_layers", LAYERS),
    (r"(num_|n_|swa_num_)?(attention_|decoder_attention_|encoder_attention_)?heads?", 4),
    (r"num_attention_heads|(de|en)coder_attention_heads|swa_num_attention_heads", 4),
    (r"(num|swa_num|n)_(key_value|kv|global_key_value)_heads", 2),
    (r"head_dim|swa_head_dim|global_head_dim|kv_channels|dim_head|linear_\w*head_dim", 16),
    (r"qk_nope_head_dim|v_head_dim", 16),
    (r"qk_rope_head_dim|rotary_dim", 8),
    (r"qk_head_dim", 24),
    (r"hidden_size|n_embd|d_model|dim_model|emb_dim|embedding_size", 64),
    (r"moe_intermediate_size|expert_ffn_hidden_size|shared_\w*intermediate_size", 32),
    (r"intermediate_size|\w*ffn_dim|dff|dim_ff|ffn_hidden_size|n_inner|\w+_intermediate_size", 96),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len|model_max_length", 512),
    (r"max_sequence_length|max_window_size|keep_window_size", 512),
    (r"(num|moe_num|n_routed|num_local|n)_experts", 4),
    (r"num_experts_per_tok(en)?|moe_k|moe_topk|moe_top_k|top_k_experts", 2),
    (r"n_group|topk_group|num_expert_group", 1),
    (r"(q|kv|o)_lora_rank", 16),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index", 1),
    (r"moe_layer_end_index", LAYERS - 1),
    (r"index_n_heads", 4),
    (r"index_head_dim", 16),
    (r"index_topk", 512),
    (r"sliding_window|sliding_window_size|window_size|attention_window_size", 24),
    (r"attention_chunk_size", 32),
    (r"mamba_d_state|state_size|ssm_state_size|mamba_state_dim", 8),
    (r"linear_num_(key|value)_heads|linear_num_heads", 2),
    (r"hidden_size_per_layer_input", 16),
    (r"mamba_chunk_size|chunk_size", 8),
    (r"max_window_layers", 2),
)
_FROM_CONFIG: Any = AutoModel.from_config
_HYBRID = ["linear_attention", "hybrid"] * 2
_EVERY_OTHER = {"mamba_n_heads": 8, "mamba_d_head": 16}
# shapes that no name tells
SPECIAL: Mapping[str, Mapping[str, Any]] = {
    "bamba": {**_EVERY_OTHER, "attn_layer_indices": [1, 3]},
    "blt": {"encoder_hash_byte_group_vocab": 500},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8}},
    "dots1": {
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
    },
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "intermediate_size": 96,
        "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0],
    },
    "gemma4_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
    },
    "granitemoehybrid": {
        **_EVERY_OTHER,
        "layer_types": ["mamba", "attention"] * 2,
        "num_local_experts": 0,  # with experts they run as a whole
        "shared_intermediate_size": 96,
    },
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8, "n_groups": 1},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 16},
    "reformer": {"axial_pos_embds_dim": [16, 48], "axial_pos_shape": [16, 32]},
    "rwkv": {"attention_hidden_size": 64},
    "xlstm": {"qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "layers_block_type": _HYBRID,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "num_key_value_heads": 4,
        "mamba_dt_rank": 4,
    },
    "zamba2": {"layers_block_type": _HYBRID, "num_key_value_heads": 4},
    "zaya": {"num_experts_per_tok": 1},
}


def tiny(kind: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A tiny random model of a type, ready to generate. `changes` go to its config."""
    config = shrunken(kind, **changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        with patch.object(AutoModel, "from_config", _or_nothing):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            # norms and biases start as constants, which would hide mistakes, and some routers as
            # zeros, which choose nobody
            if "norm" in name or parameter.dim() == 1 or not parameter.any():
                parameter.data += 0.2 * torch.randn_like(parameter)
    if model.generation_config is not None:  # what `generate` would write whatever the model says
        model.generation_config.forced_bos_token_id = None
        model.generation_config.forced_eos_token_id = None
    model.eval().requires_grad_(False)
    return model


def _or_nothing(config: PreTrainedConfig, **options: Any) -> torch.nn.Module:
    """A part of a model; nothing in its place if it comes from a package that is not here (Gemma
    3n's eyes from timm). Text runs without it."""
    try:
        part: torch.nn.Module = _FROM_CONFIG(config, **options)
    except ImportError:
        return torch.nn.Module()
    return part


def shrunken(kind: str, **changes: Any) -> PreTrainedConfig:
    """The type's default config with small sizes."""
    config: PreTrainedConfig = AutoConfig.for_model(
        kind, **{**_smaller(AutoConfig.for_model(kind)), **SPECIAL.get(kind, {}), **changes}
    )
    if not hasattr(config, "pad_token_id"):  # a default that older versions forgot for some types
        config.pad_token_id = None
    return config


def _smaller(config: PreTrainedConfig) -> dict[str, Any]:
    facts, changes = config.to_dict(), dict[str, Any]()
    layers = next((v for n, v in facts.items() if _size(n) == LAYERS and isinstance(v, int)), 0)
    chosen = _chosen_layers(facts, layers)
    for name, value in facts.items():
        below = vars(config).get(name)
        if isinstance(below, PreTrainedConfig):
            whole = below.to_dict()
            whole.pop("per_layer_config", None)  # of more layers than are left
            changes[name] = {**whole, **_smaller(below), **SPECIAL.get(below.model_type, {})}
        elif isinstance(value, bool) or value is None:
            continue
        elif isinstance(value, int) and re.fullmatch(r"\w*_token_(id|index)", name):
            changes[name] = {"bos": 1, "eos": 2}.get(name.partition("_")[0], 0)
        elif isinstance(value, int) and (size := _size(name)) is not None:
            changes[name] = size
        elif isinstance(value, list) and layers > LAYERS and len(value) == layers:
            changes[name] = [value[layer] for layer in chosen]
    if "qk_rope_head_dim" in facts:  # latent attention: every head has keys of its own
        changes |= {"num_key_value_heads": 4, "head_dim": 8}
    # large enough that a random model has opinions, and does not only repeat itself
    usual = {"initializer_range": 0.15, "tie_word_embeddings": False, "is_decoder": True}
    return changes | {name: value for name, value in usual.items() if name in facts}


def _size(name: str) -> int | None:
    return next((size for pattern, size in SIZES if re.fullmatch(pattern, name)), None)


def _chosen_layers(facts: Mapping[str, Any], layers: int) -> Sequence[int]:
    """Some layers of every kind that the config's lists name."""
    lists = [v for v in facts.values() if isinstance(v, list) and len(v) == layers]
    kinds: dict[str, int] = {}
    for layer in range(layers):
        kinds.setdefault(repr([each[layer] for each in lists]), layer)
    first: Iterable[int] = [*sorted(kinds.values())[:LAYERS], *range(layers)]
    return sorted(list(dict.fromkeys(first))[:LAYERS])
