"""`selfspec inspect` and `selfspec sweep`: what is asked for arrives, what came out is shown and
written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from selfspec import LLM
from selfspec.bench.layers import look
from selfspec.cli.inspect import changes, strip

SWEEP = ["sweep", "demo", "--parts", "grid", "--exits", "1,3", "--drafts", "2", "-n", "4"]


def test_inspect_prints_a_row_a_position(run: Any, llm: LLM, opened: list[Any]) -> None:
    """The last positions of prompt and continuation, each with a strip as long as the model is
    deep."""
    done = run("inspect", "demo", "some text", "--last", "6", "-n", "3")
    assert done.exit_code == 0 and opened[0][0] == "demo"
    rows = done.output.splitlines()
    assert (
        rows[0].split()[:2] == ["read", "exits"]
        and len(rows[1:7]) == 6
        and "cosine similarity" in rows[7]
    )
    assert "settles at exit" in done.output
    view = look(llm, "some text", 6, 3)
    for line, position in zip(rows[1:7], view.positions, strict=True):
        assert strip(position).plain in line


def test_inspect_writes_page_picture_and_json(run: Any, tmp_path: Path) -> None:
    """All three at once, and the JSON is one object."""
    words = ["--html", str(tmp_path / "a.html"), "--png", str(tmp_path / "a.png"), "--json"]
    done = run("inspect", "demo", "some text", *words)
    assert json.loads(done.stdout)["kind"] == "inspect"
    assert (
        "</html>" in (tmp_path / "a.html").read_text(encoding="utf-8")
        and (tmp_path / "a.png").exists()
    )


def test_a_deep_models_strip_fits_and_ends_with_the_last_layer(llm: LLM) -> None:
    """80 marks do not fit into a line; the last exit must stay."""
    from dataclasses import replace

    position = look(llm, "abc").positions[0]
    deep = replace(
        position, choices=(1,) * 79 + (2,), chances=(0.9,) * 80, guesses=("x",) * 79 + ("y",)
    )
    assert strip(deep).plain == "·" * 39 + "█"
    assert changes(deep) == "x 1-79"


def test_a_picture_of_an_unknown_kind(run: Any, opened: list[Any], tmp_path: Path) -> None:
    """Said before the model is loaded."""
    done = run("inspect", "demo", "text", "--png", str(tmp_path / "a.doc"))
    assert done.exit_code == 1 and ".png" in done.output and not opened


def test_sweep_measures_shows_and_goes_on(run: Any, tmp_path: Path) -> None:
    """The second call finds everything done; --show needs no model."""
    out = tmp_path / "sweep.json"
    done = run(*SWEEP, "--out", str(out))
    assert (
        done.exit_code == 0
        and "groups to measure, about" in done.output
        and "Best: exit" in done.output
    )
    assert out.with_suffix(".png").exists()
    before = out.read_text(encoding="utf-8")
    again = run(*SWEEP, "--out", str(out), "--no-plot")
    assert "groups to measure" not in again.output and out.read_text(encoding="utf-8") == before
    shown = run("sweep", "--show", str(out), "--no-plot")
    assert shown.output == again.output
    json.loads(before)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--parts", "gird"], "did you mean 'grid'"),
        (["--exits", "9"], "--exits 9"),
        (["--exits", "one"], "not a list of whole numbers"),
        (["-n", "600"], "leave no room"),
        (["--questions", "nothing.jsonl"], "no file"),
    ],
)
def test_sweep_refuses(run: Any, tmp_path: Path, words: list[str], said: str) -> None:
    """And leaves no file."""
    done = run("sweep", "demo", *words, "--out", str(tmp_path / "sweep.json"))
    assert done.exit_code == 1 and said in done.output and not list(tmp_path.iterdir())
