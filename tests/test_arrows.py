"""Imports go one way. This walks the source of every module and compares what it imports with the table below.

    errors <- contract, sampling, text <- model <- exits <- draft | control | verify <- engine, lossy, turns <- llm
           <- selfdata, tune, bench, serve, integrations, testing <- cli;   train sees model, sampling, contract

How it reads an import: inside functions counts like at the top. An import under `if TYPE_CHECKING:` may also go sideways, to
another room of the same rank or a sibling (it cannot make a cycle at run time), but never upwards: a type that is needed
below belongs in contract. The package's own `__init__` only hands names out and may import anything; only rooms above `llm` may
import from it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "selfspec"

RANKS: list[set[str]] = [
    {"errors"},
    {"contract", "draws", "options", "rows", "sampling", "text"},
    {"model"},
    {"exits", "train"},
    {"draft", "control", "verify"},
    {"engine", "auto", "lossy", "results", "turns"},
    {"llm"},
    {"selfdata", "tune", "bench", "serve", "integrations", "testing"},
    {"cli"},
]
RANK = {room: rank for rank, rooms in enumerate(RANKS) for room in rooms}

# Rooms that do not see everything below them, or see a neighbour: contract holds plain values, which sampling and text hand out.
NARROW: dict[str, set[str]] = {
    "contract": {"errors"},
    "draws": set(),
    "options": {"errors"},
    "results": {"contract"},
    "rows": {"errors"},
    "sampling": {"errors", "contract", "draws"},
    "text": {"errors", "contract"},
    "exits": {"errors", "contract", "sampling", "model"},
    "train": {"errors", "contract", "rows", "sampling", "text", "model"},
    "draft": {"errors", "contract", "sampling", "model", "exits", "draws", "options"},
    "control": {"errors", "contract", "options"},
    "verify": {"errors", "contract", "draws"},
}

# In these rooms a module is one method: it may lean on the room's shared modules, never on another method.
ROOMS_OF_METHODS = {"draft", "control"}
SHARED_MODULES = {"__init__", "base", "chain", "costs", "entries", "grown", "registry", "second", "tree"}

# Optional packages, each imported in one room, or in one module of each of two, behind an extra.
OPTIONAL: dict[str, set[str]] = {
    "optuna": {"tune"},
    "fastapi": {"serve"},
    "uvicorn": {"serve"},
    "matplotlib": {"bench", "train"},
    "datasets": {"rows"},
    "peft": {"train"},
    "rouge_score": {"bench"},
    "lm_eval": {"integrations"},
}

ROOT = "the package itself"


@dataclass(frozen=True)
class Import:
    """One imported module: its room and module inside selfspec, or the foreign package's name."""

    line: int
    room: str  # "" for a foreign package
    module: str
    typing_only: bool


def is_type_checking(node: ast.If) -> bool:
    return ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def walk(tree: ast.AST, typing_only: bool = False) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Every import statement, and whether it stands under TYPE_CHECKING (the else branch does not)."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node, typing_only
        elif isinstance(node, ast.If) and is_type_checking(node):
            yield from walk(ast.Module(node.body, []), True)
            yield from walk(ast.Module(node.orelse, []), typing_only)
        else:
            yield from walk(node, typing_only)


def targets(node: ast.Import | ast.ImportFrom, package: list[str]) -> Iterator[list[str]]:
    """The dotted paths a statement may load, relative imports resolved against the package the module lives in."""
    if isinstance(node, ast.Import):
        yield from (alias.name.split(".") for alias in node.names)
        return
    base = package[: len(package) - node.level + 1] if node.level else []
    base = base + (node.module.split(".") if node.module else [])
    yield from ([*base, alias.name] for alias in node.names)


def imports(source: str, package: list[str], rooms: set[str]) -> Iterator[Import]:
    for node, typing_only in walk(ast.parse(source)):
        for path in targets(node, package):
            if path[0] != "selfspec":
                yield Import(node.lineno, "", path[0], typing_only)
            elif len(path) > 1 and path[1] in rooms:
                yield Import(node.lineno, path[1], path[2] if len(path) > 2 else "", typing_only)
            else:
                yield Import(node.lineno, ROOT, "", typing_only)


def sibling_complaint(room: str, module: str, imported: str) -> str | None:
    """Only a module counts: `from . import something` may also name a function of the room's own __init__."""
    if room not in ROOMS_OF_METHODS or module in SHARED_MODULES or imported in SHARED_MODULES | {"", module}:
        return None
    is_module = (PACKAGE / room / f"{imported}.py").exists()
    return f"siblings in {room} do not import each other ({imported})" if is_module else None


def complaint(room: str, module: str, found: Import) -> str | None:
    """Why this import is not allowed, or None."""
    if not found.room:
        home = OPTIONAL.get(found.module)
        if home is None or room in home:
            return None
        return f"{found.module} is optional and belongs in {' and '.join(sorted(home))}"
    if found.room == ROOT:
        return None if RANK[room] > RANK["llm"] else "only rooms above llm may import from the package itself"
    if found.room == room:
        return None if found.typing_only else sibling_complaint(room, module, found.module)
    if RANK[found.room] > RANK[room]:
        return f"{room} is below {found.room}"
    if found.typing_only:
        return None
    if room in NARROW:
        return None if found.room in NARROW[room] else f"{room} sees only {', '.join(sorted(NARROW[room]))}"
    return f"{room} and {found.room} stand side by side" if RANK[found.room] == RANK[room] else None


def violations(source: str, room: str, module: str = "", package: list[str] | None = None) -> list[str]:
    """All complaints about one module's source, each with its line."""
    package = ["selfspec", room] if package is None else package
    found = [(each.line, complaint(room, module, each)) for each in imports(source, package, set(RANK))]
    return [f"line {line}: {words}" for line, words in found if words]


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


@pytest.mark.parametrize("path", modules(), ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_imports_follow_the_arrows(path: Path) -> None:
    """Catches a cycle in the making: a room that reaches upwards, sideways, or past what it is meant to see."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    assert parts[0] in RANK, f"{parts[0]} is a new room: give it a place in RANKS, and docs/architecture.md a line"
    found = violations(path.read_text(encoding="utf-8"), parts[0], parts[-1], ["selfspec", *parts[:-1]])
    assert not found, f"{path.relative_to(PACKAGE)}: " + "; ".join(found)


def test_there_is_something_to_check() -> None:
    """A moved package would make the test above pass over nothing."""
    assert len(modules()) >= 5
    assert {"errors", "contract", "model"} <= {path.relative_to(PACKAGE).with_suffix("").parts[0] for path in modules()}


@pytest.mark.parametrize(
    ("room", "module", "source", "words"),
    [
        ("model", "x", "from ..engine import run", "below engine"),
        ("model", "x", "from selfspec.llm import LLM", "below llm"),
        ("model", "x", "import selfspec.llm", "below llm"),
        ("model", "x", "from .. import llm", "below llm"),
        ("model", "x", "def f():\n    from ..engine import run", "line 2"),
        ("model", "x", "try:\n    import selfspec.cli\nexcept ImportError:\n    raise", "below cli"),
        ("model", "x", "from selfspec import LLM", "package itself"),
        ("model", "x", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..llm import LLM", "below llm"),
        ("model", "x", "if TYPE_CHECKING:\n    pass\nelse:\n    from ..llm import LLM", "below llm"),
        ("control", "x", "if TYPE_CHECKING:\n    pass\nelse:\n    from ..draft.base import Drafter", "sees only"),
        ("control", "x", "from ..model.plan import LayerPlan", "sees only"),
        ("control", "x", "from ..draft.base import Drafter", "sees only"),
        ("train", "x", "from ..exits import head", "sees only"),
        ("engine", "engine", "from selfspec.lossy import early", "side by side"),
        ("contract", "contract", "from selfspec.sampling import Sampler", "sees only"),
        ("engine", "engine", "import optuna", "belongs in tune"),
    ],
)
def test_a_wrong_import_is_caught(room: str, module: str, source: str, words: str) -> None:
    """The self-test: a checker that resolves an import wrongly passes on everything."""
    assert any(words in each for each in violations(source, room, module)), f"not caught in {room}: {source!r}"


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("engine", "from .model.cache import KVCache\nfrom .errors import OptionError\nimport torch"),
        ("sampling", "from .contract import TokenLogprob"),
        ("contract", "if TYPE_CHECKING:\n    from .sampling import Sampler"),
        ("cli", "from ..llm import LLM\nfrom .. import LLM, llm"),
        ("control", "if TYPE_CHECKING:\n    from ..draft.base import Drafter"),
        ("tune", "import optuna"),
    ],
)
def test_a_right_import_passes(room: str, source: str) -> None:
    """A checker that complains about everything would be switched off within a day."""
    package = ["selfspec"] if room in ("engine", "sampling", "contract") else None
    assert violations(source, room, room, package) == []


def test_siblings_are_kept_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafters that import each other can no longer be read, tested or deleted alone; shared bases and names are fine."""
    (tmp_path / "draft").mkdir()
    for name in ("base", "early", "skip"):
        (tmp_path / "draft" / f"{name}.py").touch()
    monkeypatch.setattr(f"{__name__}.PACKAGE", tmp_path)
    assert violations("from .early import Early", "draft", "skip")
    assert violations("from . import early", "draft", "skip")
    assert violations("from selfspec.draft import early", "draft", "skip")
    assert not violations("from .base import Drafter", "draft", "skip")
    assert not violations("from . import base", "draft", "skip")
    assert not violations("from . import early, skip", "draft", "registry")
