"""What a newcomer meets is true: the exported names, every command in the documents, the Python in
README, the examples."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer

import selfspec
from selfspec.cli.app import app

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
DOCUMENTS = [
    README,
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("**/*.md")),
    ROOT / "benchmarks" / "README.md",
]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
# not ours
ORDINARY = {
    "cd",
    "curl",
    "echo",
    "export",
    "git",
    "pip",
    "python",
    "python3",
    "ruff",
    "vllm",
    "vllm-router",
    "source",
    ".",
}
PIPED = re.compile(r"\s(?:\||&&|\|\||;)\s")


@dataclass(frozen=True)
class Block:
    """A fenced block of a document."""

    document: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.document}:{self.line}"


def blocks(path: Path, *languages: str) -> list[Block]:
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    found = re.finditer(r"^```(\w+)[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    name = path.relative_to(ROOT).as_posix()
    return [
        Block(name, text.count("\n", 0, each.start()) + 2, each[1], each[2])
        for each in found
        if each[1].lower() in languages
    ]


def commands(text: str) -> Iterator[list[str]]:
    """The commands of a shell block as words, without comments, prompts, pipes and variables set
    before a command."""
    for line in text.replace("\\\n", " ").splitlines():
        for part in PIPED.split(line.removeprefix("$ ")):
            words = shlex.split(part, comments=True)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words.pop(0)
            if words:
                yield words


def options_of(command: object) -> set[str]:
    return {name for each in command.params for name in (*each.opts, *each.secondary_opts)} | {
        "--help",
        "-h",
    }  # type: ignore[attr-defined]


def selfspec_complaint(words: list[str]) -> str | None:
    """Why `selfspec WORDS` would not run, as far as names of commands and options go."""
    group = typer.main.get_command(app)
    while words and words[0].startswith("-"):
        if words[0] not in options_of(group):
            return f"selfspec has no option {words[0]}"
        words = words[1:]
    if not words:
        return None
    known = group.commands  # type: ignore[attr-defined]
    if words[0] not in known:
        return f"selfspec has no command {words[0]!r}"
    flags = {word.partition("=")[0] for word in words[1:] if re.match(r"--?[A-Za-z]", word)}
    unknown = flags - options_of(known[words[0]])
    return f"selfspec {words[0]} has no option {', '.join(sorted(unknown))}" if unknown else None


def script_complaint(words: list[str]) -> str | None:
    script = ROOT / words[0].removeprefix("./")
    if not script.is_file():
        return f"there is no {words[0]}"
    if not os.access(script, os.X_OK):
        return f"{words[0]} is not executable"
    named = script.name in ("demo", "serve")
    return selfspec_complaint([script.name, *words[1:]]) if named else None


def extras_complaint(words: list[str]) -> str | None:
    """`pip install "selfspec[NAME]"`: the extra must exist, pip only warns about one that does
    not."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    asked = {
        name.strip()
        for word in words
        for each in re.findall(r"(?:selfspec|\.)\[([\w, -]+)\]", word)
        for name in each.split(",")
    }
    return (
        f"no such extra: {', '.join(sorted(asked - set(extras)))}" if asked - set(extras) else None
    )


def complaint(words: list[str]) -> str | None:
    if words[0] == "selfspec":
        return selfspec_complaint(words[1:])
    if re.match(r"(\./)?(scripts|\.ci|benchmarks)/", words[0]):
        return script_complaint(words)
    if words[0].removeprefix(".venv/bin/") in ORDINARY:
        return extras_complaint(words)
    return f"{words[0]} is a command that this test does not know"


# ------------------------------------------------------------------------------------------ exports


def test_all_is_sorted_and_each_name_can_be_imported() -> None:
    """Catches a lazy name whose home was moved: it fails only for the user who asks for it."""
    assert selfspec.__all__ == sorted(selfspec.__all__, key=_as_ruff_sorts)
    assert len(set(selfspec.__all__)) == len(selfspec.__all__)
    for name in selfspec.__all__:
        assert getattr(selfspec, name).__name__ == name


def _as_ruff_sorts(name: str) -> tuple[int, str]:
    """SCREAMING_CASE first, then classes, then the rest, as the linter's isort-style sort has
    it."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)


def test_all_is_complete() -> None:
    """Type checkers see the imports in __init__, everybody else sees __all__; a name in only one of
    them is half exported."""
    tree = ast.parse(Path(selfspec.__file__).read_text(encoding="utf-8"))
    relative = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level]
    imported = {alias.asname or alias.name for node in relative for alias in node.names}
    assert imported == set(selfspec.__all__)


def test_every_error_is_exported() -> None:
    """Users catch our errors by name; one that is raised and not exported cannot be caught."""
    errors = importlib.import_module("selfspec.errors")
    classes = {
        name
        for name, each in vars(errors).items()
        if inspect.isclass(each) and issubclass(each, selfspec.SelfspecError)
    }
    assert classes <= set(selfspec.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    """hasattr and `from selfspec import nonsense` rely on it; a KeyError out of the lazy table
    would break both."""
    assert not hasattr(selfspec, "nonsense")


def test_importing_selfspec_is_light() -> None:
    """Catches an eager import in __init__: torch and transformers take seconds, and nobody has
    asked for a model yet."""
    heavy = "{'torch', 'transformers'} & set(sys.modules)"
    code = f"import sys, selfspec, selfspec.errors; sys.exit(str({heavy} or ''))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert not done.stderr.strip(), f"imported at once: {done.stderr}"


def test_importing_llm_brings_torch_and_little_else() -> None:
    """Everyone waits for the import of a library that only loading, training or plots need."""
    heavy = {
        "transformers", "huggingface_hub", "safetensors", "tokenizers", "accelerate", "peft",
        "matplotlib", "sympy", "pandas", "PIL", "jinja2", "rich", "typer", "psutil",
        "torch._dynamo", "torch._inductor", "torch.distributed.tensor",
    }  # fmt: skip
    code = f"import sys; from selfspec import LLM; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stdout + done.stderr
    for name in ("transformers", "huggingface_hub", "safetensors", "torch._dynamo"):
        assert importlib.util.find_spec(name), f"{name} is not the name of a module"


@pytest.mark.parametrize("name", selfspec.__all__)
def test_every_public_name_says_what_it_is(name: str) -> None:
    """Dataclasses without a docstring get a signature as one, which looks documented to a careless
    check; methods count too."""
    each = getattr(selfspec, name)
    documentation = inspect.getdoc(each) or ""
    assert documentation and not documentation.startswith(f"{name}("), f"{name} has no docstring"
    methods = [
        (key, value)
        for key, value in vars(each).items()
        if not key.startswith("_") and _is_method(value)
    ]
    bare = [
        key for key, value in methods if not inspect.getdoc(value) and not _explains_itself(value)
    ]
    assert not bare, f"{name}: no docstring for {', '.join(bare)}"


def _is_method(value: object) -> bool:
    return inspect.isfunction(value) or isinstance(value, property | classmethod | staticmethod)


def _explains_itself(value: object) -> bool:
    """A property that returns one expression and is named for it needs no sentence."""
    if not isinstance(value, property) or value.fget is None:
        return False
    return len(inspect.getsource(value.fget).strip().splitlines()) <= 3


# ---------------------------------------------------------------------------------------- documents


def test_readme_is_there_and_shows_how() -> None:
    """A README without a command or without Python would make every test below pass over
    nothing."""
    assert blocks(README, "bash"), "README.md shows no command"
    assert blocks(README, "python"), "README.md shows no Python"


@pytest.mark.parametrize(
    "block",
    [block for path in DOCUMENTS for block in blocks(path, "bash", "sh", "shell", "console")],
    ids=str,
)
def test_every_command_in_the_documents_exists(block: Block) -> None:
    """Catches a renamed script, command, option or extra that the documents still show."""
    wrong = [
        f"{' '.join(words)}: {why}" for words in commands(block.text) if (why := complaint(words))
    ]
    assert not wrong, f"{block}: " + "; ".join(wrong)


@pytest.mark.parametrize(
    "block", [block for path in DOCUMENTS for block in blocks(path, "python")], ids=str
)
def test_python_in_the_documents_uses_public_names(block: Block) -> None:
    """Catches an example that does not compile, or that teaches a name which was removed or was
    never public."""
    tree = ast.parse(block.text, filename=str(block))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "selfspec":
            module = importlib.import_module(node.module or "")
            for alias in node.names:
                public = (
                    alias.name in selfspec.__all__
                    if node.module == "selfspec"
                    else not alias.name.startswith("_")
                )
                assert public and hasattr(module, alias.name), (
                    f"{block}: {node.module}.{alias.name} is not public"
                )


@pytest.mark.demo
def test_python_in_readme_runs(demo_path: Path, tmp_path: Path) -> None:
    """Catches a changed argument or field: the first code anybody copies must work. Blocks run in
    order, as a reader would."""
    shown = [block.text for block in blocks(README, "python")]
    assert shown, "README.md shows no Python"
    script = tmp_path / "readme.py"
    script.write_text("\n".join(shown), encoding="utf-8")
    _run_python(script, tmp_path)


def test_the_checker_knows_wrong_from_right() -> None:
    """The self-test: a checker of documents that accepts everything would guard nothing."""
    wrong = [
        "selfspec generat x",
        "selfspec generate x --max-tokens 3",
        "selfspec --nope",
        "scripts/nothing",
        "frobnicate",
    ]
    wrong += [
        "scripts/demo --nope",
        'pip install "selfspec[nothing]"',
        "X=1 selfspec generat x",
        "cat x | selfspec generat -",
    ]
    right = [
        "selfspec generate demo 'a --b' -n 3 --temperature=0.5",
        "scripts/demo --rounds 5",
        "./scripts/test",
        "git clone x",
    ]
    right += [
        "pip install -e '.[dev]'",
        "echo hi | selfspec generate -",
        "SELFSPEC_CACHE=/x scripts/demo # why",
        "selfspec --version",
    ]
    caught = {
        line: [why for words in commands(line) if (why := complaint(words))]
        for line in [*wrong, *right]
    }
    assert [
        line
        for line in wrong
        if len([c for c in caught[line] if c]) < 1 and line != "cat x | selfspec generat -"
    ] == []
    assert any("generat" in why for why in caught["cat x | selfspec generat -"])
    assert [line for line in right if caught[line]] == []


# ----------------------------------------------------------------------------- scripts and examples


@pytest.mark.parametrize(
    "name",
    [
        "scripts/install",
        "scripts/check",
        "scripts/test",
        "scripts/demo",
        "scripts/bench",
        "scripts/head",
        "scripts/serve",
        ".ci/run",
    ],
)
def test_scripts_can_be_run(name: str) -> None:
    """Catches a lost executable bit and a syntax error in a branch that nobody took yet."""
    script = ROOT / name
    assert os.access(script, os.X_OK), f"{name} is missing or not executable"
    assert script.read_text(encoding="utf-8").startswith("#!/usr/bin/env bash\n")
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr


def test_every_benchmark_that_is_described_can_be_run() -> None:
    """Catches a benchmark that the script refuses as unknown, though a page names it."""
    lists = [ROOT / "scripts" / "bench", ROOT / "benchmarks" / "README.md"]
    known, described = (
        set(re.findall(rf"^{start}scripts/bench ([a-z_]+)", file.read_text("utf-8"), re.MULTILINE))
        for file, start in zip(lists, ("#   ", ""), strict=True)
    )
    assert described and described == known


def test_ci_runs_the_scripts_and_nothing_else() -> None:
    """People and CI must run the same commands, else CI passes on what nobody can repeat."""
    called = set(
        re.findall(
            r"\bscripts/\w+",
            re.sub(r"^#.*$", "", (ROOT / ".ci/run").read_text(encoding="utf-8"), flags=re.M),
        )
    )
    assert called == {"scripts/check", "scripts/test"}


def test_the_headline_is_what_was_measured() -> None:
    """Catches a figure that outlived its measurement, or one measured on something else."""
    from benchmarks.plain import report, results
    from selfspec.bench import schema, suite_stats

    text = README.read_text(encoding="utf-8")
    found = re.search(
        r"\*\*([\d.]+)x our own plain decoding, which is ([\d.]+)x transformers", text
    )
    assert found, "README's first screen has no headline of this form"
    suite = schema.read(schema.SuiteRun, ROOT / "benchmarks/results/spec-amd-epyc.json")
    auto = next(row for row in suite_stats.rows(suite, 1) if row.contestant == "selfspec/auto")
    by_task = [suite_stats.rows(suite, 1, task) for task in suite_stats.tasks_of(suite)]
    slower = [
        row
        for rows in by_task
        for row in rows
        if row.contestant == auto.contestant and row.verdict == "slower"
    ]
    plain = report.summary(
        schema.read(results.PlainRun, ROOT / "benchmarks/results/plain-steps-amd-epyc.json")
    )
    assert auto.over_plain is not None and found[1] == f"{auto.over_plain.value:.2f}"
    assert auto.units == 24 and auto.compared == 24 * suite.plan.rounds
    assert not auto.differences and not slower
    assert found[2] == f"{plain['speed_over']['transformers@64']:.2f}"
    in_float32 = [same for name, same in plain["identical"].items() if ":" not in name]
    assert len(in_float32) == 4 and all(in_float32)


def test_there_are_examples() -> None:
    """An emptied folder would make the next test pass over nothing."""
    assert EXAMPLES


def _example(path: Path) -> object:
    marks = [pytest.mark.demo] if "demo" in path.read_text(encoding="utf-8") else []
    return pytest.param(path, id=path.name, marks=marks)


@pytest.mark.parametrize("path", [_example(path) for path in EXAMPLES])
def test_examples_run(path: Path, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """An example that no longer runs is worse than none. They run in a folder of their own, as a
    user's copy would."""
    if request.node.get_closest_marker("demo"):
        request.getfixturevalue("demo_path")
    assert _run_python(path, tmp_path).strip(), f"{path.name} printed nothing, so it shows nothing"


def _run_python(script: Path, folder: Path) -> str:
    source = str(Path(selfspec.__file__).resolve().parents[1])
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": source},
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, f"{script.name}:\n{done.stderr[-3000:]}"
    return done.stdout
