"""`selfspec drafters`: the drafters and controllers, and the options of each, from the classes.

A field's own docstring is its help, so this table cannot go stale. Knows no drafter.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from dataclasses import MISSING, fields
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..errors import OptionError, nearest
from . import common
from .flags import Field, docstrings


def drafters(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="A drafter or a controller.", show_default=False),
    ] = None,
) -> None:
    """List the drafters and the controllers, or the options of one.

    Example:  selfspec drafters early-exit
    """
    drafting, controlling = known()
    console = Console(highlight=False)
    if name is None:
        console.print(listing("Drafters, for --draft", drafting))
        console.print(listing("Controllers, for --control", controlling))
        hint = "'selfspec drafters NAME' shows the options of one. --draft none is plain decoding."
        console.print(hint, style="dim")
        return
    both = {**drafting, **controlling}
    if name not in both:
        raise OptionError(f"there is no drafter and no controller {name!r}; {nearest(name, both)}")
    flag = "--draft-option" if name in drafting else "--control-option"
    console.print(f"[bold]{escape(name)}[/bold]: {escape(first_line(both[name]))}\n")
    options = options_of(both[name])
    console.print(table(options) if options else "It has no options.")
    if options:
        hint = f"\nOn the command line: {flag} {options[0].name}=VALUE, the value as in JSON."
        console.print(hint, style="dim", markup=False)


def known() -> tuple[dict[str, type], dict[str, type]]:
    """Drafters, those of other packages too, and controllers, by name."""
    from ..control.registry import controller_class, controller_names
    from ..draft.registry import drafter_class, drafter_names

    drafting: dict[str, type] = {name: drafter_class(name) for name in drafter_names()}
    return drafting, {name: controller_class(name) for name in controller_names()}


def first_line(kind: type) -> str:
    """The first sentence of a class's docstring."""
    return (inspect.getdoc(kind) or "").partition("\n\n")[0].replace("\n", " ")


def options_of(kind: Any) -> list[Field]:
    """The fields of a drafter or controller, with the docstrings below them."""
    from ..core.options import annotation_of

    helps = dict[str, str]()
    for each in reversed(kind.__mro__):
        if not hasattr(each, "__dataclass_fields__"):
            continue
        try:
            body = ast.parse(textwrap.dedent(inspect.getsource(each))).body[0]
        except (OSError, TypeError):  # typed in at a prompt, or shipped compiled
            continue
        assert isinstance(body, ast.ClassDef)
        helps |= docstrings(body)
    return [
        Field(field.name, annotation_of(field.type), default_of(field), helps.get(field.name, ""))
        for field in sorted(fields(kind), key=lambda field: bool(field.kw_only))
    ]


def default_of(field: Any) -> str:
    """A field's default as it would be written."""
    if field.default is not MISSING:
        return repr(field.default)
    return "required" if field.default_factory is MISSING else repr(field.default_factory())


def listing(title: str, classes: dict[str, type]) -> Table:
    """Names and what they stand for."""
    grid = common.facts(title)
    for name, kind in classes.items():
        grid.add_row(escape(name), escape(first_line(kind)))
    return grid


def table(options: list[Field]) -> Table:
    """The options of one class."""
    grid = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("option", "kind", "default", ""):
        grid.add_column(heading, no_wrap=heading == "option")
    for option in options:
        grid.add_row(*map(escape, (option.name, option.kind, option.default, option.help)))
    return grid
