"""Drafters by name: ours, and those that other packages add through the entry point group
`selfspec.drafters`."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from ..core.options import with_options
from ..errors import OptionError, nearest
from .base import Drafter

BUILT_IN = {
    "cosine": "from_layers.cosine:Cosine",
    "draft-head": "from_models.draft_head:DraftHead",
    "draft-model": "from_models.draft_model:DraftModel",
    "early-exit": "from_layers.early_exit:EarlyExit",
    "hybrid": "hybrid:Hybrid",
    "jacobi": "from_text.jacobi:Jacobi",
    "kv-subset": "from_layers.kv_subset:KVSubset",
    "layer-skip": "from_layers.layer_skip:LayerSkip",
    "ngram": "from_text.ngram:NGram",
    "recycle": "from_text.recycle:TokenRecycling",
    "scripted": "scripted:ScriptedDrafter",
}
GROUP = "selfspec.drafters"


def drafter_names() -> list[str]:
    """Every drafter that can be asked for by name."""
    return sorted({*BUILT_IN, *(point.name for point in entry_points(group=GROUP))})


def drafter_class(name: str) -> type[Drafter]:
    """The class behind a name."""
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        found = getattr(import_module(f".{module}", __package__), attribute)
    else:
        points = list(entry_points(group=GROUP, name=name))
        if not points:
            raise OptionError(
                f"there is no drafter {name!r}; {nearest(name, [*drafter_names(), 'auto', 'none'])}"
            )
        found = points[0].load()
    if not (isinstance(found, type) and issubclass(found, Drafter)):
        raise OptionError(
            f"drafter {name!r} is {found!r}, which is no subclass of selfspec.draft.base.Drafter; "
            f"its package must fix that"
        )
    return found


def make_drafter(draft: str | Drafter | None, options: Mapping[str, Any]) -> Drafter | None:
    """A drafter from its name and options, or the object that was given."""
    if draft is None or draft == "none" or isinstance(draft, Drafter):
        if options:
            raise OptionError(
                f"draft_options {dict(options)} belong to a drafter's name, but draft is "
                f"{draft!r}; set them on the object"
            )
        return draft if isinstance(draft, Drafter) else None
    return with_options(drafter_class(draft), options, f"drafter {draft!r}")
