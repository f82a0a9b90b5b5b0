"""Models with eyes: the text part runs by the wrapper's name, and what it cannot see is refused."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from selfspec import LLM
from selfspec.errors import PromptError
from selfspec.testing import tiny_tokenizer

_TEXT = {
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "pad_token_id": 0,
}
_EYES = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_QWEN_EYES = {"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 64}
# wrapper: its config, and which way its text part runs
_TWO_SIZES = {
    **_TEXT,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_hidden_layers": 4,
    "sliding_window": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
}
WRAPPERS = {
    "gemma3": ({"text_config": _TEXT, "vision_config": _EYES}, "native", "gemma3_text"),
    "gemma4": (
        {
            "text_config": {
                **_TWO_SIZES,
                "attention_k_eq_v": False,
                "hidden_size_per_layer_input": 16,
                "num_kv_shared_layers": 2,
            },
            "vision_config": {**_EYES, "head_dim": 16},
        },
        "native",
        "gemma4_text",
    ),
    "gemma4_unified": ({"text_config": _TWO_SIZES}, "native", "gemma4_unified_text"),
    "mistral3": (
        {
            "text_config": {**_TEXT, "model_type": "mistral"},
            "vision_config": {**_EYES, "model_type": "pixtral", "head_dim": 16},
        },
        "native",
        "mistral",
    ),
    "llama4": (
        {
            "text_config": {
                **_TEXT,
                "intermediate_size_mlp": 96,
                "num_local_experts": 4,
                "attention_chunk_size": 24,
            },
            "vision_config": {
                **_EYES,
                "vision_output_dim": 32,
                "projector_input_dim": 32,
                "projector_output_dim": 32,
            },
        },
        "native",
        "llama4_text",
    ),
    "qwen2_5_vl": (
        {
            "text_config": {
                **_TEXT,
                "rope_parameters": {
                    "rope_type": "default",
                    "mrope_section": [2, 3, 3],
                    "rope_theta": 10000.0,
                },
            },
            "vision_config": {**_QWEN_EYES, "fullatt_block_indexes": [0], "intermediate_size": 32},
        },
        "floor",
        "qwen2_5_vl",
    ),
}
PROMPT = torch.randint(3, 259, (30,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.mark.parametrize("kind", WRAPPERS)
def test_the_text_part_of_a_wrapper_writes_what_the_wrapper_writes(kind, tmp_path: Path):
    """Weights under a wrapper's names that are lost, or a text part of another config."""
    facts, kernel, family = WRAPPERS[kind]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(kind, **facts))
    model.eval().save_pretrained(tmp_path)
    ids = torch.tensor([PROMPT])
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, 30:].tolist()
    for source in (str(tmp_path), model):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            llm = LLM.from_pretrained(source, tokenizer=tiny_tokenizer())
        assert (llm.info.kernel, llm.info.family) == (kernel, family)
        assert any("only the text part runs" in note for note in llm.info.notes)
        for draft in (None, "hybrid"):
            assert llm.generate(PROMPT, max_new_tokens=12, eos=[], draft=draft).tokens == expected


def test_an_image_in_a_message_is_refused():
    """A template that writes a place for an image which nobody reads."""
    from selfspec.testing import tiny_llm

    parts = [{"type": "image", "url": "x.png"}, {"type": "text", "text": "what is this?"}]
    with pytest.raises(PromptError, match=r"'image'.*only text is read"):
        tiny_llm().chat([{"role": "user", "content": parts}])
