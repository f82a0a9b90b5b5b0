"""transformers' model of a configuration, its weights not made: for who puts them in."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM

from .checkpoint import quiet_transformers


def empty_model(config: Any, options: dict[str, Any]) -> Any:
    """The model. What is computed from the configuration alone, such as frequencies, is there."""
    from accelerate import init_empty_weights  # type: ignore[import-untyped]  # here: slow

    auto: Any = AutoModelForCausalLM
    with quiet_transformers(bars=False), init_empty_weights(include_buffers=False):
        return auto.from_config(config, dtype=torch.float32, **options)
