"""Drafters by name: ours, and other packages' in the entry point group `selfspec.drafters`."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from ..control.base import Controller
from ..control.registry import make_controller
from ..core import door
from ..core.options import with_options
from ..errors import OptionError, nearest
from .base import Drafter

BUILT_IN = {
    "auto": "auto:Auto",
    "cosine": "from_layers.cosine:Cosine",
    "draft-head": "from_models.draft_head:DraftHead",
    "draft-model": "from_models.draft_model:DraftModel",
    "dynamic-exit": "from_layers.dynamic_exit:DynamicExit",
    "early-exit": "from_layers.early_exit:EarlyExit",
    "hybrid": "hybrid:Hybrid",
    "jacobi": "from_text.jacobi:Jacobi",
    "kv-subset": "from_layers.kv_subset:KVSubset",
    "layer-skip": "from_layers.layer_skip:LayerSkip",
    "ngram": "from_text.ngram:NGram",
    "quantised": "from_layers.quantised:Quantised",
    "recycle": "from_text.recycle:TokenRecycling",
    "scripted": "scripted:ScriptedDrafter",
}
GROUP = "selfspec.drafters"
DEFAULT = "auto"


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
                f"there is no drafter {name!r}; {nearest(name, [*drafter_names(), 'none'])}"
            )
        found = points[0].load()
    if not (isinstance(found, type) and issubclass(found, Drafter)):
        raise OptionError(
            f"drafter {name!r} is {found!r}, which is no subclass of selfspec.draft.base.Drafter; "
            "its package must fix that"
        )
    return found


def _that_draw() -> list[str]:
    """Drafters of ours that can draw their drafts at random."""
    return [name for name in BUILT_IN if hasattr(drafter_class(name), "sample")]


def make_drafter(draft: str | Drafter | None, options: Mapping[str, Any]) -> Drafter | None:
    """A drafter from its name and options, or the object that was given."""
    if draft is not None and not isinstance(draft, str | Drafter):
        raise OptionError(
            f"draft={door.shown(draft)} is neither a drafter nor its name; "
            f"{nearest('', [*drafter_names(), 'none'])}"
        )
    if draft is None or isinstance(draft, Drafter) or draft == "none":
        if options:
            raise OptionError(
                f"draft_options {door.shown(dict(options))} belong to a drafter's name, but draft "
                f"is {door.shown(draft)}; set them on the object"
            )
        return draft if isinstance(draft, Drafter) else None
    if draft == DEFAULT and not options:
        return _default()
    kind = drafter_class(draft)
    if options.get("sample") and not hasattr(kind, "sample"):
        raise OptionError(
            f"drafter {draft!r} has no probabilities to draw from, so sample=True would draw "
            f"nothing; leave it out, or draft with {', '.join(_that_draw())}"
        )
    return with_options(kind, options, f"drafter {draft!r}")


@functools.cache
def _default() -> Drafter:
    """One for all: what it learns of costs serves the next request."""
    return drafter_class(DEFAULT)()


def resolve(
    draft: str | Drafter | None,
    draft_options: Mapping[str, Any] | None,
    control: str | Controller | None,
    control_options: Mapping[str, Any] | None,
) -> tuple[Drafter | None, Controller | None]:
    """Drafter and controller as the user named them."""
    drafter = make_drafter(draft, door.options("draft_options", draft_options))
    how = door.options("control_options", control_options)
    if drafter is not None and not drafter.decides_how_much:
        return drafter, make_controller(control, how)
    if control is not None or how:
        options = f"control_options={door.shown(how)}"
        asked = options if control is None else f"control={door.shown(control)}"
        reason = "plain decoding drafts nothing"
        if drafter is not None:
            reason = f"draft={drafter.name!r} decides itself how much to draft"
        raise OptionError(f"{reason}, so {asked} would be ignored; leave it out, or name a drafter")
    return drafter, None
