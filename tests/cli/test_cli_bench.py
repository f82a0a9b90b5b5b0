"""`selfspec bench`: what is typed becomes a run, tables and a last line of JSON; bad input is a
message before anything loads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from selfspec.bench import suite_run
from selfspec.bench.peers import find_peers
from selfspec.bench.schema import SuiteRun, read
from selfspec.cli.app import app
from selfspec.cli.bench import command_line
from selfspec.errors import OptionError
from selfspec.testing import tiny_model, tiny_tokenizer

FAKE = """
class Peer:
    packages = ()
    methods = {"plain": (), "other": ("tokens",)}
    def load(self, folder, dtype, threads):
        pass
    def generate(self, ids, max_new_tokens, eos, method="plain", tokens=0):
        self.first(1)
        return [5] * max_new_tokens
"""
Bench = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model's folder, such as peers load."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def bench(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Runs the command on a tiny model with a few questions; `fake` is an engine that writes only
    5s."""
    (tmp_path / "peers" / "fake").mkdir(parents=True)
    (tmp_path / "peers" / "fake" / "peer.py").write_text(FAKE)
    monkeypatch.setattr(suite_run, "find_peers", lambda: find_peers(tmp_path / "peers"))
    lines = [{"prompt": f"once upon a time {n}", "category": "tale"} for n in range(3)]
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, lines)))

    def run(*words: str) -> tuple[int, str]:
        done = CliRunner().invoke(
            app,
            [
                "bench",
                str(model),
                "--task",
                f"jsonl={tmp_path / 'q.jsonl'}",
                "-n",
                "10",
                "--raw",
                *words,
            ],
        )
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return done.exit_code, done.output

    return run


def test_a_run_of_everything(bench: Bench, tmp_path: Path, model: Path) -> None:
    """Catches parts that do not fit together: real processes, a table, the JSON, going on, and
    drawing it."""
    out = tmp_path / "r.json"
    words = [
        "--methods",
        "ngram early-exit:layer=2@fixed:tokens=3",
        "--peers",
        "fake",
        "--out",
        str(out),
    ]
    words += ["--batches", "1,2", "--threads", "1", "--costs", "--sample", "2"]
    code, text = bench(*words)
    assert code == 0, text
    run = read(SuiteRun, out)
    assert run.complete and json.loads(text.splitlines()[-1]) == {
        "file": "r.json",
        "turns": len(run.turns),
        "complete": True,
    }
    for name in ("selfspec/ngram", "selfspec/early-exit:layer=2@fixed:tokens=3"):
        mine = [turn for turn in run.turns if turn.contestant == name]
        assert [turn.batch for turn in mine] == [1, 1, 2], name
        assert not any(turn.differences for turn in mine), (
            f"{name} wrote something else than our plain decoding"
        )
        assert all(turn.first_seconds and turn.seconds > 0 for turn in mine)
    early = next(turn for turn in run.turns if turn.contestant.startswith("selfspec/early"))
    assert (
        early.counts is not None
        and early.counts.drafted
        and sum(early.counts.verified) == early.counts.verifications
    )
    assert run.failure("fake/plain") == "NotImplementedError: this peer takes one prompt at a time"
    assert {point.kind for point in run.steps} >= {"verify", "early-exit:layer=2@fixed:tokens=3"}
    assert (
        str(tmp_path) not in out.read_text() and "jsonl=q.jsonl" not in text
    ) or "q.jsonl" in text
    code, again = bench(*words)
    assert (
        code == 0
        and "is complete: nothing to measure" in again
        and len(read(SuiteRun, out).turns) == len(run.turns)
    )
    assert "| contestant" in CliRunner().invoke(app, ["bench", "--show", str(out)]).output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--methods", "ngrm"], "ngram"),
        (["--peers", "transfomers"], "did you mean 'transformers'"),
        (["--peers", "fake/othr"], "did you mean 'other'"),
        (["--task", "gsm=x"], "did you mean 'gsm8k'"),
        (["--batches", "4"], "needs 4 questions a task and tale has 3"),
        (["--batches", "0"], "at least 1 row"),
        (["--rounds", "0"], "nothing would be measured"),
        (["-n", "1"], "at least 2"),
        (["--contexts", "x"], "--contexts"),
    ],
)
def test_bad_input_is_a_message(bench: Bench, tmp_path: Path, words: list[str], said: str) -> None:
    """Catches an error that comes after minutes of loading, or as a traceback."""
    code, text = bench(*words, "--out", str(tmp_path / "r.json"))
    assert code == 1 and said in " ".join(text.split()) and not (tmp_path / "r.json").exists()


def test_nothing_to_ask_is_a_message(tmp_path: Path, model: Path) -> None:
    """Catches an empty table where no task was named, and a model that is none."""
    done = CliRunner().invoke(app, ["bench", str(model)])
    assert done.exit_code == 1 and "--task" in done.output
    done = CliRunner().invoke(app, ["bench", "no-model", "--task", "nothing"])
    assert done.exit_code == 1 and "no task 'nothing'" in done.output, "before a model is opened"
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n')
    done = CliRunner().invoke(app, ["bench", str(tmp_path), "--task", f"jsonl={tmp_path}/a.jsonl"])
    assert done.exit_code == 1 and "has no config.json" in " ".join(done.output.split())
    with pytest.raises(OptionError, match="two tasks are called 'x'"):
        for name in ("x.jsonl", "y.jsonl"):
            (tmp_path / name).write_text('{"prompt": "a", "category": "x"}\n')
        tasks = tuple(f"jsonl={tmp_path / name}" for name in ("x.jsonl", "y.jsonl"))
        suite_run.read_tasks(suite_run.Wishes(task=tasks))


def test_the_command_is_written_without_paths() -> None:
    """Catches somebody's folders in a published result."""
    typed = [
        "bench",
        "/home/me/model",
        "--task",
        "gsm8k=/data/g/test.jsonl",
        "--sample",
        "5",
        "--methods",
        "auto ngram",
    ]
    line = command_line(typed, ["/home/me/model", "gsm8k=/data/g/test.jsonl"])
    assert line == "selfspec bench model --task gsm8k=test.jsonl --sample 5 --methods 'auto ngram'"


def test_the_list_names_everything() -> None:
    """Catches a task, an engine or a method that nobody would find."""
    text = CliRunner().invoke(app, ["bench", "--list"]).output
    for word in (
        "spec-bench",
        "humaneval",
        "long",
        "transformers",
        "lookup(tokens)",
        "selfspec drafters",
    ):
        assert word in text
