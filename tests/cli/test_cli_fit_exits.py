"""`selfspec fit-exits` on a tiny model: what it asks of the library, and what it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def words(folder: Path, *more: str) -> list[str]:
    prompts = folder / "prompts.jsonl"
    lines = [json.dumps({"question": f"number {each} of many"}) for each in range(60)]
    prompts.write_text("\n".join(lines) + "\n", encoding="utf-8")
    small = ["--samples", "500", "-n", "14", "--batch", "20", "--epochs", "3", "--hidden", "8"]
    return [
        "fit-exits",
        "demo",
        "--prompts",
        str(prompts),
        "--out",
        str(folder / "p"),
        *small,
        *more,
    ]


def test_it_fits_and_says_what_it_is_worth(run: Any, tmp_path: Path) -> None:
    """Options that do not arrive, tables without rows, a next step that does not work."""
    result = run(*words(tmp_path, "--candidates", "3", "--held-out", "0.3"))
    assert result.exit_code == 0
    said = " ".join(result.stdout.split())
    assert "answer there" in said and "Held-out text" in said and "the model's own" in said
    described = json.loads((tmp_path / "p/part.json").read_text())
    assert described["settings"]["candidates"] == 3 and described["settings"]["hidden"] == 8
    assert described["facts"]["options"]["held_out"] == 0.3
    drafting = run(
        "generate", "demo", "hello", "-n", "6", "--draft", "dynamic-exit",
        "--draft-option", f"part={tmp_path / 'p'}",
    )  # fmt: skip
    assert drafting.exit_code == 0
    again = run(*words(tmp_path, "--candidates", "3", "--held-out", "0.3", "--curve", "--json"))
    assert again.exit_code == 0, again.stderr
    found = json.loads(again.stdout)
    assert found["done"] and len(found["layers"]) == 3 and len(found["curve"]) == 5


def test_the_time_can_be_limited(run: Any, tmp_path: Path) -> None:
    """A job in pieces that does not say that it is not done."""
    said = run(*words(tmp_path, "--max-minutes", "0")).stdout
    assert "The time is up after 0 samples. The same command goes on." in said
    assert not (tmp_path / "p/part.json").exists()


def test_without_prompts_it_says_what_to_give(run: Any, tmp_path: Path) -> None:
    """Fitting to nothing."""
    result = run("fit-exits", "demo", "--out", str(tmp_path / "p"))
    assert result.exit_code == 1 and "--made-up" in result.stderr


def test_help_teaches(run: Any) -> None:
    """A page that names options and not what the command is for."""
    said = " ".join(run("fit-exits", "--help").stdout.split())
    for each in ("after which layer", "dynamic-exit", "selfspec.lossy.SpecEE", "Example:"):
        assert each in said
