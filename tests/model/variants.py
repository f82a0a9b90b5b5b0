"""The tiny models that every conformance test runs on: each family, and the peculiarities that hide in configs."""

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

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-odd-sizes": ("llama", {"hidden_size": 52, "head_dim": 12, "intermediate_size": 70, "vocab_size": 259}),
    "llama-many-groups": ("llama", {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 64}),
    "llama-no-groups": ("llama", {"num_key_value_heads": 4, "head_dim": 80}),
    "llama-rope-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}),
    "llama-rope-llama3": ("llama", {"rope_parameters": {**_LLAMA3, "rope_theta": 500000.0}}),
    "llama-rope-yarn": (
        "llama",
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 128}},
    ),
    "llama-rope-dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}),
    "mistral": ("mistral", {"sliding_window": 24}),
    "mistral-no-window": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2-windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2}),
    "qwen3": ("qwen3", {}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
}


def build(variant: str, **changes: Any):
    family, options = VARIANTS[variant]
    return tiny_model(family, **{**options, **changes})
