"""`selfspec bench-serve` against a real server, and `scripts/bench served` in small."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from benchmarks import served
from selfspec import LLM
from selfspec.bench.schema import read
from selfspec.bench.serving import ServeRun, percentile, prompts
from selfspec.cli.app import app


def test_percentiles_are_values_that_were_measured() -> None:
    """A percentile between two measured values, or one place too far."""
    values = [float(each) for each in range(100, 0, -1)]
    assert [percentile(values, each) for each in (50, 90, 99)] == [50, 90, 99]
    assert percentile([3.0], 99) == 3.0 and percentile([], 50) is None


def test_questions_differ() -> None:
    """Questions that a server knows from the one before are no load."""
    made = prompts(40, 12)
    assert len(set(made)) == 40 and all(len(each.split()) == 12 + 6 for each in made)


def test_callers_count_what_the_server_counts(client: httpx.Client, tmp_path: Path) -> None:
    """Tokens that are chunks, failures that are left out, a file that cannot be read again."""
    file = tmp_path / "load.json"
    words = ["bench-serve", str(client.base_url), "--callers", "1,3", "--requests", "2",
             "--max-tokens", "6", "--prompt-words", "4", "--field", "ignore_eos=true"]  # fmt: skip
    found = CliRunner().invoke(app, [*words, "--out", str(file)])
    assert found.exit_code == 0, found.output
    run = read(ServeRun, file)
    assert [(each.callers, len(each.asked)) for each in run.crowds] == [(1, 2), (3, 6)]
    assert all(each.tokens == 6 for crowd in run.crowds for each in crowd.served)
    assert all(len(crowd.served) == len(crowd.asked) for crowd in run.crowds)
    assert str(tmp_path) not in file.read_text(encoding="utf-8")
    shown = CliRunner().invoke(app, ["bench-serve", "--show", str(file)])
    assert "| 3       |" in shown.output and "6/6" in shown.output, shown.output
    bad = CliRunner().invoke(app, [*words, "--field", "temprature=1"])
    assert "0/2" in bad.output and "did you mean 'temperature'" in bad.output


def test_a_server_that_is_not_there_is_one_message() -> None:
    """A traceback of the client's library."""
    found = CliRunner().invoke(app, ["bench-serve", "http://127.0.0.1:9"])
    assert found.exit_code == 1 and "names no model" in found.output


@pytest.mark.parametrize("broken", [False, True], ids=["right", "wrong"])
def test_exactness_is_counted(llm: LLM, broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison that finds nothing because it compares nothing."""
    if broken:
        own = served.alone
        monkeypatch.setattr(served, "alone", lambda *given: [(0, 0.0), *own(*given)[1:]])
    found = served.tally(llm, "float32", 20, seed=3)
    assert found.requests == 20 == found.finished + found.left and found.tokens > 50
    assert (found.differing > 10) if broken else (found.differing == 0)


def test_the_committed_count_is_whole() -> None:
    """A result that says less than the page promises."""
    file = Path(__file__).resolve().parents[2] / "benchmarks/results/served-amd-epyc.json"
    run = read(served.ServedRun, file)
    assert run.complete and {each.weights for each in run.tallies} == set(served.WEIGHTS)
    assert sum(each.requests for each in run.tallies) >= 2000
    assert [each.differing for each in run.tallies] == [0, 0]
    assert "differing" in served.markdown(run)


def test_a_chunk_without_text_is_no_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first token that is the role: a time that no reader has seen."""
    from selfspec.bench import serving

    def chunk(**choice: Any) -> bool:
        line = "data: " + json.dumps({"choices": [choice]})
        return any(serving._says(each) for each in serving._chunk(line)["choices"])

    assert not chunk(delta={"role": "assistant", "content": ""}) and not chunk(delta={})
    assert chunk(delta={"content": "x"}) and chunk(text="x")
    assert serving._chunk("data: [DONE]") == {} == serving._chunk(": ping")
