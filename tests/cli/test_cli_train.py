"""`selfspec train` and `selfspec exits`: what is asked for arrives, and what came out is shown."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import typer

from selfspec.cli.app import app
from selfspec.cli.exits import table
from selfspec.cli.train import losses
from selfspec.testing import tiny_model, tiny_tokenizer
from selfspec.train import run as training
from selfspec.train.data import DataOptions
from selfspec.train.evaluate import ExitScore
from selfspec.train.lora import Lora
from selfspec.train.recipe import Recipe
from selfspec.train.run import Report, TrainOptions

COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
PARAMETERS = COMMANDS["train"].params


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.jsonl"
    path.write_text(
        "\n".join(json.dumps({"text": f"line {n} of some text"}) for n in range(60)),
        encoding="utf-8",
    )
    return str(path)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """What the command asked the library for, instead of training."""
    seen: dict[str, Any] = {}

    def train(model: str, files: Any, out: Path, **given: Any) -> Report:
        seen.update(given, model=model, files=files, out=out)
        return Report(
            model,
            out,
            5,
            100,
            1.0,
            {"before": [ExitScore(1, 2.0, 0.25)], "after": [ExitScore(1, 1.0, 0.75)]},
        )

    monkeypatch.setattr(training, "train", train)
    return seen


def test_defaults_are_the_librarys(
    run: Any, asked: dict[str, Any], text: str, tmp_path: Path
) -> None:
    """A default written twice that differs: the command line would train something else than
    Python."""
    run("train", "demo", "--data", text, "--out", str(tmp_path / "out"))
    assert (
        asked["recipe"] == Recipe()
        and asked["options"] == TrainOptions()
        and asked["data"] == DataOptions()
    )
    assert asked["lora"] is None and asked["model"] == "demo" and asked["out"] == tmp_path / "out"
    run("train", "demo", "--data", text, "--out", str(tmp_path / "out"), "--lora")
    assert asked["lora"] == Lora()


def test_every_setting_has_its_flag() -> None:
    """A new field of the library that nobody can reach from the command line."""
    flags = {each.name for each in PARAMETERS}
    for settings in (Recipe, TrainOptions, DataOptions):
        assert {field.name for field in dataclasses.fields(settings)} <= flags
    assert {f"lora_{field.name}" for field in dataclasses.fields(Lora)} <= flags


def test_flags_arrive(run: Any, asked: dict[str, Any], text: str, tmp_path: Path) -> None:
    """A flag that is parsed and forgotten, and a preset whose numbers or learning rate are not
    those of its variant."""
    words = "--preset scratch-7b --exit-scale 0.5 --exits 1-2,4 --exit-others 5"
    words += " --steps 7 --length 64 --seed 3 --lora --lora-rank 4 --lora-modules q_proj"
    run("train", "demo", "--data", text, "--data", text, "--out", str(tmp_path), *words.split())
    assert asked["recipe"] == Recipe(
        dropout=0.2,
        dropout_time="exponential",
        exit_scale=0.5,
        rotation=31,
        exits=(1, 2, 4),
        exit_others=5,
    )
    assert (asked["options"].steps, asked["options"].learning_rate, asked["options"].seed) == (
        7,
        8e-4,
        3,
    )
    assert asked["data"] == DataOptions(length=64, seed=3) and len(asked["files"]) == 2
    assert asked["lora"] == Lora(rank=4, modules=("q_proj",))
    run(
        "train",
        "demo",
        "--data",
        text,
        "--out",
        str(tmp_path),
        "--preset",
        "scratch-7b",
        "--variant",
        "EE",
    )
    assert asked["recipe"].dropout == 0 and asked["options"].learning_rate == 3e-4
    run(
        "train",
        "demo",
        "--data",
        text,
        "--out",
        str(tmp_path),
        "--preset",
        "scratch-7b",
        "--learning-rate",
        "0.1",
    )
    assert asked["options"].learning_rate == 0.1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--recipe layerskp", "did you mean 'layerskip'"),
        ("--variant LS", "variant 'LS' is not known"),
        ("--preset code", "did you mean 'code-7b'"),
        ("--precision half", "precision='half'"),
        ("--dropout 2", "outside 0 to 1"),
        ("--exits 8;15", "not a list of whole numbers"),
        ("--lora-rank 4", "--lora-rank would be ignored without --lora"),
    ],
)
def test_wrong_words_are_one_message(
    run: Any, asked: dict[str, Any], text: str, tmp_path: Path, words: str, said: str
) -> None:
    """A traceback for a typing mistake, or a run that starts anyway."""
    result = run("train", "demo", "--data", text, "--out", str(tmp_path), *words.split())
    assert result.exit_code == 1 and said in result.stderr and not asked


def test_a_real_run(run: Any, text: str, tmp_path: Path) -> None:
    """Progress, table, report and folder of a run of a few steps; a second time it has nothing left
    to do and says the same."""
    tiny_model(seed=2).save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    words = [
        "train",
        str(tmp_path / "model"),
        "--data",
        text,
        "--out",
        str(tmp_path / "out"),
        "--steps",
        "4",
        "--log-every",
        "2",
    ]
    words += ["--length", "32", "--no-plot", "--score-blocks", "1"]
    result = run(*words)
    assert "step 2 of 4" in result.stderr and "exit 4" in result.stderr
    assert (
        "agreement before" in result.stdout
        and "100.0%" in result.stdout
        and "draft early-exit" in result.stdout
    )
    facts = json.loads(run(*words, "--json").stdout)
    assert facts["steps"] == 4 and len(facts["log"]) == 2
    assert json.loads((tmp_path / "out" / "training.json").read_text())["exits"] == facts["exits"]


def test_exits_are_measured(run: Any, text: str, tmp_path: Path) -> None:
    """Another split than training's, or a table without the whole model as its last row."""
    shown = run(
        "exits",
        "demo",
        "--data",
        text,
        "--length",
        "32",
        "--held-out",
        "0.5",
        "--score-blocks",
        "2",
    )
    lines = [line.split() for line in shown.stdout.splitlines()]
    assert [line[0] for line in lines[1:]] == ["1", "2", "3", "4"] and lines[4][1] == "100.0%"
    facts = json.loads(run("exits", "demo", "--data", text, "--length", "32", "--json").stdout)
    assert [each["layers"] for each in facts["exits"]] == [1, 2, 3, 4]


def test_the_line_of_losses_is_short() -> None:
    """Thirty exits in one line cannot be read; the last layer's loss must be among those shown."""
    line = losses(2.0, {layer: float(layer) for layer in range(1, 31)})
    assert (
        line.startswith("loss 2.000 · exit 1 1.00")
        and line.endswith("exit 30 30.00")
        and line.count("exit") == 5
    )
    assert losses(1.5, {}) == "loss 1.500"
    grid = table({"before": [ExitScore(2, 0.0, 0.5)], "after": [ExitScore(2, 0.0, 0.25)]})
    assert [list(column.cells) for column in grid.columns] == [
        ["2"],
        ["50.0%"],
        ["1.00"],
        ["25.0%"],
        ["1.00"],
    ]
