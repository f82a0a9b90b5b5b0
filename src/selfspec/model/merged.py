"""A PEFT adapter on its base model, merged: plain weights again, which is what our products read.

The base is the one that the adapter's own configuration names. Everything in the adapter's file must find its place in the base;
peft alone would leave out what does not fit. Does not know where the base comes from.
"""

from __future__ import annotations

import importlib
from collections.abc import Set
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..errors import Unavailable, UnsupportedModel
from .checkpoint import AGAIN, read_header, read_json

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"


def base_of(folder: Path) -> tuple[str, str | None]:
    """What the adapter says it belongs to, and in which revision."""
    config = read_json(folder / CONFIG)
    base, revision = config.get("base_model_name_or_path"), config.get("revision")
    if not isinstance(base, str) or not base or Path(base).resolve() == folder.resolve():
        raise UnsupportedModel(
            f"{folder / CONFIG} names no other model as base_model_name_or_path, so there is nothing to put the adapter on. Load "
            "base and adapter with peft, merge them (merge_and_unload()) and pass the model."
        )
    return base, revision if isinstance(revision, str) else None


def merge(base: PreTrainedModel, folder: Path, name: str) -> PreTrainedModel:
    """The base with the adapter's changes added to its weights, which are changed in place."""
    if not (folder / WEIGHTS).is_file():
        raise UnsupportedModel(
            f"{folder} has no {WEIGHTS}; selfspec reads adapters from safetensors only, since unpickling can run any code. "
            "Load it with peft once and save it again (save_pretrained)."
        )
    try:
        library: Any = importlib.import_module("peft")
    except ImportError as error:
        raise Unavailable(f"{name} is a PEFT adapter, and peft is not installed. Run `pip install peft`.") from error
    stored = set(read_header(folder / WEIGHTS))
    try:
        model = library.PeftModel.from_pretrained(base, str(folder))
        _check(stored, set(library.get_peft_model_state_dict(model)), name)
        merged = model.merge_and_unload()
    except (RuntimeError, ValueError, KeyError, TypeError, NotImplementedError, AttributeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UnsupportedModel(
            f"the adapter {name} cannot be merged into {base.name_or_path or type(base).__name__}: {reason}. "
            "It was made for another base model, or is of a kind that cannot be merged."
        ) from error
    assert isinstance(merged, PreTrainedModel)
    merged.eval().requires_grad_(False)
    return merged


def _check(stored: Set[str], placed: Set[str], name: str) -> None:
    for keys, what in ((stored - placed, "without a place in its base model"), (placed - stored, "missing from its file")):
        if keys:
            raise UnsupportedModel(
                f"the adapter {name} has {len(keys)} weights {what}, first {min(keys)}: it was made for another base model, or "
                f"is damaged. {AGAIN}"
            )
