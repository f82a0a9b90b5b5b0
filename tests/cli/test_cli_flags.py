"""Flags and their help: made from the dataclasses, in words that say something, with one name for
one thing on all commands."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from types import UnionType
from typing import Any, get_args

import pytest
import typer

import selfspec.cli
from selfspec.cli import flags
from selfspec.cli.app import app
from selfspec.cli.flags import Field, Flags, fields_of, parameters_of, typed

COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
OPTIONS = [
    (name, each)
    for name in sorted(COMMANDS)
    for each in COMMANDS[name].params
    if each.param_type_name == "option" and each.name != "help"
]


def groups() -> Iterator[Flags]:
    """Every use of a class for flags, by all commands."""
    for found in pkgutil.iter_modules(selfspec.cli.__path__):
        module = importlib.import_module(f"selfspec.cli.{found.name}")
        for value in vars(module).values():
            yield from (
                each for each in getattr(value, "__metadata__", ()) if isinstance(each, Flags)
            )


def class_of(where: str) -> Any:
    module, _, name = where.partition(":")
    return getattr(importlib.import_module(f"selfspec.{module}"), name)


def test_there_is_something_to_check() -> None:
    """A walk that finds nothing would let everything pass."""
    assert len(OPTIONS) > 100
    assert {"core.sampling:SamplingParams", "train.recipe:Recipe", "bench.suite_run:Wishes"} <= {
        each.where for each in groups()
    }


@pytest.mark.parametrize("where", sorted({each.where for each in groups()}))
def test_the_source_is_read_as_python_reads_it(where: str) -> None:
    """The class is not imported for --help, so what is read could be another thing than what
    runs."""
    fields = dataclasses.fields(class_of(where))
    read = fields_of(where)
    assert [each.name for each in read] == [field.name for field in fields]
    for field, found in zip(fields, read, strict=True):
        assert found.help, f"{where}.{field.name} has no docstring below it"
        if field.default is not dataclasses.MISSING:
            assert found.default == field.default and type(found.default) is type(field.default)


def test_a_field_of_an_unknown_kind_is_refused() -> None:
    """A flag that takes text where the class wants a mapping would fail in the middle of a
    run."""
    with pytest.raises(TypeError, match="no flag can be made of logit_bias"):
        parameters_of([Flags("core.sampling:SamplingParams", "Sampling")])


def test_two_kinds_are_not_one_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two classes with a field of one name, a number here and text there: one of them would be
    given the other's value."""
    read = {"a": (Field("size", "int", 1, "How many."),), "b": (Field("size", "str", "", "Name."),)}
    monkeypatch.setattr(flags, "fields_of", read.__getitem__)
    with pytest.raises(TypeError, match="no flag can be made of size: int, str"):
        parameters_of([Flags("a", ""), Flags("b", "")])


def test_a_shared_flag_tells_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A help that states one default where the other class has another."""
    read = {
        "a": (Field("size", "int", 1, "How many there are."),),
        "b": (Field("size", "int", 2, "How many are kept."),),
        "c": (Field("size", "int", 2, "How many are kept."),),
    }
    monkeypatch.setattr(flags, "fields_of", read.__getitem__)
    (found,) = parameters_of(
        [Flags("a", ""), Flags("b", "", label="bees"), Flags("c", "", label="bees")]
    )
    option = get_args(found.annotation)[1]
    assert option.help == "How many there are. Bees: how many are kept."
    assert option.show_default == "1; bees 2" and found.default is None


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_help_line_says_something(name: str) -> None:
    """'The highest.' tells nobody what is highest."""
    short = [
        each.opts[0] for command, each in OPTIONS if command == name and len(each.help.split()) < 4
    ]
    assert short == []


def test_one_text_is_of_one_flag() -> None:
    """The same words under two names: one thing with two names, or a help that was copied and
    tells of another option."""
    names: dict[str, set[str]] = {}
    for _, each in OPTIONS:
        names.setdefault(each.help, set()).add(each.opts[0])
    assert {text: flags for text, flags in names.items() if len(flags) > 1} == {}


def test_the_device_is_told_alike_and_a_seed_is_called_one() -> None:
    """'cpu or cuda.' on one command and another text on the next: is it the same option?"""
    assert len({each.help for _, each in OPTIONS if each.name == "device"}) == 1
    seeds = {command: each.help for command, each in OPTIONS if each.name == "seed"}
    assert {command: text for command, text in seeds.items() if not text.startswith("Seed ")} == {}


def test_a_list_has_its_default_as_it_is_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    """--batches with the default (1, 2): nobody types that."""
    read = {
        "a": (
            Field("sizes", "tuple[int, ...]", (1, 2), "Which sizes."),
            Field("names", "tuple[str, ...]", ("auto", "ngram"), "Which names."),
        )
    }
    monkeypatch.setattr(flags, "fields_of", read.__getitem__)
    group = Flags("a", "")
    assert [each.default for each in parameters_of([group])] == ["1,2", "auto ngram"]
    found = typed({"sizes": "3-5", "names": "one two"}, [group])
    assert found.values == {"sizes": (3, 4, 5), "names": ("one", "two")}


def test_one_flag_takes_one_kind_of_value() -> None:
    """--plot FILE on one command and --plot as a switch on another: one name for two things."""
    kinds: dict[str, set[Any]] = {}
    for command, each in OPTIONS:
        signature = inspect.signature(COMMANDS[command].callback, eval_str=True)
        kind = get_args(signature.parameters[each.name].annotation)[0]
        kinds.setdefault(each.opts[0], set()).add(_without_none(kind))
    assert {flag: found for flag, found in kinds.items() if len(found) > 1} == {}


def _without_none(kind: Any) -> Any:
    """What an option takes when it is given."""
    own = [each for each in get_args(kind) if each is not type(None)]
    return own[0] if isinstance(kind, UnionType) else kind


def test_a_field_has_one_name() -> None:
    """The field of a class that is --this on one command and --that on another."""
    names: dict[tuple[str, str], set[str]] = {}
    for group in groups():
        for name, field in group.fields.items():
            names.setdefault((group.where, field.name), set()).add(name)
    assert {field: found for field, found in names.items() if len(found) > 1} == {}


def test_short_forms_are_the_same_everywhere() -> None:
    """-n of one command must not be something else of the next."""
    long: dict[str, set[str]] = {}
    for _, each in OPTIONS:
        for short in (flag for flag in each.opts if not flag.startswith("--")):
            long.setdefault(short, set()).add(each.opts[0])
    assert {short: flags for short, flags in long.items() if len(flags) > 1} == {}
