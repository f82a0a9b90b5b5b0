"""Controllers by name."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from ..core import door
from ..core.options import with_options
from ..errors import OptionError, nearest
from .base import Controller

BUILT_IN = {
    "adaptive": "adaptive:Adaptive",
    "confidence": "confidence:Confidence",
    "cost-aware": "cost_aware:CostAware",
    "fixed": "fixed:FixedLength",
}
DEFAULT = "fixed"


def controller_names() -> list[str]:
    """Every controller that can be asked for by name."""
    return sorted(BUILT_IN)


def controller_class(name: str) -> type[Controller]:
    """The class behind a name."""
    if name not in BUILT_IN:
        raise OptionError(f"there is no controller {name!r}; {nearest(name, BUILT_IN)}")
    module, _, attribute = BUILT_IN[name].partition(":")
    found: type[Controller] = getattr(import_module(f".{module}", __package__), attribute)
    return found


def make_controller(control: str | Controller | None, options: Mapping[str, Any]) -> Controller:
    """A controller from its name and options, or the object that was given."""
    if isinstance(control, Controller):
        if options:
            raise OptionError(
                f"control_options {dict(options)} belong to a controller's name, but an object was "
                "given; set them on it"
            )
        return control
    name = DEFAULT if control is None else control
    if not isinstance(name, str):
        raise OptionError(
            f"control={door.shown(name)} is neither a controller nor its name; "
            f"{nearest('', BUILT_IN)}"
        )
    return with_options(controller_class(name), options, f"controller {name!r}")
