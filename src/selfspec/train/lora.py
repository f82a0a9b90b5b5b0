"""LoRA through peft: only small matrices beside the linears of the layers are trained, and merged
into the model at the end.

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
    """Names of the linears that get matrices, such as q_proj; by default all inside the layers. The
    shared head cannot be one of them."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise OptionError(f"rank={self.rank} leaves nothing to train; LoRA needs at least 1")


def linear_names(model: PreTrainedModel) -> list[str]:
    """The last names of all linears inside the layers."""
    layers = module(model, trainable_family(model.config).layers)
    return sorted(
        {
            name.rpartition(".")[2]
            for name, each in layers.named_modules()
            if isinstance(each, nn.Linear | Conv1D)
        }
    )


def add_lora(model: PreTrainedModel, lora: Lora) -> Any:
    """A PEFT model around this one, in which only the added matrices are trained."""
    known = linear_names(model)
    unknown = [name for name in lora.modules if name not in known]
    if unknown:
        raise OptionError(
            f"LoRA on {', '.join(map(repr, unknown))}: the layers of this "
            f"{model.config.model_type} model have no linear of that "
            f"name, so it would train nothing there; known: {', '.join(known)}"
        )
    try:
        import peft
    except ImportError as error:
        raise Unavailable("LoRA needs peft: pip install 'selfspec[train]'") from error
    settings = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=list(lora.modules) or known,
        task_type="CAUSAL_LM",
        # GPT-2's weights lie on their side
        fan_in_fan_out=any(isinstance(each, Conv1D) for each in model.modules()),
    )
    return peft.get_peft_model(model, settings)


def base_of(model: Any) -> PreTrainedModel:
    """The causal language model inside a PEFT model, or the model itself."""
    peft = sys.modules.get("peft")  # who has a PEFT model has imported peft
    base = (
        model.get_base_model() if peft is not None and isinstance(model, peft.PeftModel) else model
    )
    if not isinstance(base, PreTrainedModel):
        raise OptionError(
            f"a {type(base).__name__} cannot be trained; pass a causal language model of "
            f"transformers"
        )
    return base


def merged(model: Any) -> PreTrainedModel:
    """An ordinary model with what was learned in its own weights."""
    peft = sys.modules.get("peft")
    if peft is not None and isinstance(model, peft.PeftModel):
        model = model.merge_and_unload()
    assert isinstance(model, PreTrainedModel)
    return model
