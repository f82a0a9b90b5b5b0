"""`selfspec bench --paper` and `--report`: a paper's table from the command line, and results as
pages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from selfspec.testing import tiny_model, tiny_tokenizer

SAMPLE = Path(__file__).parents[1] / "bench" / "suite-sample.json"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model as `selfspec bench` takes it."""
    found = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model().save_pretrained(found)
    tiny_tokenizer().save_pretrained(found)
    return found


@pytest.fixture
def choices(tmp_path: Path) -> Path:
    path = tmp_path / "BoolQ.jsonl"
    rows = [
        {"question": f"is it {number}?", "choices": ["yes", "no"], "answer": "no"}
        for number in range(3)
    ]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def test_a_table_is_printed_written_and_becomes_a_page(
    run: Any, folder: Path, choices: Path, tmp_path: Path
) -> None:
    """The paper's figures beside ours, a last line of JSON, and the page of it; the warning about
    programs comes first."""
    out, page = tmp_path / "out.json", tmp_path / "out.html"
    words = ["--paper", "layerskip-table1", "--task", f"choices={choices}", "--threads", "1"]
    done = run("bench", str(folder), *words, "--out", str(out), "--report", str(page))
    assert done.exit_code == 0
    row = next(line for line in done.output.splitlines() if line.startswith("| choices: BoolQ"))
    assert "77.4" in row and row.split("|")[-3].strip() != "-"
    assert (
        json.loads(done.output.splitlines()[-2])["file"] == "out.json"
        and "no security boundary" in done.output
    )
    assert "BoolQ" in page.read_text(encoding="utf-8")
    assert run("report", str(out), "-o", str(tmp_path / "again.html")).exit_code == 0
    assert (tmp_path / "again.html").read_text(encoding="utf-8") == page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--paper", "layerskip-tabel2"], "did you mean 'layerskip-table2'"),
        (
            ["--paper", "layerskip-table2", "--temperature", "0.5"],
            "--temperature is the table's business",
        ),
        (["--paper", "dv-table3", "--methods", "ngram recycle"], "names one drafter"),
        (["--paper", "dv-table3", "--methods", "ngram@adaptive"], "names one drafter"),
        (["--paper", "asd-table1"], "needs files of yours; give --task text=FILE"),
        (["--paper", "asd-table5", "--task", "xsum=x"], "does not ask the task 'xsum'"),
    ],
)
def test_refusals(run: Any, folder: Path, tmp_path: Path, words: list[str], said: str) -> None:
    """Said before anything is measured; a setting that is silently ignored would be believed."""
    done = run("bench", str(folder), *words, "--out", str(tmp_path / "out.json"))
    assert done.exit_code == 1 and said in done.output and not (tmp_path / "out.json").exists()


def test_all_tables_are_listed(run: Any) -> None:
    """Nobody would find them."""
    listed = run("bench", "--list").output
    assert (
        "layerskip-table2" in listed
        and "asd-table5" in listed
        and "ROUGE" not in listed.partition("Paper tables")[0]
    )


def test_a_shown_result_becomes_a_page(run: Any, tmp_path: Path) -> None:
    """`--show FILE --report PAGE` measures nothing."""
    done = run("bench", "--show", str(SAMPLE), "--report", str(tmp_path / "page.html"))
    assert done.exit_code == 0 and "Use auto" in (tmp_path / "page.html").read_text(
        encoding="utf-8"
    )
