"""Which models can be trained here: those of families on which the recipe's tests run.

Mixtures of experts are among them where their own training keeps the experts busy by a loss, which
is added here too (`balance.py`). Knows no recipe.
"""

from __future__ import annotations

from typing import Any

from ..model.families import family_of, unsupported
from ..model.family import Family

PROVEN = (
    "cohere", "cohere2", "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "granite", "llama",
    "mistral", "mixtral", "olmo2", "olmoe", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
    "smollm3",
)  # fmt: skip


def trainable_family(config: Any) -> Family:
    """The table's entry for a model that is to be trained, or an error that says which can be."""
    family = family_of(config)
    if family is None or config.model_type not in PROVEN:
        tested = ", ".join(PROVEN)
        raise unsupported(config, f"for training, where the families tested are {tested}")
    return family
