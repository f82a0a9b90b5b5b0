"""The result file: nothing lost, nothing half written, nothing misread."""

from __future__ import annotations

import errno
import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.plain.results import CostCard, PeerRow, PlainRun, VerifyPoint
from selfspec.bench.schema import Provenance, read, write
from selfspec.errors import OptionError, ResourceError

PROVENANCE = Provenance(
    command="scripts/bench plain",
    date="2030-01-01T00:00:00+00:00",
    commit="0" * 40,
    uncommitted_changes=False,
    cpu="Some CPU",
    cores=2,
    threads=2,
    memory_bytes=1,
    system="Linux x86_64",
    python="3.11",
    versions={"torch": "2.13"},
    environment={},
)


def a_run() -> PlainRun:
    return PlainRun(
        PROVENANCE,
        model="demo",
        dtype="float32",
        reference="transformers",
        rounds=2,
        peers=[
            PeerRow("transformers", 64, 8, [0.1, 0.2], [0.8, None], True, None),
            PeerRow("other", 64, 8, failure="fell over"),
        ],
        costs={"selfspec": CostCard(100, {"sum": [1e9, 2e9]}, [0.01], [0.02], 64)},
        verify=[VerifyPoint(64, 1, [0.1]), VerifyPoint(64, 8, [0.12])],
        notes=["a note"],
        complete=True,
    )


def test_a_run_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    """Catches a field that is not written, not read, or comes back as a plain dict."""
    write(a_run(), tmp_path / "new" / "run.json")
    assert read(PlainRun, tmp_path / "new" / "run.json") == a_run()


@pytest.mark.parametrize("version", [0, 3, "2", None])
def test_another_schema_version_is_refused(tmp_path: Path, version: object) -> None:
    """Catches fields of an older or newer file being read as if they meant the same."""
    path = tmp_path / "run.json"
    write(a_run(), path)
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema_version": version}))
    words = re.escape(f"holds {('plain', version)}, and this selfspec reads ('plain', 2)")
    with pytest.raises(OptionError, match=words):
        read(PlainRun, path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a result"),
        ("[]", "holds None"),
        (json.dumps({"schema_version": 1, "kind": "tasks"}), "holds \\('tasks', 1\\)"),
        (json.dumps({"schema_version": 2, "kind": "plain"}), "damaged"),
        (json.dumps({"schema_version": 2, "kind": "plain", "provenance": {"cpu": "x"}}), "damaged"),
    ],
)
def test_a_damaged_file_is_an_error_that_names_it(tmp_path: Path, text: str, message: str) -> None:
    """Catches a traceback, or a half-empty table, out of a file that is not what it should be."""
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(OptionError, match=message) as caught:
        read(PlainRun, path)
    assert "run.json" in str(caught.value)


def test_a_missing_file_says_how_to_make_one(tmp_path: Path) -> None:
    """Catches a bare FileNotFoundError."""
    with pytest.raises(OptionError, match="scripts/bench plain"):
        read(PlainRun, tmp_path / "none.json")


def test_a_full_disk_keeps_the_earlier_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches writing in place: when the disk fills up, what was saved a round ago must still be
    whole."""
    path = tmp_path / "run.json"
    write(a_run(), path)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ResourceError, match="name another place"):
        write(replace(a_run(), model="later"), path)
    assert read(PlainRun, path) == a_run()
    assert [file.name for file in tmp_path.iterdir()] == ["run.json"], (
        "the half-written file must not stay behind"
    )


def test_a_kill_while_writing_keeps_the_earlier_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a rename before the bytes are out: whatever interrupts the write, the old result is
    whole."""
    path = tmp_path / "run.json"
    write(a_run(), path)

    def interrupted(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(replace(a_run(), model="later"), path)
    assert read(PlainRun, path) == a_run()


def test_what_is_not_a_number_is_not_written(tmp_path: Path) -> None:
    """Catches NaN and Infinity, which Python writes and no other JSON reader takes."""
    run = a_run()
    run.peers[0].full = [float("nan")]
    with pytest.raises(ValueError, match="JSON"):
        write(run, tmp_path / "run.json")
    assert not (tmp_path / "run.json").exists()
