"""The JSON of `selfspec bench`: what is written is read again whole, and other files are
refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from suite_world import SAMPLE, a_suite, the_sample

from selfspec.bench.schema import SuiteRun, read, write
from selfspec.errors import OptionError


def test_a_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Catches a nested row that comes back as a dict, and a field that is lost."""
    run = the_sample()
    write(run, tmp_path / "r.json")
    assert read(SuiteRun, tmp_path / "r.json") == run
    assert run.turns[0].decoded == 40 and run.turns[0].decode_seconds == pytest.approx(1.2)


def test_the_sample_is_this_schema() -> None:
    """Catches a field that was added without a new version: the committed sample, read by others,
    would be refused."""
    assert read(SuiteRun, SAMPLE) == the_sample(), (
        "write it anew: PYTHONPATH=src python tests/bench/suite_world.py"
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not a result"),
        ("[]", "reads"),
        ('{"kind": "spec", "schema_version": 2}', "reads"),
        ('{"kind": "suite", "schema_version": 2}', "the selfspec that wrote it"),
        ('{"kind": "suite", "schema_version": 1}', "damaged"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, text: str, words: str) -> None:
    """Catches tables made of another benchmark's numbers, of another version's, or of half a
    file."""
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(OptionError, match=words):
        read(SuiteRun, tmp_path / "r.json")
    with pytest.raises(OptionError, match="no result file"):
        read(SuiteRun, tmp_path / "none.json")


def test_a_damaged_row_is_refused(tmp_path: Path) -> None:
    """Catches a row with a field too few that fails somewhere in a table later."""
    data = a_suite().as_dict()
    del data["turns"][3]["made"]
    (tmp_path / "r.json").write_text(json.dumps(data))
    with pytest.raises(OptionError, match="damaged"):
        read(SuiteRun, tmp_path / "r.json")


def test_a_failure_is_the_engines_or_the_contestants_own() -> None:
    """Catches a contestant whose engine never started shown as if it had merely not been asked."""
    run = the_sample()
    assert run.failure("openvino/plain") == run.engines[-1].failure is not None
    assert run.failure("selfspec/auto") is None
    run.contestants[1].failure = "no answer"
    assert run.failure("selfspec/auto") == "no answer"
