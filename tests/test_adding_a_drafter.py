"""docs/adding-a-drafter.md keeps its word: the drafter printed there is complete, right, and found
by its name.

The code and the entry point are taken from the page, so that a newcomer who copies them gets what
is tested here.
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from selfspec import LLM, OptionError, SamplingParams
from selfspec.control.registry import make_controller
from selfspec.core.contract import Budget, Draft, Outcome, RowOutcome
from selfspec.core.sampling import Sampler
from selfspec.draft.base import Drafter, Target
from selfspec.draft.registry import GROUP, drafter_names, make_drafter
from selfspec.testing import tiny_llm
from test_drafter_conformance import CHECKS, PROMPTS, Case, same, world

PAGE = Path(__file__).resolve().parents[1] / "docs" / "adding-a-drafter.md"
MODULE = "bigram_drafter"


def block(language: str) -> str:
    """The page's first block in a language."""
    found = re.search(
        rf"^```{language}\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    assert found, f"{PAGE.name} shows no {language}"
    return found[1]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """The page's drafter as an installed distribution: its module, and metadata that names its
    entry point."""
    site = tmp_path_factory.mktemp("site")
    (site / f"{MODULE}.py").write_text(block("python"), encoding="utf-8")
    metadata = site / "selfspec_bigram-0.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: selfspec-bigram\nVersion: 0.1\n", encoding="utf-8"
    )
    points = tomllib.loads(block("toml"))["project"]["entry-points"]
    lines = [
        line
        for group, named in points.items()
        for line in (f"[{group}]", *(f"{k} = {v}" for k, v in named.items()))
    ]
    (metadata / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(site)
        yield importlib.import_module(MODULE)
    sys.modules.pop(MODULE)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return tiny_llm(seed=3)


def test_without_its_package_it_is_not_found() -> None:
    """Comes first: a name that is known without the package was never found through the entry
    point."""
    assert "bigram" not in drafter_names()
    with pytest.raises(OptionError, match="there is no drafter 'bigram'"):
        make_drafter("bigram", {})


def test_it_is_short_and_typed() -> None:
    """The page promises a complete drafter in under 50 lines; one that has grown beyond teaches
    something else. So does one that leaves out types, or has lines of 120 columns."""
    code = block("python")
    assert len(code.splitlines()) < 50 and max(map(len, code.splitlines())) <= 100
    assert "def propose(" in code and "def observe(" in code and "...\n" not in code
    for each in ast.walk(ast.parse(code)):
        if isinstance(each, ast.FunctionDef):
            given = [*each.args.args[1:], *each.args.kwonlyargs, each.args.vararg, each.args.kwarg]
            assert each.returns is not None, each.name
            assert all(argument.annotation for argument in given if argument), each.name


@pytest.mark.parametrize("rows", [[0], [0, 1, 2, 3]], ids=["alone", "ragged"])
@pytest.mark.parametrize("model", ["llama", "alike"])
@pytest.mark.parametrize("check", CHECKS)
def test_it_passes_every_check(
    package: ModuleType, check: str, model: str, rows: list[int]
) -> None:
    """What the suite asks of a built-in drafter: a page whose example fails would teach its mistake
    to every reader."""

    def make(here: Any, script: list[list[int]]) -> Drafter:
        made: Drafter = package.Bigram()
        return made

    CHECKS[check](Case(make, world(model), make_controller("fixed", {"tokens": 5}), rows))


def test_its_drafts_are_accepted_and_rejected(package: ModuleType) -> None:
    """A drafter that never drafts passes every check above; so does one that is never wrong where
    rejection is broken."""
    here = world("llama")
    results = here.llm.generate(PROMPTS, max_new_tokens=48, eos=[], draft=package.Bigram())
    assert 0 < results[0].call.accepted < results[0].call.drafted


def test_it_learns_from_rejected_drafts(package: ModuleType) -> None:
    """The page says that the model's answers to wrong drafts are remembered; from kept text alone
    it would not know 7."""
    session = package.Bigram().start(Target(None, None))  # type: ignore[arg-type]  # it looks at neither
    session.admit(0, [1, 2], Sampler(SamplingParams()))
    nothing = torch.empty(0)
    draft = Draft.chain([1, 2], [7, 8])
    session.observe(
        Outcome([RowOutcome(0, [1, 2, 5], draft, [0], [5], [5, 9, 4])], nothing, nothing)
    )

    def guessed(text: list[int]) -> list[int]:
        (found,) = session.propose([0], [text], Budget([4]))
        return list(found.guesses)

    assert guessed([1, 2, 7]) == [9]
    assert guessed([1, 2, 5, 1]) == [2, 5]
    session.drop(0)
    session.admit(0, [3, 4], Sampler(SamplingParams()))
    assert guessed([1]) == [] and guessed([3]) == [4], "the row is another text now"


def test_it_is_found_by_name(package: ModuleType, llm: LLM) -> None:
    """The entry point on the page: a wrong group or path means that nobody's drafter is ever
    found."""
    assert [
        point.value for point in importlib.metadata.entry_points(group=GROUP, name="bigram")
    ] == [f"{MODULE}:Bigram"]
    assert "bigram" in drafter_names()
    assert make_drafter("bigram", {"most": 3}) == package.Bigram(most=3)
    plain = llm.generate(PROMPTS, max_new_tokens=24, draft=None)
    drafted = llm.generate(PROMPTS, max_new_tokens=24, draft="bigram", draft_options={"most": 3})
    same(drafted, plain)
    assert drafted[0].call.drafted > 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mots": 3}, "did you mean 'most'"),
        ({"most": "x"}, "whole number"),
        ({"most": 0}, "drafts nothing"),
    ],
)
def test_its_options_are_checked_like_ours(
    package: ModuleType, options: dict[str, Any], words: str
) -> None:
    """A third party's drafter gets the same errors as a built-in one, for nothing."""
    with pytest.raises(OptionError, match=words):
        make_drafter("bigram", options)


def test_the_command_line_explains_it(package: ModuleType) -> None:
    """The page says that the line below a field is its help."""
    from selfspec.cli.drafters import known, options_of

    found = options_of(known()[0]["bigram"])
    assert [(each.name, each.default) for each in found] == [
        ("most", "4")
    ] and "most drafts a round" in found[0].help
