"""`selfspec data` on a tiny model: what it asks of the library, and what it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


def prompts(folder: Path, count: int) -> str:
    path = folder / "prompts.jsonl"
    path.write_text(
        "".join(json.dumps({"question": f"number {each}"}) + "\n" for each in range(count)),
        encoding="utf-8",
    )
    return str(path)


def test_writes_and_goes_on(run: Any, tmp_path: Path) -> None:
    """Options that do not arrive, or a second run that begins anew."""
    words = [
        "data",
        "demo",
        "--prompts",
        prompts(tmp_path, 4),
        "--out",
        str(tmp_path / "own.jsonl"),
        "-n",
        "5",
        "--batch",
        "2",
    ]
    first = run(*words, "--limit", "3")
    assert first.exit_code == 0 and "3 answers with 15 tokens" in first.stdout
    found = json.loads(run(*words, "--json").stdout)
    assert (found["answers"], found["found"], found["tokens"]) == (1, 3, 5)
    lines = [
        json.loads(line)
        for line in (tmp_path / "own.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert [line["prompt"] for line in lines] == [f"number {each}" for each in range(4)]


def test_the_time_can_be_limited(run: Any, tmp_path: Path) -> None:
    """A job in pieces that does not say that it is not done."""
    words = [
        "data",
        "demo",
        "--prompts",
        prompts(tmp_path, 4),
        "--out",
        str(tmp_path / "own.jsonl"),
        "-n",
        "5",
        "--batch",
        "2",
    ]
    said = run(*words, "--max-minutes", "0")
    assert "2 answers" in said.stdout and "the same command goes on" in " ".join(
        said.stdout.split()
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "there is nothing to answer"),
        (["--made-up", "3", "--samples", "2"], "samples=2 greedy"),
        (["--prompts", "lost.jsonl"], "there is no file lost.jsonl"),
    ],
)
def test_bad_input(run: Any, tmp_path: Path, words: list[str], message: str) -> None:
    """A mistake that is found after the model was loaded, or not at all."""
    said = run("data", "demo", "--out", str(tmp_path / "own.jsonl"), *words)
    assert said.exit_code == 1 and message in " ".join(said.stderr.split())
