"""The list of mistakes that `scripts/mutate` makes is in step with the sources and the tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.mutations import Mutation, mutations

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("mutation", mutations(), ids=lambda each: each.name)
def test_each_line_is_where_it_is_said_to_be(mutation: Mutation) -> None:
    """A line that was rewritten, or a test that was moved: its mistake would not be made again."""
    source = (ROOT / mutation.file).read_text(encoding="utf-8")
    assert mutation.applied(source) != source
    assert all((ROOT / "tests" / test).is_file() for test in mutation.tests)


def test_there_are_sixty() -> None:
    """A list that shrinks unseen, or names a mistake twice."""
    names = [each.name for each in mutations()]
    assert len(names) >= 60 and len(set(names)) == len(names)
