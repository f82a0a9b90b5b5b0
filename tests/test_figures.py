"""Every figure in README and docs is one of a committed result, or says why it is none.

`figures.py` says where each comes from. docs/log.md stands apart: its entries are of their day, and
name their file or say that it is not kept. A sentence of another page may say "not kept" too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from benchmarks import libraries_report
from benchmarks.libraries_report import LibrariesRun
from tests.figures import COMPARED, NOT_MEASURED, REASONS, ROOT, claims, result

FIGURE = re.compile(
    r"(?<![\w.,/-])\d[\d,]*(?:\.\d+)?"
    r"(?:x\b|%| (?:times|ms|s|seconds?|minutes?|hours?|MB|GB|kB|tokens (?:a|per) second|tokens/s"
    r"|points|thousand|million|billion|of 20|of 100|positions|requests|utterances|kills)\b)"
    r"|(?<![\w.,/-])\d+\.\d+(?!\.?\d)"
)
NO_FIGURE = re.compile(
    r"`[^`]*`|\]\([^)]*\)|arXiv \d+\.\d+|\[\d{4}\.\d{5}\]|^\| .*\d+ passed.*|^\| CI .*"
)
PAGES = {
    ("benchmarks/" if path.parent.name == "benchmarks" else "") + path.name: path.read_text(
        encoding="utf-8"
    )
    for path in [
        *sorted(ROOT.glob("*.md")),
        *sorted((ROOT / "docs").glob("*.md")),
        ROOT / "benchmarks/README.md",
    ]
    if path.name != "log.md"
}


def figures(text: str) -> Iterator[tuple[int, str]]:
    """Figures in prose and tables, with their lines: none of code, links, rows that another test
    compares, and sentences that say that their figures are not kept."""
    code = False
    for number, line in enumerate(text.splitlines(), start=1):
        code ^= line.startswith("```")
        if not code and "not kept" not in line:
            for found in FIGURE.findall(NO_FIGURE.sub("", line)):
                yield number, found


def without(text: str, name: str, sentences: list[str]) -> str:
    """The page without what is accounted for."""
    for row in COMPARED.get(name, []):
        text, found = re.subn(f"^{row}.*$", "", text, flags=re.MULTILINE)
        assert found, f"{name} has no row like {row}: take it out of figures.py"
    for words in [*sentences, *(words for words, _ in NOT_MEASURED.get(name, []))]:
        assert words in text, f"{name} should say: {words}"
        text = text.replace(words, "")
    return text


@pytest.mark.parametrize("name", PAGES)
def test_every_figure_comes_from_somewhere(name: str) -> None:
    """A figure that was typed from memory, or that outlived its measurement."""
    left = list(figures(without(PAGES[name], name, CLAIMS.get(name, []))))
    assert not left, (
        f"{name}: no result has these figures. Add the sentence to tests/figures.py, made of the "
        f'JSON, or say in it that they are "not kept": {left}'
    )


CLAIMS = claims()


def test_the_tables_of_libraries_are_what_was_measured() -> None:
    """Rows of another run: choosing.md compares libraries at the same drafts."""
    printed = {
        line
        for name in ("versus", "versus-damped")
        for line in libraries_report.markdown(result(LibrariesRun, name)).splitlines()
    }
    rows = re.findall(rf"^{COMPARED['choosing.md'][-1]}.*$", PAGES["choosing.md"], re.MULTILINE)
    rows = [row for row in rows if row.count("|") == 8]  # other tables have other columns
    assert len(rows) == 8 and set(rows) <= printed


def test_a_figure_of_nobody_is_found() -> None:
    """A pattern that finds nothing would let every page pass."""
    text = "It is 3.41x as fast, 17% less, in 12 ms, h = 0.5.\n`0.5` [a](1.5.json) torch 2.6.0\n"
    assert [found for _, found in figures(text)] == ["3.41x", "17%", "12 ms", "0.5"]
    assert not list(figures("Once it was 7 ms (not kept).\n```\n9.1x\n```\n"))
    with pytest.raises(AssertionError, match=re.escape("README.md should say: 2.99x")):
        without(PAGES["README.md"], "README.md", ["2.99x"])


def test_what_is_declared_is_of_pages() -> None:
    """A page that was renamed, whose figures nobody looks at any more; a reason that is none."""
    assert {*CLAIMS, *NOT_MEASURED, *COMPARED} <= set(PAGES)
    assert {reason for rows in NOT_MEASURED.values() for _, reason in rows} == REASONS
    assert sum(map(len, CLAIMS.values())) > 50
