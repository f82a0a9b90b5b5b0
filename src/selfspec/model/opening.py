"""From what a user names to a model that is ready: by what an earlier load found out where that is
kept, else through transformers. Knows neither generation nor drafts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..errors import OptionError
from .compute.memory import weights_too_large
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
    # not imported before they are needed: transformers takes seconds
    from . import quantised_folder, remembered
    from .from_transformers import from_transformers

    if quantised_folder.is_quantised(model):
        return _quantised(Path(str(model)).expanduser(), kernel, weights, device, source)
    kept = _is_usual(source) and not long_context and kernel in ("auto", "native")
    known = remembered.recall(model, device, kernel, weights) if kept else None
    how: dict[str, Any] = {"kernel": kernel, "weights": weights}
    if known is not None:
        layered = from_transformers(
            known.model,
            owned=True,
            check=False,
            row_stable=known.row_stable,
            packs=known.packs,
            **how,
        )
        return Opened(layered, known.tokenizer, known.name, known.model.generation_config)
    from .load.loading import load

    ours = weights if _ours(kernel, device, source["dtype"]) else None
    loaded = load(model, device=device, weights=ours, **source)
    target, parameters = loaded.model.device, loaded.model.num_parameters()
    keep = packs = None
    if kept and loaded.folder is not None:
        keep = remembered.keeping(loaded.model, loaded.tokenizer, loaded.folder)
    if keep is not None and loaded.folder is not None:
        packs = remembered.place_of(loaded.folder, kernel, weights).packs
    try:
        layered = from_transformers(
            loaded.model, owned=loaded.owned, long_context=long_context, packs=packs, **how
        )
    except torch.OutOfMemoryError as error:
        raise weights_too_large(loaded.name, parameters, loaded.model.dtype, target) from error
    if keep is not None:
        keep(layered, kernel, weights)
    generation = loaded.model.generation_config
    return Opened(layered, loaded.tokenizer, loaded.name, generation, loaded.notes)


def lies_in(layered: LayeredModel, source: object) -> None:
    """Remember what a model was read from."""
    folder = Path(source).expanduser() if isinstance(source, str | os.PathLike) else None
    layered.once(lies_in, lambda: folder if folder is not None and folder.is_dir() else None)


def folder_of(layered: LayeredModel) -> Path | None:
    """The folder that a model was read from: what else lies there comes with the model. None if it
    was none, or nobody said."""
    found: Path | None = layered.once(lies_in, lambda: None)
    return found


def _ours(kernel: str, device: str | torch.device | Mapping[str, Any], dtype: Any) -> bool:
    """Whether our kernels will multiply, so that weights need not be expanded for others."""
    on = parse_device(device)
    return (
        on.type == "cpu"
        and _in_float32(dtype)
        and operations_for(kernel, torch.float32, on).kernel == "native"
    )


def _quantised(
    folder: Path,
    kernel: str,
    weights: str,
    device: str | torch.device | Mapping[str, Any],
    source: Mapping[str, Any],
) -> Opened:
    """A folder that `selfspec quantise` wrote."""
    from .quantised_folder import load_quantised

    here = device if device != "auto" else "cpu"  # wherever else the original would run
    if parse_device(here).type != "cpu" or not _is_usual({**source, "tokenizer": None}):
        raise OptionError(
            f"{folder} is quantised for our kernels, which run float32 on a CPU: it has no other "
            "device, dtype, revision, adapter or code; leave these options out, or load the "
            "original model"
        )
    found = load_quantised(folder, kernel, weights)
    tokenizer = source["tokenizer"] or found.tokenizer
    return Opened(found.layered, tokenizer, str(folder), found.generation_config)


def _is_usual(source: Mapping[str, Any]) -> bool:
    """Whether nothing was asked for that an earlier load may not have seen."""
    usual: Mapping[str, Any] = {"revision": None, "adapter": "auto"}
    return (
        source["tokenizer"] is None
        and all(source[name] == value for name, value in usual.items())
        and not source["trust_remote_code"]
        and _in_float32(source["dtype"])
    )


def _in_float32(dtype: object) -> bool:
    """Whether that is the dtype on a CPU. Anything may have been passed for it, arrays included."""
    return isinstance(dtype, str | torch.dtype) and dtype in ("auto", "float32", torch.float32)
