"""A PEFT adapter on its base model: merged into the weights, or live beside them.

The adapter's configuration names the base. Everything in the adapter's file must find its place
there, while peft alone would leave out what does not fit. Does not know where the base comes from,
nor how a live adapter is run (peft_layers.py).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Set
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ...errors import OptionError, Unavailable, UnsupportedModel, nearest
from .checkpoint import AGAIN, read_header, read_json
from .quantised import method_of

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
MODES = ("auto", "merge", "live")


def require_mode(adapter: object) -> None:
    """Raise unless it says how to load an adapter."""
    if adapter not in MODES:
        raise OptionError(f"adapter={adapter!r} is not known; {nearest(adapter, MODES)}")


def refuse_mode(adapter: str, mode: str, reason: str) -> None:
    """Raise if the user asked for `mode`, which would do nothing here."""
    if adapter == mode:
        raise OptionError(f"adapter={adapter!r} has no effect here: {reason}. Leave it out.")


def inside(model: Any) -> PreTrainedModel | None:
    """The transformers model in a live PEFT model, adapters in place. None for anything else."""
    peft: Any = sys.modules.get("peft")  # whoever has a PEFT model has imported peft
    if peft is None or not isinstance(model, peft.PeftModel):
        return None
    if model.active_peft_config.is_prompt_learning:
        raise UnsupportedModel(
            "this PEFT model puts learned tokens before the prompt "
            f"({model.active_peft_config.peft_type}), which selfspec does not support. LoRA and "
            "other adapters of linears are supported."
        )
    base = model.get_base_model()
    assert isinstance(base, PreTrainedModel)
    return base


def base_of(folder: Path) -> tuple[str, str | None]:
    """The model that the adapter says it belongs to, and its revision."""
    config = read_json(folder / CONFIG)
    base, revision = config.get("base_model_name_or_path"), config.get("revision")
    if not isinstance(base, str) or not base or Path(base).resolve() == folder.resolve():
        raise UnsupportedModel(
            f"{folder / CONFIG} names no other model as base_model_name_or_path, so there is "
            "nothing to put the adapter on. Load base and adapter with peft, merge them "
            "(merge_and_unload()) and pass the model."
        )
    return base, revision if isinstance(revision, str) else None


def adapted(base: PreTrainedModel, folder: Path, name: str, live: bool) -> PreTrainedModel:
    """Put the adapter on the base, in place: `live` beside its weights, else added to them."""
    if not (folder / WEIGHTS).is_file():
        raise UnsupportedModel(
            f"{folder} has no {WEIGHTS}. selfspec reads adapters from safetensors only, since "
            "unpickling can run any code. Load it with peft once and save it (save_pretrained)."
        )
    if not live and (method := method_of(base.config)):
        raise OptionError(
            f"adapter='merge' would round the quantised weights ({method}) of {name}'s base again, "
            "which changes the model. Use adapter='live'."
        )
    try:
        library: Any = importlib.import_module("peft")
    except ImportError as error:
        raise Unavailable(
            f"{name} is a PEFT adapter, and peft is not installed. Run `pip install peft`."
        ) from error
    stored = set(read_header(folder / WEIGHTS))
    try:
        model = library.PeftModel.from_pretrained(base, str(folder))
        _require_same(stored, set(library.get_peft_model_state_dict(model)), name)
        result = inside(model) if live else model.merge_and_unload()
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UnsupportedModel(
            f"the adapter {name} cannot be put on {base.name_or_path or type(base).__name__}: "
            f"{reason}. It was made for another base model, or is of a kind that is not supported."
        ) from error
    assert isinstance(result, PreTrainedModel)
    result.eval().requires_grad_(False)
    return result


def _require_same(stored: Set[str], placed: Set[str], name: str) -> None:
    for keys, what in (
        (stored - placed, "without a place in its base model"),
        (placed - stored, "missing from its file"),
    ):
        if keys:
            raise UnsupportedModel(
                f"the adapter {name} has {len(keys)} weights {what}, first {min(keys)}: it was "
                f"made for another base model, or is damaged. {AGAIN}"
            )
