"""Imports go one way. This walks the source of every module, compares what it imports with the
table below, and looks for circles.

A room is a folder of the package or one of its top files. A room may import from rooms that stand
before it in `ORDER`, never from one that stands beside or behind it. Imports inside functions and
under `TYPE_CHECKING` count like all others: a type that both need belongs below both. The package's
own `__init__` only hands names out and may import anything. Only rooms above `llm` may import it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "selfspec"
PAGE = ROOT / "docs" / "architecture.md"

ORDER: list[set[str]] = [
    {"errors"},
    {"core"},
    {"model.compute"},
    {"model.compute.cpu", "model.compute.cuda", "model.load"},
    {"model"},
    {"trained"},
    {"control", "verify", "exits"},
    {"draft"},
    {"draft.from_text", "draft.from_layers", "draft.from_models"},
    {"engine"},
    {"results"},
    {"call", "profile"},
    {"llm", "lossy"},
    {"train", "serve"},
    {"integrations"},
    {"bench", "testing"},
    {"tune"},
    {"cli"},
    {"__main__"},
]
RANK = {room: rank for rank, rooms in enumerate(ORDER) for room in rooms}

# Rooms that do not see everything below them.
NARROW: dict[str, set[str]] = {
    "control": {"errors", "core"},
    "verify": {"errors", "core"},
    "results": {"core"},
}

# In these rooms a module is one method: it may lean on the named modules, never on another method.
SHARED = {
    "control": {"base", "costs", "looks", "registry"},
    "draft.from_text": set[str](),
    "draft.from_layers": set[str](),
    "draft.from_models": set[str](),
}

# Packages that are imported in these rooms or modules only. Optional ones stand behind an extra.
HOMES: dict[str, set[str]] = {
    # one room knows the kernels' C interface; the meter reads a card's energy from its driver
    "ctypes": {"model.compute.cpu", "bench.meters"},
    "optuna": {"tune"},
    "fastapi": {"serve"},
    "starlette": {"serve"},
    "uvicorn": {"serve"},
    "prometheus_client": {"serve"},
    "matplotlib": {"bench", "train"},
    "datasets": {"core"},
    "peft": {"train"},
    "lm_eval": {"integrations"},
    "llguidance": {"core"},
    "sklearn": {"train"},
}

# Circles between modules that are known and wait for their repair. Shall become empty.
KNOWN_CIRCLES: set[frozenset[str]] = {}
# Imports against the order that are known and wait for their repair. Shall become empty.
KNOWN: set[tuple[str, str]] = set()


@dataclass(frozen=True)
class Import:
    """One imported name: the module of selfspec that it comes from, dotted, or a foreign one."""

    line: int
    module: str
    ours: bool


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def modules() -> dict[str, Path]:
    found = sorted(PACKAGE.rglob("*.py"))
    return {module_name(path): path for path in found if path != PACKAGE / "__init__.py"}


MODULES = modules()


def room_of(module: str) -> str:
    """The innermost room that holds a module."""
    parts = module.split(".")
    inside = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((each for each in inside if each in RANK), "")


def paths(node: ast.AST, package: list[str]) -> Iterator[list[str]]:
    """The dotted paths that a statement may load. Relative ones start from the package in which
    the module lives."""
    if isinstance(node, ast.Import):
        yield from (alias.name.split(".") for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        base = package[: len(package) - node.level + 1] if node.level else []
        base = base + (node.module.split(".") if node.module else [])
        yield from ([*base, alias.name] for alias in node.names)


def imports(source: str, package: list[str], known: Iterable[str]) -> Iterator[Import]:
    names = set(known)
    for node in ast.walk(ast.parse(source)):
        for path in paths(node, package):
            if path[0] != "selfspec":
                yield Import(getattr(node, "lineno", 0), path[0], False)
                continue
            inner = path[1:]
            while inner and ".".join(inner) not in names | set(RANK):
                inner = inner[:-1]  # the last name is a class or a function of the module
            yield Import(getattr(node, "lineno", 0), ".".join(inner), True)


def complaint(module: str, found: Import) -> str | None:
    """Why this import is not allowed, or None."""
    room = room_of(module)
    if not found.ours:
        homes = HOMES.get(found.module, {room})
        return (
            None
            if homes & {room, module}
            else f"{found.module} belongs in {', '.join(sorted(homes))}"
        )
    if not found.module:
        below = RANK[room] <= RANK["llm"]
        return "only rooms above llm may import from the package itself" if below else None
    other = room_of(found.module)
    if other == room:
        leaf, target = module.rpartition(".")[2], found.module.rpartition(".")[2]
        alone = room in SHARED and found.module != room and leaf != target
        apart = alone and not {leaf, target} & (SHARED[room] | {"__init__"})
        return f"modules of {room} do not import each other ({target})" if apart else None
    if RANK[other] >= RANK[room]:
        return f"{room} stands before or beside {other}"
    if room in NARROW and other not in NARROW[room]:
        return f"{room} sees only {', '.join(sorted(NARROW[room]))}"
    return None


def package_of(module: str, path: Path | None = None) -> list[str]:
    parts = ["selfspec", *module.split(".")]
    return parts if path is not None and path.name == "__init__.py" else parts[:-1]


def violations(source: str, module: str, path: Path | None = None) -> list[str]:
    """All complaints about one module's source, each with its line."""
    found = imports(source, package_of(module, path), MODULES)
    complaints = [
        (each.line, complaint(module, each)) for each in found if (module, each.module) not in KNOWN
    ]
    return [f"line {line}: {words}" for line, words in complaints if words]


def circles(graph: Mapping[str, set[str]]) -> list[frozenset[str]]:
    """Groups of modules of which each reaches every other one."""
    reach = {name: set(targets) for name, targets in graph.items()}
    for middle in graph:
        for name in graph:
            if middle in reach[name]:
                reach[name] |= reach[middle]
    tied = {name: frozenset(o for o in reach[name] if name in reach[o]) for name in graph}
    return sorted({group for group in tied.values() if group}, key=sorted)


def import_graph() -> dict[str, set[str]]:
    graph: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        found = imports(path.read_text(encoding="utf-8"), package_of(module, path), MODULES)
        named = {each.module for each in found if each.ours and each.module in MODULES}
        graph[module] = named - {module}
    return graph


@pytest.mark.parametrize("module", MODULES)
def test_imports_follow_the_arrows(module: str) -> None:
    """A room that reaches upwards, sideways, or past what it is meant to see."""
    assert room_of(module), (
        f"{module} is a new room: give it a place in ORDER, and docs/architecture.md a line"
    )
    source = MODULES[module].read_text(encoding="utf-8")
    found = violations(source, module, MODULES[module])
    assert not found, f"{module}: " + "; ".join(found)


def test_no_modules_go_round_in_a_circle() -> None:
    """Two modules of one room that need each other: neither can be read or tested alone."""
    found = [group for group in circles(import_graph()) if group not in KNOWN_CIRCLES]
    assert not found, "; ".join(" <-> ".join(sorted(group)) for group in found)


def sources(folder: Path) -> list[Path]:
    """Ours below a folder: a peer that took part has its environment beside its file."""
    return [path for path in sorted(folder.rglob("*.py")) if ".venv" not in path.parts]


def importers_of(name: str, folder: Path) -> list[str]:
    """Files below a folder that import a top-level package."""
    importers = []
    for path in sources(folder):
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        loaded = {target[0] for node in nodes for target in paths(node, ["selfspec", "x"])}
        importers += [path.name] if name in loaded else []
    return importers


def test_the_package_does_not_know_its_benchmarks(tmp_path: Path) -> None:
    """`benchmarks/` is in no wheel: an import of it works in a checkout, and fails for every user
    of an installed package."""
    assert importers_of("benchmarks", PACKAGE) == []
    wrong = "def f():\n    from benchmarks.convert import converted"
    (tmp_path / "x.py").write_text(wrong, encoding="utf-8")
    assert importers_of("benchmarks", tmp_path) == ["x.py"], "the check sees nothing"
    assert len(importers_of("selfspec", ROOT / "benchmarks")) > 10


def test_benchmarks_import_by_full_names() -> None:
    """Their modules move between folders. A relative import would also fail where one is run as a
    script."""
    for path in sources(ROOT / "benchmarks"):
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        relative = [n.lineno for n in nodes if isinstance(n, ast.ImportFrom) and n.level]
        assert not relative, f"{path.relative_to(ROOT)}: relative imports at {relative}"


def test_there_is_something_to_check() -> None:
    """A moved package would make the tests above pass over nothing."""
    assert len(MODULES) >= 100
    assert len(import_graph()["llm"]) >= 5
    assert set(RANK) <= {room_of(module) for module in MODULES}, "a room of ORDER is gone"


@pytest.mark.parametrize(
    ("module", "source", "words"),
    [
        ("model.x", "from ..engine import run", "beside engine"),
        ("model.x", "from selfspec.llm import LLM", "beside llm"),
        ("model.x", "import selfspec.llm", "beside llm"),
        ("model.x", "from .. import llm", "beside llm"),
        ("model.x", "def f():\n    from ..engine import run", "line 2"),
        ("model.x", "try:\n    import selfspec.cli\nexcept ImportError:\n    raise", "beside cli"),
        ("model.x", "from selfspec import LLM", "package itself"),
        ("model.x", "if TYPE_CHECKING:\n    from ..llm import LLM", "beside llm"),
        ("model.compute.x", "from .cpu.native import library", "beside model.compute.cpu"),
        ("model.compute.cpu.x", "from ..cuda import frame", "beside model.compute.cuda"),
        ("control.x", "from ..draft.base import Drafter", "beside draft"),
        ("control.x", "from ..model.layered import LayeredModel", "sees only"),
        ("control.fixed", "from .adaptive import Adaptive", "each other"),
        ("draft.from_text.ngram", "from .recycle import TokenRecycling", "each other"),
        ("draft.from_text.ngram", "from ..from_layers import cosine", "beside"),
        ("engine.x", "from selfspec.lossy import early", "beside lossy"),
        ("engine.x", "import optuna", "belongs in tune"),
        ("model.compute.ops", "import ctypes", "belongs in bench.meters, model.compute.cpu"),
        ("model.passes", "from ctypes import c_int64", "belongs in"),
        ("bench.x", "import ctypes", "belongs in"),
    ],
)
def test_a_wrong_import_is_caught(module: str, source: str, words: str) -> None:
    """The self-test: a checker that resolves an import wrongly passes on everything."""
    found = violations(source, module)
    assert any(words in each for each in found), f"not caught in {module}: {source!r}: {found}"


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("engine.x", "from ..model.compute.cache import KVCache\nfrom ..errors import OptionError"),
        ("cli.x", "from ..llm import LLM\nfrom .. import LLM, llm"),
        ("control.adaptive", "from .base import Controller\nfrom ..core.contract import Budget"),
        ("draft.from_layers.cosine", "from ..chain import ChainSession\nimport torch"),
        ("core.x", "from . import sampling"),
        ("model.compute.cpu.interface", "import ctypes"),
        ("bench.meters", "import ctypes"),
    ],
)
def test_a_right_import_passes(module: str, source: str) -> None:
    """A checker that complains about everything would be switched off."""
    assert violations(source, module) == []


def test_a_circle_is_seen() -> None:
    """The self-test of the search for circles."""
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}, "e": set[str]()}
    assert circles(graph) == [frozenset("abc")]
    assert circles({"a": {"b"}, "b": set()}) == []


def rooms_on_the_page(text: str) -> set[str]:
    """The rooms that docs/architecture.md gives a line: the first cell of its table of rooms."""
    table = text.partition("## Rooms")[2].partition("\n## ")[0]
    return {name.strip("/").replace("/", ".").removesuffix(".py") for name in
            re.findall(r"^\| `([^`]+)` \|", table, flags=re.M)}  # fmt: skip


def test_the_page_names_every_room_and_no_ghost() -> None:
    """A folder that nobody can place, or a page that describes what is no longer there."""
    named = rooms_on_the_page(PAGE.read_text(encoding="utf-8"))
    assert named == set(RANK), f"not on the page: {set(RANK) - named}; ghosts: {named - set(RANK)}"
    sample = "## Rooms\n\n| `core/` | x |\n| `model/load/` | y |\n\n## Next\n| `ghost/` | z |"
    assert rooms_on_the_page(sample) == {"core", "model.load"}
