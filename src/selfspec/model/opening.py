"""From what a user names to a model that is ready: by what an earlier load found out where that is
kept, else through transformers. Knows neither generation nor drafts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .compute.memory import weights_too_large
from .from_transformers import from_transformers
from .layered import LayeredModel
from .load.placement import parse_device
from .operations import operations_for

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Opened:
    """A model ready to run, and what goes with it."""

    layered: LayeredModel
    tokenizer: PreTrainedTokenizerBase | None
    name: str
    generation_config: Any
    notes: Sequence[str] = ()
    """What is to be said of how its weights are stored."""


def opened(
    model: str | os.PathLike[str] | PreTrainedModel,
    *,
    kernel: str,
    weights: str,
    long_context: bool,
    device: str | torch.device | Mapping[str, Any],
    **source: Any,
) -> Opened:
    """The model. `source`: what else `load` takes."""
    # both not imported before they are needed: transformers takes seconds
    from . import remembered

    kept = _is_usual(source) and not long_context and kernel in ("auto", "native")
    known = remembered.recall(model, device, kernel, weights) if kept else None
    if known is not None:
        layered = from_transformers(
            known.model,
            owned=True,
            kernel=kernel,
            weights=weights,
            check=False,
            row_stable=known.row_stable,
        )
        return Opened(layered, known.tokenizer, known.name, known.model.generation_config)
    from .load.loading import load

    ours = weights if _ours(kernel, device, source["dtype"]) else None
    loaded = load(model, device=device, weights=ours, **source)
    target, parameters = loaded.model.device, loaded.model.num_parameters()
    keep = None
    if kept and loaded.folder is not None:
        keep = remembered.keeping(loaded.model, loaded.tokenizer, loaded.folder)
    try:
        layered = from_transformers(
            loaded.model,
            owned=loaded.owned,
            kernel=kernel,
            weights=weights,
            long_context=long_context,
        )
    except torch.OutOfMemoryError as error:
        raise weights_too_large(loaded.name, parameters, loaded.model.dtype, target) from error
    if keep is not None:
        keep(layered, kernel, weights)
    generation = loaded.model.generation_config
    return Opened(layered, loaded.tokenizer, loaded.name, generation, loaded.notes)


def _ours(kernel: str, device: str | torch.device | Mapping[str, Any], dtype: Any) -> bool:
    """Whether our kernels will multiply, so that weights need not be expanded for others."""
    on = parse_device(device)
    usual = on.type == "cpu" and dtype in ("auto", "float32", torch.float32)
    return usual and operations_for(kernel, torch.float32, on).kernel == "native"


def _is_usual(source: Mapping[str, Any]) -> bool:
    """Whether nothing was asked for that an earlier load may not have seen."""
    usual: Mapping[str, Any] = {"revision": None, "tokenizer": None, "adapter": "auto"}
    return (
        all(source[name] == value for name, value in usual.items())
        and not source["trust_remote_code"]
        and source["dtype"] in ("auto", "float32", torch.float32)
    )
