"""Models with eyes or ears, of which only the text part runs here.

Where the part that writes is a causal model of its own it is taken out, with the same weights, and
the rest is let go. Elsewhere (Qwen-VL's positions have three axes, say) the whole is kept, and its
own forward reads text. Does not know how either is run.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

NOTE = "of this {0} model only the text part runs: it reads no images, sounds or films"


def is_wrapper(config: PreTrainedConfig) -> bool:
    """Whether a model is more than its text part."""
    return config.get_text_config() is not config


def writes(kind: str) -> bool:
    """Whether transformers has a model of this type that writes text token by token."""
    names = (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    return any(kind in each for each in names)


def auto_class(config: PreTrainedConfig) -> Any:
    """What loads a model of this configuration."""
    if is_wrapper(config) and config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def text_part(model: Any) -> Any:
    """The causal language model inside of a wrapper, or the model itself."""
    text = model.config.get_text_config(decoder=True)
    inner = getattr(model.base_model, "language_model", None)
    if text is model.config or inner is None:
        return model
    if text.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return model
    auto: Any = AutoModelForCausalLM
    with torch.device("meta"):
        shell = auto.from_config(text, attn_implementation=text._attn_implementation)
    if type(inner) is type(shell):  # Llama 4's has a head of its own
        return inner
    if type(inner) is not type(shell.base_model):
        return model
    setattr(shell, shell.base_model_prefix, inner)
    shell.set_output_embeddings(model.get_output_embeddings())
    shell.generation_config, shell.name_or_path = model.generation_config, model.name_or_path
    return shell.train(model.training)
