"""What is said of every causal type: the page shows the file, and the file knows the table."""

from __future__ import annotations

import tomllib
from importlib.metadata import version

from benchmarks.coverage import (
    OLDEST,
    PAGE,
    PATHS,
    RESULT,
    ROOT,
    counts,
    stored,
    tried,
    types,
    with_table,
)
from selfspec.model.families import FAMILIES


def test_the_page_shows_the_file() -> None:
    """A table that was edited by hand, or a run whose page was not committed."""
    page, found, oldest = PAGE.read_text(encoding="utf-8"), stored(), stored(OLDEST)
    assert with_table(page, found, oldest) == page, f"{PAGE.name} is not made from {RESULT.name}"
    for each in (found, oldest):
        assert each["counts"] == counts(each["types"])


def test_the_file_knows_every_type_and_every_family() -> None:
    """A family that joined the table and is still listed as run another way."""
    found = {each["type"]: each for each in stored()["types"]}
    native = {name for name, each in found.items() if each["path"] == "native"}
    others = {"gemma4_text"}  # whose tiny model has more embeddings
    assert set(FAMILIES) & set(found) <= native | others
    assert {each["path"] for each in found.values()} <= set(PATHS)
    if stored()["transformers"] == version("transformers"):
        assert list(found) == types()


def test_the_oldest_version_is_the_one_that_we_allow() -> None:
    """A lower bound that was raised while the file still speaks of the version before."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    allowed = next(each for each in project["dependencies"] if each.startswith("transformers"))
    assert allowed.startswith(f"transformers>={stored(OLDEST)['transformers'].removesuffix('.0')}")


def test_no_type_ends_in_a_stray_exception_and_enough_are_exact() -> None:
    """A RuntimeError out of a model's insides is no answer to who asks for that model."""
    for found in (stored(), stored(OLDEST)):
        assert not [each["type"] for each in found["types"] if each["raw"]]
        assert all(each["reason"] for each in found["types"] if not each["exact"])
    assert stored()["counts"]["exact"] >= 150


def test_a_type_is_tried_as_the_file_says(monkeypatch) -> None:
    """A file that was never made by this code; and a difference that the code would not see."""
    found = {each["type"]: each for each in stored()["types"]}
    ours = tried("ctrl")
    assert (ours.path, ours.exact) == (found["ctrl"]["path"], True) == ("floor", True)
    from selfspec.model.pasts import Past

    monkeypatch.setattr(Past, "_return_to", lambda self, first: None)
    assert not tried("ctrl").exact
