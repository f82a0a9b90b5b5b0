"""Where a run was made: enough to repeat it, and nothing that is nobody's business."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from selfspec.bench.peer_host import package_versions
from selfspec.bench.provenance import gather, scrub, slug


@pytest.mark.parametrize(
    ("text", "scrubbed"),
    [
        ("/home/me/model", "<path>/"),
        ("cannot open '/home/me/a b/x.bin'", "cannot open '<path>/ b/x.bin'"),
        ("--out=/srv/x/y.json --quick", "--out=<path>/ --quick"),
        ("see https://example.org/a/b/c for more", "see https://example.org/a/b/c for more"),
        ("3/4 of src/selfspec/bench and / or", "3/4 of src/selfspec/bench and / or"),
    ],
)
def test_absolute_paths_are_taken_out(text: str, scrubbed: str) -> None:
    """Catches home folders in published results, and the mangling of what is no path of this
    machine."""
    assert scrub(text) == scrubbed


def test_a_run_can_be_repeated_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches missing thread settings (they change results by tens of percent), and settings that
    carry paths or secrets."""
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    monkeypatch.setenv("SELFSPEC_KERNEL", "plain")
    monkeypatch.setenv("SELFSPEC_CACHE", "/home/me/cache")
    monkeypatch.setenv("SOME_TOKEN", "secret")
    found = gather(
        "scripts/bench plain --model /home/me/model", threads=2, versions={"b": "2", "a": "1"}
    )
    assert (
        found.environment["OMP_WAIT_POLICY"] == "PASSIVE"
        and found.environment["SELFSPEC_KERNEL"] == "plain"
    )
    assert "SELFSPEC_CACHE" not in found.environment
    assert found.command == "scripts/bench plain --model <path>/"
    assert (
        list(found.versions) == ["a", "b"]
        and found.threads == 2
        and found.cores >= 1
        and found.memory_bytes > 2**20
    )
    text = json.dumps(asdict(found))
    assert "secret" not in text and "/home/me" not in text and str(Path.home()) + "/" not in text


def test_the_commit_is_this_checkouts() -> None:
    """Catches the commit of whatever folder the benchmark was called from. An installed wheel has
    none, and says so."""
    head = Path(__file__).resolve().parents[2] / ".git"
    found = gather("x", 1, {})
    assert (
        (found.commit is not None and len(found.commit) == 40)
        if head.exists()
        else found.commit is None
    )
    assert (found.uncommitted_changes is None) == (found.commit is None)


def test_versions_of_what_is_installed() -> None:
    """Catches a benchmark that dies because an optional package is missing."""
    assert package_versions(["pytest", "package-that-is-not-there"]) == {
        "pytest": pytest.__version__
    }


def test_names_for_files() -> None:
    """Catches blanks and trade marks in the names of result files."""
    assert slug("Intel(R) Xeon(R) CPU @ 2.20GHz") == "intel-xeon-cpu-2-20ghz"
