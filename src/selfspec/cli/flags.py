"""Flags from a dataclass: a field's name, type and default, and the docstring below it as help.

A class is found by name and read from its source. It is not imported, since most need torch, for
which `--help` must not wait. Knows no class and no command.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.markup import escape

from ..core.options import numbers
from ..errors import OptionError

T = TypeVar("T")

PACKAGE = Path(__file__).resolve().parents[1]
SHORT = {"max_new_tokens": "-n", "temperature": "-t", "draft": "-d"}
OFF = {"chat": "--raw"}  # of switches that need not be on or off
CALLED = {"new_tokens": "max_new_tokens"}  # fields that have an older name in results
NUMBERS, WORDS, TEXTS = "tuple[int, ...]", "tuple[str, ...]", "Sequence[str]"
SEPARATORS = {NUMBERS: ",", WORDS: " "}
KINDS: Mapping[str, Any] = {
    "bool": bool,
    "int": int,
    "float": float,
    "str": str,
    "Path": Path,
    TEXTS: list[str],
    NUMBERS: str,  # 8,15 or 1-4
    WORDS: str,  # auto ngram
}


@dataclass(frozen=True)
class Field:
    """A field of a dataclass as its source says it."""

    name: str
    kind: str
    default: Any
    help: str


@dataclass(frozen=True)
class Typed:
    """What was typed, by parameter names. Where nothing was typed, the library's defaults hold."""

    values: Mapping[str, Any]

    def of(self, kind: Any, prefix: str = "") -> dict[str, Any]:
        """What was typed of a dataclass's fields."""
        names = {field.name: _joined(prefix, field.name) for field in dataclasses.fields(kind)}
        return {field: self.values[name] for field, name in names.items() if name in self.values}

    def make(self, kind: type[T], prefix: str = "", **otherwise: Any) -> T:
        """The dataclass with what was typed. `otherwise` replaces its defaults."""
        return kind(**{**otherwise, **self.of(kind, prefix)})

    def pick(self, *names: str) -> dict[str, Any]:
        """What was typed of these."""
        return {name: self.values[name] for name in names if name in self.values}


@dataclass(frozen=True)
class Flags:
    """The fields of a class that become flags, shown in one panel of the help.

    `where`: its module inside the package and its name, "train.recipe:Recipe". `label`: what to
    call the class where another one has the same flag with other words or another default.
    """

    where: str
    panel: str
    only: Sequence[str] = ()
    without: Sequence[str] = ()
    prefix: str = ""
    label: str = ""

    @property
    def fields(self) -> dict[str, Field]:
        """The fields by the names of their parameters."""
        return {
            _joined(self.prefix, field.name): field
            for field in fields_of(self.where)
            if field.name not in self.without and (not self.only or field.name in self.only)
        }


def flag_of(parameter: str) -> str:
    """What is typed for a parameter."""
    return "--" + parameter.replace("_", "-")


def parameters_of(groups: Sequence[Flags]) -> list[inspect.Parameter]:
    """A parameter for each flag. A field that several classes have is one flag, in the words of the
    first. What the others say or have as default is added where it differs."""
    owners: dict[str, list[tuple[Flags, Field]]] = {}
    for group in groups:
        for name, field in group.fields.items():
            owners.setdefault(name, []).append((group, field))
    return [_parameter(name, fields) for name, fields in owners.items()]


def typed(values: Mapping[str, Any], groups: Iterable[Flags]) -> Typed:
    """The values that were typed for some flags, as their fields take them."""
    fields = {name: field for group in groups for name, field in group.fields.items()}

    def read(name: str, value: Any) -> Any:
        kind = fields[name].kind
        if isinstance(value, float) and not math.isfinite(value):
            raise OptionError(f"{flag_of(name)}={value} is not a finite number; give one")
        if kind == NUMBERS:
            return numbers(value, flag_of(name))
        if kind == WORDS:
            return tuple(value.split())
        return tuple(value) if kind == TEXTS else value

    return Typed({name: read(name, value) for name, value in values.items()})


def _parameter(name: str, owners: Sequence[tuple[Flags, Field]]) -> inspect.Parameter:
    group, field = owners[0]
    kinds = sorted({owned.kind for _, owned in owners})
    if len(kinds) > 1 or field.kind not in KINDS:
        raise TypeError(f"{group.where}: no flag can be made of {field.name}: {', '.join(kinds)}")
    names = [flag_of(name), *([SHORT[name]] if name in SHORT else [])]
    off = f"--no-{names[0][2:]}" if field.default is True else OFF.get(name)
    names[0] += f"/{off}" if off else ""
    words, defaults = [field.help], [_written(field)]
    for flags, other in owners[1:]:
        if flags.label and other.help not in words[0]:
            words.append(f"{flags.label.capitalize()}: {other.help[:1].lower()}{other.help[1:]}")
        if other.default != field.default:
            defaults.append(f"{flags.label} {_written(other)}")
    if field.kind == TEXTS:
        words.append("Repeatable.")
    default = _written(field) if field.kind in SEPARATORS else field.default
    option = typer.Option(
        *names,
        help=escape(" ".join(dict.fromkeys(words))),
        metavar="<1,3-5>" if field.kind == NUMBERS else None,
        rich_help_panel=group.panel,
        show_default=len(defaults) == 1 or "; ".join(dict.fromkeys(defaults)),
    )
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default if len(defaults) == 1 and field.default != () else None,
        annotation=Annotated[KINDS[field.kind] | None, option],
    )


def _written(field: Field) -> str:
    """The default as it would be typed."""
    separator = SEPARATORS.get(field.kind)
    if separator and field.default:
        return separator.join(map(str, field.default))
    return str(field.default)


def _joined(prefix: str, name: str) -> str:
    name = CALLED.get(name, name)
    return f"{prefix}_{name}" if prefix else name


# ------------------------------------------------------------------------------------- from source


@functools.cache
def fields_of(where: str) -> tuple[Field, ...]:
    """The fields of a class of this package."""
    module, _, name = where.partition(":")
    path = PACKAGE.joinpath(*module.split(".")).with_suffix(".py")
    body = _class_in(path.read_text(encoding="utf-8").splitlines(), name)
    helps = docstrings(body)
    return tuple(
        Field(
            line.target.id,
            ast.unparse(line.annotation).removesuffix(" | None"),
            None if line.value is None else _value(line.value),
            helps.get(line.target.id, ""),
        )
        for line in body.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    )


def docstrings(body: ast.ClassDef) -> dict[str, str]:
    """What stands as a string below each field."""
    return {
        field.target.id: " ".join(str(text.value.value).split())
        for field, text in zip(body.body, body.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
    }


def _class_in(lines: Sequence[str], name: str) -> ast.ClassDef:
    """One class of a module. Parsing the rest would take longer than all else that --help does."""
    first = lines.index(f"class {name}:")
    after = (index for index in range(first + 1, len(lines)) if lines[index][:1].strip())
    body = ast.parse("\n".join(lines[first : next(after, len(lines))])).body[0]
    assert isinstance(body, ast.ClassDef)
    return body


def _value(node: ast.expr) -> Any:
    """A default as a value, or as its text where it is none, such as a call."""
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)
