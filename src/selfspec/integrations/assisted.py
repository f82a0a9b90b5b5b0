"""Hugging Face's own way to ask for self-speculation, `generate(assistant_early_exit=E)`, in our
words: the drafter `early-exit` and the controller `confidence`. Other assistants are refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..control.base import Controller
from ..control.confidence import Confidence
from ..draft.auto import Auto
from ..draft.base import Drafter
from ..draft.from_layers.early_exit import EarlyExit
from ..errors import OptionError

if TYPE_CHECKING:
    from transformers import GenerationConfig

# transformers' defaults, where a configuration leaves them open
_TOKENS, _THRESHOLD = 20, 0.4


def check_assisted(config: GenerationConfig) -> None:
    """Of what transformers counts as assisted generation only the early exit is known here."""
    if config.assistant_early_exit is None or config.prompt_lookup_num_tokens is not None:
        raise OptionError(
            "assisted generation was asked for (prompt_lookup_num_tokens or use_mtp) and would be "
            "ignored; choose a drafter: selfspec.transformers(draft=...)"
        )


def asked_for(
    config: GenerationConfig, drafter: Drafter | None, controller: Controller | None
) -> tuple[Drafter | None, Controller | None]:
    """Who drafts, and how much: what the configuration asks for, or what was given to us."""
    layer = config.assistant_early_exit
    if layer is None:
        return drafter, controller
    if not isinstance(drafter, Auto):
        raise OptionError(
            f"assistant_early_exit={layer} asks for early exit, but selfspec.transformers was "
            "given another way to draft; leave out either"
        )
    most, threshold = config.num_assistant_tokens, config.assistant_confidence_threshold
    return EarlyExit(layer=layer), Confidence(
        _TOKENS if most is None else int(most), _THRESHOLD if threshold is None else threshold
    )
