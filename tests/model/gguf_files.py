"""Tiny GGUF files, as llama.cpp would store them."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGUFWriter

from selfspec.testing import tiny_model, tiny_tokenizer

NAMES = {  # llama.cpp's names of a Qwen2's parts
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.layers": "blk",
}
OPTIONS = {"vocab_size": 261, "num_hidden_layers": 2, "rms_norm_eps": 1e-6}


def write(
    path: Path, kind=None, architecture="qwen2", seed=0, extra=None, kinds=None, **changes
) -> dict[str, torch.Tensor]:
    """A tiny Qwen2, or Llama, as llama.cpp would store it, and the weights that it holds; its
    matrices quantised to `kind`, or to what `kinds` gives for a name."""
    family = architecture if architecture == "llama" else "qwen2"
    model = tiny_model(family, seed, **{**OPTIONS, **changes})
    config, writer, held = model.config, GGUFWriter(path, architecture), {}
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    if family == "llama":
        writer.add_rope_dimension_count(config.head_dim)
    vocabulary = tiny_tokenizer().get_vocab()
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*sorted(vocabulary, key=lambda token: vocabulary[token]), "ab", "ba"])
    writer.add_token_merges(["a b", "b a"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    weights = model.state_dict()
    if config.tie_word_embeddings:
        del weights["lm_head.weight"]
    for name, tensor in weights.items():
        ours, order = name, rows_in_the_file(family, name, config)
        for theirs, short in NAMES.items():
            ours = ours.replace(theirs, short)
        values = (tensor[order] if len(order) else tensor).numpy()
        packing = (kinds or {}).get(ours.removesuffix(".weight"), kind)
        if packing is not None and values.ndim == 2:
            packed = gguf.quantize(values, packing)
            writer.add_tensor(ours, packed, raw_dtype=packing)
            values = gguf.dequantize(packed, packing)
        else:
            writer.add_tensor(ours, values)
        values = torch.from_numpy(np.array(values))
        held[name] = values[order.argsort()] if len(order) else values
    if extra is not None:
        writer.add_tensor("extra", extra)
    for step in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{step}_to_file")()
    writer.close()
    return held


def rows_in_the_file(family, name, config):
    """Llama's queries and keys have numbers that are rotated together side by side there."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    found = heads.get(name.split(".")[-2], 0) if family == "llama" else 0
    size = config.head_dim
    return torch.arange(found * size).view(found, 2, size // 2).transpose(1, 2).flatten()
