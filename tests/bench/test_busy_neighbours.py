"""`scripts/bench neighbours`: neighbours are there while they are wanted and gone afterwards, and
what is told is the share of a contestant's own quiet speed."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from suite_world import PROVENANCE
from typer.testing import CliRunner

from benchmarks import neighbours
from benchmarks.neighbours import Beside, NeighboursRun, busy, tables
from selfspec.bench.schema import read
from selfspec.testing import tiny_llm, tiny_model, tiny_tokenizer


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """The processes that were started."""
    made: list[subprocess.Popen[bytes]] = []
    start: Callable[..., Any] = subprocess.Popen

    def noted(*words: Any, **options: Any) -> Any:
        process = start(*words, **options)
        made.extend([process] if neighbours.COUNTING in words[0] else [])
        return process

    monkeypatch.setattr(neighbours.subprocess, "Popen", noted)
    return made


def test_neighbours_are_gone_afterwards(started: list[subprocess.Popen[bytes]]) -> None:
    """A process that counts for ever after a failure; one that ended before it was wanted."""
    with pytest.raises(RuntimeError), busy(2):
        assert [each.poll() for each in started] == [None, None]
        raise RuntimeError
    assert len(started) == 2 and all(each.poll() is not None for each in started)
    with busy(0):
        assert len(started) == 2


def test_the_share_is_of_a_contestants_own_quiet_speed() -> None:
    """A share of another contestant's speed, or of seconds instead of speed."""
    rows = [
        Beside(0, {"one": [0.1, 0.1, 0.9], "other": [0.01] * 3}),
        Beside(2, {"one": [0.4] * 3, "other": [0.02] * 3}),
    ]
    text = tables(NeighboursRun(PROVENANCE, "demo", 48, rows))
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    assert ["one", "10", "2 (25%)"] in lines and ["other", "100", "50 (50%)"] in lines


@pytest.mark.skipif(tiny_llm().model.ops.kernel != "native", reason="kinds need our kernels")
def test_every_contestant_has_a_time_beside_every_number(
    tmp_path: Path, started: list[subprocess.Popen[bytes]]
) -> None:
    """A warm-up that counts; a row that was measured with another's neighbours."""
    tiny_model(hidden_size=64, intermediate_size=128).save_pretrained(tmp_path / "tiny")
    tiny_tokenizer().save_pretrained(tmp_path / "tiny")
    app = typer.Typer()
    app.command()(neighbours.neighbours)
    words = ["--model", tmp_path / "tiny", "--weights", "float32,int8", "--beside", "1"]
    words += ["--rounds", 2, "-n", 3, "--threads", 1, "--out", tmp_path / "n.json"]
    done = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    run = read(NeighboursRun, tmp_path / "n.json")
    assert run.complete and [row.neighbours for row in run.rows] == [0, 1]
    names = ["float32", "float32, auto", "int8", "int8, auto", "transformers"]
    for row in run.rows:
        assert list(row.seconds) == names and all(len(each) == 2 for each in row.seconds.values())
    assert len(started) == 3, "one in each round, the first included"
    assert "transformers" in done.output and "1 neighbours" in done.output
