"""Which models can be trained here: those of families on which the recipe's tests run.

Mixtures of experts are not among them. Their own training adds a loss that keeps the experts busy,
which the recipe's would not. Knows no recipe.
"""

from __future__ import annotations

from typing import Any

from ..model.families import family_of, unsupported
from ..model.family import Family

PROVEN = (
    "cohere", "cohere2", "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "granite", "llama",
    "mistral", "olmo2", "phi3", "qwen2", "qwen3", "smollm3",
)  # fmt: skip


def trainable_family(config: Any) -> Family:
    """The table's entry for a model that is to be trained, or an error that says which can be."""
    family = family_of(config)
    if family is None or config.model_type not in PROVEN:
        tested = ", ".join(PROVEN)
        raise unsupported(config, f"for training, where the families tested are {tested}")
    return family
