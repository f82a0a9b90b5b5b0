"""`selfspec report`: a result becomes a page; what is no result is an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

SAMPLE = Path(__file__).parents[1] / "bench" / "suite-sample.json"


def test_a_result_becomes_a_page(run: Any, tmp_path: Path, opened: list[Any]) -> None:
    """Beside the result by default; no model is loaded for it."""
    copy = tmp_path / "run.json"
    copy.write_bytes(SAMPLE.read_bytes())
    assert run("report", str(copy)).exit_code == 0
    assert "Use auto" in (tmp_path / "run.html").read_text(encoding="utf-8")
    assert run("report", str(copy), "-o", str(tmp_path / "other.html")).exit_code == 0
    assert (tmp_path / "other.html").read_text(encoding="utf-8") == (
        tmp_path / "run.html"
    ).read_text(encoding="utf-8")
    assert not opened


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "no result file"),
        ("{", "is not a result"),
        ("[]", "kind None"),
        ('{"kind": "sweeps"}', "did you mean 'sweep'"),
        (json.dumps({"kind": "suite", "schema_version": 99}), "holds ('suite', 99)"),
        (json.dumps({"kind": "sweep", "schema_version": 99}), "holds ('sweep', 99)"),
    ],
)
def test_what_is_no_result(run: Any, tmp_path: Path, text: str | None, said: str) -> None:
    """A result of another version would be drawn with other columns' figures."""
    path = tmp_path / "run.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    done = run("report", str(path))
    assert done.exit_code == 1 and said in done.output and not (tmp_path / "run.html").exists()


def test_a_shown_result_becomes_a_page(run: Any, tmp_path: Path) -> None:
    """`--show FILE --report PAGE` measures nothing."""
    done = run("bench", "--show", str(SAMPLE), "--report", str(tmp_path / "page.html"))
    assert done.exit_code == 0 and "Use auto" in (tmp_path / "page.html").read_text(
        encoding="utf-8"
    )
