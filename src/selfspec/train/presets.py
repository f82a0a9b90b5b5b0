"""The paper's six experiments, by name: the recipe and how it was trained (LayerSkip, section 5 and
its appendix).

The recipe's numbers carry over to other models. The learning rate, batch and steps are those of the
paper's sizes. They are a record, to be adapted to the data at hand.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import OptionError, nearest
from .recipe import Recipe


@dataclass(frozen=True)
class Preset:
    """One experiment."""

    model: str
    recipe: Recipe
    rate: float
    rate_plain: float  # the learning rate of the runs without layer dropout
    batch: int  # rows per device
    steps: int
    devices: int


_CONTINUAL_7B = Recipe(dropout=0.1, exit_scale=0.2, rotation=8)
_CONTINUAL_13B = Recipe(dropout=0.1, exit_scale=0.1, rotation=39)
_SCRATCH_1B = Recipe(dropout=0.1, dropout_time="exponential", exit_scale=0.2, rotation=23)
_SCRATCH_7B = Recipe(dropout=0.2, dropout_time="exponential", exit_scale=0.2, rotation=31)
_CODE_7B = Recipe(dropout=0.1, exit_scale=1.0, rotation=16)
_TASK_1B = Recipe(dropout=0.2, exit_scale=1.0, curriculum="gradual")

PRESETS: dict[str, Preset] = {
    "continual-7b": Preset("Llama2 7B, 32 layers", _CONTINUAL_7B, 3e-5, 3e-5, 4, 50_000, 64),
    "continual-13b": Preset("Llama2 13B, 40 layers", _CONTINUAL_13B, 2e-5, 2e-5, 4, 50_000, 64),
    "scratch-1.5b": Preset("Llama2 1.5B, 24 layers", _SCRATCH_1B, 8e-4, 4e-4, 4, 50_000, 32),
    "scratch-7b": Preset("Llama2 7B, 32 layers", _SCRATCH_7B, 8e-4, 3e-4, 4, 50_000, 32),
    "code-7b": Preset("Llama1 7B, 32 layers", _CODE_7B, 1e-4, 1e-4, 4, 10_000, 32),
    "task-1.5b": Preset("Llama 1.5B, 24 layers (TOPv2)", _TASK_1B, 1e-4, 1e-4, 32, 5_800, 8),
}


def preset(name: str) -> Preset:
    """An experiment by name, or an error that says the nearest."""
    if name not in PRESETS:
        raise OptionError(f"preset {name!r} is not known; {nearest(name, PRESETS)}")
    return PRESETS[name]
