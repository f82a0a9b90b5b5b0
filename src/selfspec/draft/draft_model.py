"""Ordinary speculative decoding: a second, smaller model of the same vocabulary drafts. The yardstick that others are compared
with.

It has a cache of its own for each generation. Before a draft it reads what was kept since it last looked (in the same pass as
its first new token, unless that is much) and forgets what was rejected. Token ids are all the two share: a model with another
vocabulary of the same size would be exact too, and never right. Its work is counted as time, not in `Stats.layer_tokens`, which
are those of the model that is drafted for.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeAlias, runtime_checkable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..contract import Budget, Draft
from ..errors import OptionError
from ..model.adapter import PREFILL_CHUNK, LayeredModel
from ..model.cache import Place, Span
from ..model.loading import load
from .base import Drafter, Drafting, Scene
from .chain import ChainDrafting


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
    """A name on the hub, a folder, a live model or an LLM; None is the model itself, which accepts everything and saves
    nothing.
    """
    dtype: str = "auto"
    """Of a model that is loaded by name: auto, float32, bfloat16 or float16."""
    vocabulary: int = 0
    """Score only that many of the most frequent tokens, and the prompt's, while drafting; 0 is all of them."""

    def start(self, scene: Scene) -> Drafting:
        model = scene.model if self.model is None else _layered(self.model, self.dtype, scene.model)
        ours, theirs = scene.model.shape.vocabulary, model.shape.vocabulary
        if ours != theirs:
            raise OptionError(
                f"the draft model has a vocabulary of {theirs} tokens, the model that it drafts for has {ours}, so its "
                "tokens would mean something else; use a draft model with the same tokenizer"
            )
        cache = model.new_cache(len(scene.prompts), max(map(len, scene.prompts)) + 64)
        return _Second(Scene(model, cache, scene.prompts, scene.samplers, scene.ends), self.vocabulary)


_loaded: WeakKeyDictionary[LayeredModel, dict[tuple[object, str], LayeredModel]] = WeakKeyDictionary()
_loading = threading.Lock()


def _layered(source: Source, dtype: str, target: LayeredModel) -> LayeredModel:
    """The draft model, ready to run. One that had to be made is kept as long as the model it drafts for."""
    if isinstance(source, LayeredModel):
        return source
    if not isinstance(source, str | os.PathLike | PreTrainedModel):
        if isinstance(source, HoldsModel):
            return source.model
        raise OptionError(f"model={source!r} is no model to draft with; give a name, a folder, a live model or an LLM")
    key = (source if isinstance(source, PreTrainedModel) else os.fspath(source), dtype)
    with _loading:
        kept = _loaded.setdefault(target, {})
        if key not in kept:
            loaded = load(source, dtype=dtype, device="auto" if isinstance(source, PreTrainedModel) else target.device)
            kept[key] = LayeredModel(loaded.model, owned=loaded.owned)
        return kept[key]


class _Second(ChainDrafting):
    """The second model at work. `scene` is its own: its model, its cache."""

    def __init__(self, scene: Scene, vocabulary: int) -> None:
        super().__init__(scene, vocabulary)
        self._read: list[list[int]] = [[] for _ in scene.prompts]  # what its cache holds of each row
        self._behind: dict[int, Sequence[int]] = {}  # what it has to read before its first new token

    def propose(self, rows: Sequence[int], texts: Sequence[Sequence[int]], budget: Budget) -> Draft:
        context = self.scene.model.shape.context  # may be shorter than the other model's
        most = [max(0, min(tokens, context - len(text))) for tokens, text in zip(budget.tokens, texts, strict=True)]
        for row, text, tokens in zip(rows, texts, most, strict=True):
            if tokens:
                self._behind[row] = self._catch_up(row, text[:-1])
        return super().propose(rows, texts, Budget(most, budget.threshold))

    def _catch_up(self, row: int, known: Sequence[int]) -> Sequence[int]:
        """Forget what was rejected and read most of what is new; says which few tokens are left for the first step."""
        cache, read = self.scene.cache, self._read[row]
        at = _common(read, known)
        cache.rollback(row, at)
        while len(known) - at > PREFILL_CHUNK:
            self._run(known[at : at + PREFILL_CHUNK], [Span(row, at, PREFILL_CHUNK)])
            at += PREFILL_CHUNK
        assert cache.length(row) == at
        self._read[row] = list(known)
        return known[at:]

    def hidden(self, tokens: Tensor, place: Place, rows: Sequence[int]) -> Tensor:
        new = tokens.tolist()
        behind = [self._behind.pop(row, ()) for row in rows]
        for row, token in zip(rows, new, strict=True):
            self._read[row].append(token)
        if not any(behind):
            return self.scene.model.run(self.scene.model.embed(tokens), self.scene.model.full_plan, self.scene.cache, place)
        spans = [Span(s.row, s.first - len(left), len(left) + 1) for s, left in zip(place.spans, behind, strict=True)]
        x = self._run([token for left, own in zip(behind, new, strict=True) for token in (*left, own)], spans)
        ends = torch.tensor([span.count for span in spans], device=x.device).cumsum(0) - 1
        return x[ends]

    def _run(self, tokens: Sequence[int], spans: Sequence[Span]) -> Tensor:
        model, cache = self.scene.model, self.scene.cache
        return model.run(model.embed(torch.tensor(tokens, device=model.device)), model.full_plan, cache, cache.place_at(spans))


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two texts have in common at their beginning."""
    return next((index for index, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
