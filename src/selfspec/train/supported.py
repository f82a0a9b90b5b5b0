"""Which models can be trained here: those of families on which the recipe's tests run. Knows no recipe."""

from __future__ import annotations

from typing import Any

from ..model.families import Family, family_of, unsupported

PROVEN = ("llama", "mistral", "qwen2", "qwen3")  # their exits are the last norm and the head, with nothing in between


def trainable_family(config: Any) -> Family:
    """The table's entry for a model that is to be trained, or an error that says which can be."""
    family = family_of(config)
    if family is None or config.model_type not in PROVEN:
        raise unsupported(config, f"for training, where the families tested are {', '.join(PROVEN)}")
    return family
