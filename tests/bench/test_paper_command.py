"""`scripts/bench paper`: a paper's table from the command line, as text, JSON and page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from benchmarks.paper.__main__ import paper
from selfspec.errors import SelfspecError
from selfspec.testing import tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model as the benchmark takes it."""
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


def run(*words: str) -> tuple[int, str]:
    """Exit status and output; an error for users as its message."""
    app = typer.Typer()
    app.command()(paper)
    done = CliRunner().invoke(app, list(words))
    if done.exception is not None and not isinstance(done.exception, SelfspecError | SystemExit):
        raise done.exception
    said = str(done.exception) if isinstance(done.exception, SelfspecError) else ""
    return done.exit_code, done.output + said


def test_a_table_is_printed_written_and_becomes_a_page(
    folder: Path, choices: Path, tmp_path: Path
) -> None:
    """The paper's figures beside ours, a last line of JSON, and the page of it; the warning about
    programs comes first."""
    out, page = tmp_path / "out.json", tmp_path / "out.html"
    words = ["layerskip-table1", "--model", str(folder), "--task", f"choices={choices}"]
    code, text = run(*words, "--threads", "1", "--out", str(out), "--report", str(page))
    assert code == 0
    row = next(line for line in text.splitlines() if line.startswith("| choices: BoolQ"))
    assert "77.4" in row and row.split("|")[-3].strip() != "-"
    assert (
        json.loads(text.splitlines()[-1])["file"] == "out.json" and "no security boundary" in text
    )
    assert "BoolQ" in page.read_text(encoding="utf-8")
    assert run("--show", str(out), "--report", str(tmp_path / "again.html"))[0] == 0
    assert (tmp_path / "again.html").read_text(encoding="utf-8") == page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["layerskip-tabel2"], "did you mean 'layerskip-table2'"),
        (["layerskip-table2", "--temperature", "0.5"], "No such option: --temperature"),
        (["dv-table3", "--methods", "ngram recycle"], "names one drafter"),
        (["dv-table3", "--methods", "ngram@adaptive"], "names one drafter"),
        (["asd-table1"], "needs files of yours; give --task text=FILE"),
        (["asd-table5", "--task", "xsum=x"], "does not ask the task 'xsum'"),
    ],
)
def test_refusals(folder: Path, tmp_path: Path, words: list[str], said: str) -> None:
    """Said before anything is measured; a setting that is silently ignored would be believed."""
    code, text = run(*words, "--model", str(folder), "--out", str(tmp_path / "out.json"))
    assert code in (1, 2) and said in text and not (tmp_path / "out.json").exists()


def test_all_tables_are_listed() -> None:
    """Nobody would find them."""
    listed = run("--list")[1]
    assert "layerskip-table2" in listed and "asd-table5" in listed
