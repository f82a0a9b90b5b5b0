"""What grows unnoticed: long functions and files in the library, swallowed exceptions, tests that
check nothing."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LONGEST_FUNCTION = 60  # most are under 35; past 60 nobody sees the whole of it
LONGEST_FILE = 400
CHECKS = ("raises", "warns", "assert", "check", "fail")  # a call named so checks something

LIBRARY = sorted((ROOT / "src").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("test_*.py"))


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


def long_functions(source: str) -> list[str]:
    lengths = [
        (each.name, (each.end_lineno or each.lineno) - each.lineno + 1)
        for each in functions(ast.parse(source))
    ]
    return [f"{name} has {length} lines" for name, length in lengths if length > LONGEST_FUNCTION]


def swallowed(source: str) -> list[str]:
    handlers = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ExceptHandler)]
    return [
        f"line {node.lineno}"
        for node in handlers
        if all(isinstance(each, ast.Pass) for each in node.body)
    ]


def idle_tests(source: str) -> list[str]:
    tests = [each for each in functions(ast.parse(source)) if each.name.startswith("test_")]
    return [each.name for each in tests if not any(_checks(node) for node in ast.walk(each))]


def silent_tests(source: str) -> list[str]:
    tests = [each for each in functions(ast.parse(source)) if each.name.startswith("test_")]
    return [each.name for each in tests if not ast.get_docstring(each)]


def _checks(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return any(word in ast.unparse(node.func) for word in CHECKS)
    return isinstance(node, ast.Assert)


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", LIBRARY, ids=_name)
def test_the_library_stays_readable(path: Path) -> None:
    """Catches a function or a file that grew past what can be read at once, and an error that
    nobody will hear of."""
    source = path.read_text(encoding="utf-8")
    lines = source.count("\n")
    assert lines <= LONGEST_FILE, (
        f"{_name(path)} has {lines} lines: split it by what its parts are about"
    )
    assert not (found := long_functions(source)), f"{_name(path)}: {', '.join(found)}"
    assert not (found := swallowed(source)), (
        f"{_name(path)}: an exception is swallowed at {', '.join(found)}"
    )


@pytest.mark.parametrize("path", TESTS, ids=_name)
def test_tests_check_something_and_say_what(path: Path) -> None:
    """A test that asserts nothing cannot fail; one that does not say which bug it catches cannot be
    judged."""
    source = path.read_text(encoding="utf-8")
    assert not (found := idle_tests(source)), (
        f"{_name(path)}: nothing is checked in {', '.join(found)}"
    )
    assert not (found := silent_tests(source)), f"{_name(path)}: no docstring in {', '.join(found)}"


def test_each_of_these_is_noticed() -> None:
    """The self-test: one wrong source for each finding, and a right one for none."""
    assert long_functions("def f():\n" + "    x = 1\n" * 60)
    assert not long_functions("def f():\n" + "    x = 1\n" * 59)
    assert swallowed("try:\n    f()\nexcept ValueError:\n    pass")
    assert not swallowed("try:\n    f()\nexcept ValueError:\n    raise")
    assert idle_tests("def test_a():\n    f()") == ["test_a"]
    assert not idle_tests("def test_a():\n    with pytest.raises(ValueError):\n        f()")
    assert silent_tests("def test_a():\n    assert x") == ["test_a"]
