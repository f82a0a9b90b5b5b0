"""`selfspec train --recipe draft-head`: what is asked for arrives, what belongs to another recipe
is refused, and a real run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import typer

from selfspec.cli.app import app
from selfspec.testing import tiny_model, tiny_tokenizer
from selfspec.train import part_run
from selfspec.train.draft_head import HeadRecipe
from selfspec.train.draft_lora import LoraRecipe
from selfspec.train.exit_adapter import AdapterRecipe
from selfspec.train.part_run import PartReport
from selfspec.train.parts import PartOptions
from selfspec.train.successors import CountOptions

COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
PARAMETERS = COMMANDS["train"].params


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the command asked the library for, instead of training."""
    seen: dict[str, Any] = {}

    def train(model: str, files: Any, out: Path, **given: Any) -> PartReport:
        seen.update(given, model=model, files=files, out=out)
        return PartReport("draft-head", out, True, 5, 100, 1.0, (0.5, 0.25))

    monkeypatch.setattr(part_run, "train_small_part", train)
    return seen


def command(run: Any, out: Path, *words: str) -> Any:
    return run(
        "train", "demo", "--recipe", "draft-head", "--data", "own.jsonl", "--out", str(out), *words
    )


def test_defaults_are_the_librarys(run: Any, asked: dict[str, Any], tmp_path: Path) -> None:
    """Layerskip's defaults reaching a part: one pass, a tenth of the learning rate."""
    shown = command(run, tmp_path)
    assert asked["recipe"] == HeadRecipe() and asked["options"] == PartOptions()
    assert not {"length", "held_out", "plot"} & set(asked), "the library's own defaults hold"
    assert "50.0%" in shown.stdout and "--draft draft-head" in shown.stdout


def test_every_setting_has_its_flag() -> None:
    """A new field of the library that nobody can reach from the command line."""
    flags = {each.name for each in PARAMETERS}
    for settings in (HeadRecipe, AdapterRecipe, LoraRecipe, PartOptions, CountOptions):
        assert {field.name for field in dataclasses.fields(settings)} <= flags
    assert {"length", "held_out", "states", "start_from", "plot"} <= flags


def test_flags_arrive(run: Any, asked: dict[str, Any], tmp_path: Path) -> None:
    """A flag that is parsed and forgotten."""
    words = "--layers 3,9 --vocabulary 50 --start random --ahead 2 --batch-tokens 99"
    words += " --others 0 --noise 0.2 --measured 7 --max-minutes 3 --share 0.5 --of-text 0.25"
    words += " --epochs 1 --learning-rate 0.01 --weight-decay 0 --seed 5 --precision bfloat16"
    words += " --save-every 9"
    command(
        run,
        tmp_path,
        *words.split(),
        "--states",
        "kept",
        "--start-from",
        "old",
        "--length",
        "99",
        "--held-out",
        "0.1",
    )
    assert asked["recipe"] == HeadRecipe((3, 9), 50, "random")
    assert asked["options"] == PartOptions(
        1.0, 0.01, 0.0, 99, 2, 0.5, 0.25, 0, 0.2, 5, "bfloat16", 9, 7, 3.0
    )
    assert (asked["length"], asked["held_out"], asked["states"], asked["start_from"]) == (
        99,
        0.1,
        Path("kept"),
        Path("old"),
    )


@pytest.mark.parametrize(
    "words",
    [
        "--dropout 0.1",
        "--preset code-7b",
        "--steps 4",
        "--no-packing",
        "--lora",
        "--score-blocks 3",
        "--variant LD",
    ],
)
def test_other_recipes_flags_are_refused(
    run: Any, asked: dict[str, Any], tmp_path: Path, words: str
) -> None:
    """A flag that does nothing, and a user who believes it did."""
    result = command(run, tmp_path, *words.split())
    assert (
        result.exit_code == 1
        and "would be ignored by --recipe draft-head" in result.stderr
        and not asked
    )
    result = run("train", "demo", "--data", "own.jsonl", "--out", str(tmp_path), "--noise", "0.1")
    said = "--noise would be ignored by --recipe layerskip; it belongs to draft-head, exit-adapter."
    assert result.exit_code == 1 and said in " ".join(result.stderr.split())


def test_a_real_run(run: Any, tmp_path: Path) -> None:
    """Progress, table, card and part of a run of a few steps, and a first piece that ends early."""
    tiny_model(seed=2).save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    lines = [
        json.dumps({"prompt_ids": [5, n], "response_ids": [7, 8, n, 9, 10, 11]})
        for n in range(3, 60)
    ]
    (tmp_path / "own.jsonl").write_text("\n".join(lines))
    words = [
        "train",
        str(tmp_path / "model"),
        "--recipe",
        "draft-head",
        "--data",
        str(tmp_path / "own.jsonl"),
    ]
    words += [
        "--out",
        str(tmp_path / "out"),
        "--layers",
        "1",
        "--vocabulary",
        "50",
        "--held-out",
        "0.3",
        "--save-every",
        "3",
    ]
    words += ["--no-plot", "--epochs", "4", "--batch-tokens", "128"]
    first = run(*words, "--max-minutes", "0.00001")
    assert "The time is up after" in first.stdout
    result = run(*words)
    assert "right " in result.stderr and "s left" in result.stderr
    assert "right, if those before were" in result.stdout
    facts = json.loads(run(*words, "--json").stdout)
    assert facts["done"] and facts["step"] == facts["log"][-1]["step"]
    assert "| 4 |" in (tmp_path / "out" / "README.md").read_text()


def test_successors_from_the_command_line(run: Any, tmp_path: Path) -> None:
    """A table that is counted and cannot be used, or flags of the head that are taken and
    forgotten."""
    tiny_model(seed=4).save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    lines = [
        {"prompt_ids": [5, each], "response_ids": [each + 1, 7, 8, each + 1, 7, 9]}
        for each in range(20, 60)
    ]
    (tmp_path / "own.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8"
    )
    words = [
        "train",
        str(tmp_path / "model"),
        "--recipe",
        "successors",
        "--data",
        str(tmp_path / "own.jsonl"),
    ]
    words += ["--out", str(tmp_path / "part"), "--held-out", "0.2"]
    shown = run(*words, "--pairs", "50")
    assert "--draft recycle --draft-option" in " ".join(shown.stdout.split()), shown.stderr
    facts = json.loads((tmp_path / "part" / "part.json").read_text(encoding="utf-8"))
    assert facts["facts"]["options"]["pairs"] == 50
    for extra, name in [
        (["--noise", "0.1"], "noise"),
        (["--epochs", "2"], "epochs"),
        (["--layers", "1"], "layers"),
    ]:
        said = run(*words, *extra)
        assert (
            said.exit_code == 1
            and f"--{name} would be ignored by --recipe successors" in " ".join(said.stderr.split())
        )
    head = run(
        "train",
        "demo",
        "--recipe",
        "draft-head",
        "--data",
        "x",
        "--out",
        str(tmp_path / "y"),
        "--pairs",
        "3",
    )
    assert head.exit_code == 1 and "--pairs would be ignored by --recipe draft-head" in " ".join(
        head.stderr.split()
    )
