"""LoRA through peft: small matrices beside the layers' linears are trained, and merged at the end.

peft is optional and imported here alone. The names of linears come from the model, so a name that
fits none is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..errors import OptionError, Unavailable
from ..model.weights import module
from .supported import trainable_family


@dataclass(frozen=True)
class Lora:
    """Settings of LoRA."""

    rank: int = 16
    """Rank of the matrices that are added beside a linear (r)."""
    alpha: int = 32
    """Strength of the added matrices: their product is scaled by alpha / rank."""
    dropout: float = 0.0
    """Chance of dropping an input of the added matrices while training, 0 to 1."""
    modules: Sequence[str] = ()
    """Linears that get matrices, such as q_proj. By default all in the layers. The head cannot."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise OptionError(f"rank={self.rank} leaves nothing to train; LoRA needs at least 1")


def add_lora(model: PreTrainedModel, lora: Lora) -> Any:
    """A PEFT model around this one, in which only the added matrices are trained."""
    inside = module(model, trainable_family(model.config).layers).named_modules()
    linears = [name for name, inner in inside if isinstance(inner, nn.Linear | Conv1D)]
    names = sorted({name.rpartition(".")[2] for name in linears})
    unknown = [name for name in lora.modules if name not in names]
    if unknown:
        raise OptionError(
            f"LoRA on {', '.join(map(repr, unknown))}: the layers of this "
            f"{model.config.model_type} model have no such linear; known: {', '.join(names)}"
        )
    try:
        import peft
    except ImportError as error:
        raise Unavailable("LoRA needs peft: pip install 'selfspec[train]'") from error
    settings = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=list(lora.modules) or names,
        task_type="CAUSAL_LM",
        # GPT-2's weights are stored transposed
        fan_in_fan_out=any(isinstance(inner, Conv1D) for inner in model.modules()),
    )
    return peft.get_peft_model(model, settings)


def _is_peft(model: Any) -> bool:
    peft = sys.modules.get("peft")  # who has a PEFT model has imported peft
    return peft is not None and isinstance(model, peft.PeftModel)


def base_of(model: Any) -> PreTrainedModel:
    """The causal language model inside a PEFT model, or the model itself."""
    if _is_peft(model):
        model = model.get_base_model()
    if not isinstance(model, PreTrainedModel):
        raise OptionError(
            f"a {type(model).__name__} cannot be trained; pass a causal language model of "
            "transformers"
        )
    return model


def merged(model: Any) -> PreTrainedModel:
    """An ordinary model with what was learned in its own weights."""
    merged_model: PreTrainedModel = model.merge_and_unload() if _is_peft(model) else model
    return merged_model
