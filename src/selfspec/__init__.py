"""selfspec: a language model drafts for itself and writes what it would have written anyway."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .call import Stream
    from .core.contract import Stats
    from .core.grammar import Grammar
    from .core.sampling import SamplingParams
    from .draft.scripted import ScriptedDrafter
    from .errors import (
        BrokenCheckpoint,
        Busy,
        DataError,
        ModelError,
        OptionError,
        PromptError,
        ResourceError,
        SelfCheckFailed,
        SelfspecError,
        TrainingError,
        Unavailable,
        UnsupportedModel,
    )
    from .integrations.transformers import transformers
    from .llm import LLM
    from .results import ModelInfo, Piece, Result

__version__ = "0.1.0"

_HOMES = {
    "Grammar": "core.grammar",
    "LLM": "llm",
    "ModelInfo": "results",
    "Piece": "results",
    "Result": "results",
    "SamplingParams": "core.sampling",
    "ScriptedDrafter": "draft.scripted",
    "Stats": "core.contract",
    "Stream": "call",
    "transformers": "integrations.transformers",
}  # all other names are errors

__all__ = [
    "LLM",
    "BrokenCheckpoint",
    "Busy",
    "DataError",
    "Grammar",
    "ModelError",
    "ModelInfo",
    "OptionError",
    "Piece",
    "PromptError",
    "ResourceError",
    "Result",
    "SamplingParams",
    "ScriptedDrafter",
    "SelfCheckFailed",
    "SelfspecError",
    "Stats",
    "Stream",
    "TrainingError",
    "Unavailable",
    "UnsupportedModel",
    "transformers",
]


def __getattr__(name: str) -> Any:
    """Names are imported when first used: `import selfspec` does not wait for torch."""
    if name not in __all__:
        raise AttributeError(f"module 'selfspec' has no attribute {name!r}")
    from selfspec.core.garbage import unsearched  # no name of the package's own

    with unsearched():
        return getattr(import_module(f".{_HOMES.get(name, 'errors')}", __name__), name)
