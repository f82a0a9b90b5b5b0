"""Ordinary speculative decoding: a second, smaller model of the same vocabulary drafts. The
yardstick for the other drafters.

It has a cache of its own for each generation (second_model.py). The two models share token ids
only: one with another vocabulary of the same size would be exact too, and never right. Its work is
counted as time, not in `Stats.layer_tokens`, which are the target's.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeAlias, runtime_checkable

from transformers import PreTrainedModel

from ...core.door import shown
from ...errors import OptionError
from ...model.from_transformers import from_transformers
from ...model.layered import LayeredModel
from ...model.load.loading import load
from ..base import Drafter, DraftSession, Target
from ..second_model import SecondModelSession


@runtime_checkable
class HoldsModel(Protocol):
    """An LLM, as far as this room can know it."""

    model: LayeredModel


Source: TypeAlias = str | os.PathLike[str] | PreTrainedModel | LayeredModel | HoldsModel


@dataclass(frozen=True)
class DraftModel(Drafter):
    """Draft with another model."""

    name: ClassVar[str] = "draft-model"

    model: Source | None = None
    """The model that drafts: a name on the hub, a folder, a live model or an LLM. None is the model
    itself, which accepts everything and saves nothing."""
    dtype: str = "auto"
    """Number format of a model that is loaded by name: auto, float32, bfloat16 or float16."""
    vocabulary: int = 0
    """Score only token ids below this (often the frequent ones) and the prompt's. 0 scores all."""
    sample: bool = False
    """Under sampling, draw drafts at random and verify them by rejection: the same distribution,
    other tokens for a seed. Prompts then add nothing to a shorter vocabulary."""

    def start(self, target: Target) -> DraftSession:
        source = target.model if self.model is None else self.model
        model = _layered(source, self.dtype, target.model)
        ours, theirs = target.model.shape.vocabulary, model.shape.vocabulary
        if ours != theirs:
            raise OptionError(
                f"the draft model has a vocabulary of {theirs} tokens, its target has {ours}: ids "
                "would mean other tokens; use a draft model with the same tokenizer"
            )
        cache = model.new_cache(target.cache.rows, 1)
        return SecondModelSession(Target(model, cache), self.vocabulary, sample=self.sample)


def _layered(source: Source, dtype: str, target: LayeredModel) -> LayeredModel:
    """The draft model, ready to run. One that had to be made is kept as long as its target."""
    if isinstance(source, LayeredModel):
        return source
    if not isinstance(source, str | os.PathLike | PreTrainedModel):
        if isinstance(source, HoldsModel):
            return source.model
        raise OptionError(
            f"model={shown(source)} is no model to draft with; give a name, a folder, a live model "
            "or an LLM"
        )
    live = isinstance(source, PreTrainedModel)
    name = source if isinstance(source, PreTrainedModel) else os.fspath(source)

    def make() -> LayeredModel:
        loaded = load(source, dtype=dtype, device="auto" if live else target.device)
        return from_transformers(loaded.model, owned=loaded.owned)

    return target.once((DraftModel, name, dtype), make)
