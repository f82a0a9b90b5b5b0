"""The contest of the same drafts by other libraries: its table from numbers known by heart."""

from __future__ import annotations

from pathlib import Path

import pytest
from suite_world import PROVENANCE

from benchmarks.libraries import contestants
from benchmarks.libraries_report import Answer, LibrariesRun, faster, markdown
from selfspec.bench.schema import read
from selfspec.errors import OptionError


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "[]",
        "{",
        '{"kind": "versus", "schema_version": 9}',
        '{"kind": "plain", "schema_version": 2}',
    ],
)
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    """Catches tables made of another benchmark's numbers, or of an older format's."""
    file = tmp_path / "r.json"
    file.write_text(text)
    with pytest.raises(OptionError, match=r"Measure again"):
        read(LibrariesRun, file)


def a_contest() -> LibrariesRun:
    """Theirs 20 ms a token, ours 10, plain 15; one failed."""
    pairs = contestants(["transformers", "selfspec", "flashspec"], ["plain", "lookup"])
    full = {
        ("transformers", "plain"): 0.25,
        ("transformers", "lookup"): 0.3,
        ("selfspec", "lookup"): 0.2,
        ("selfspec", "plain"): 0.25,
    }
    run = LibrariesRun(PROVENANCE, "m", 1.0, 2, 4, 11, pairs, complete=True)
    run.answers = [
        Answer(*pair, question, 9, 0.1, seconds, 11)
        for question in range(3)
        for pair, seconds in full.items()
    ]
    run.failures = {"flashspec lookup": "no answer | in time"}
    return run


def test_peers_are_compared_by_method() -> None:
    """Catches ratios upside down, prefill in the decode time, and peers that fail or differ left
    out."""
    run = a_contest()
    run.answers[-3].difference = 4  # transformers' lookup, third question
    text = [" ".join(line.split()) for line in markdown(run).splitlines()]
    assert (
        "| transformers | 20.0 | 0.75 (0.75-0.75) | 2.00 (2.00-2.00) | 27.3 | - | NO, 1 of 3 "
        "differ |" in text
    )
    assert "| selfspec | 10.0 | 1.50 (1.50-1.50) | 1 | 18.2 | - | yes |" in text
    assert "| flashspec | - | - | - | - | - | failed: no answer / in time |" in text


def test_contestants_begin_with_the_reference() -> None:
    """Catches a contest in which nothing says what is right, and peers that cannot decode plainly
    counted as failures."""
    assert contestants(["selfspec", "flashspec"], ["lookup"]) == [
        ("transformers", "plain"),
        ("selfspec", "lookup"),
        ("flashspec", "lookup"),
    ]
    assert ("flashspec", "plain") not in contestants(
        ["transformers", "flashspec"], ["plain", "lookup"]
    )
    assert faster({1: (0.2, 10)}, {2: (0.1, 10)}) is None, "no question that both answered"
