"""`scripts/bench against_transformers`: it must find a model that says something else here, and
call a tie a tie."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from benchmarks import against_transformers
from selfspec.errors import SelfCheckFailed
from selfspec.testing import tiny_model, tiny_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model("llama").save_pretrained(tmp_path / "tiny")
    tiny_tokenizer().save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def run(*arguments: str):
    app = typer.Typer()
    app.command()(against_transformers.against_transformers)
    return CliRunner().invoke(
        app, [*arguments, "--lengths", "30,50", "--max-new-tokens", "12", "--rounds", "1"]
    )


def test_a_model_that_is_the_same(folder: Path) -> None:
    """Lengths, ways to write or provenance lost; a text cut short and called the same."""
    found = run(str(folder), "--out", str(folder / "out.json"))
    assert found.exit_code == 0, found.output
    result = json.loads((folder / "out.json").read_text())
    assert [row["prompt_tokens"] for row in result["rows"]] == [30, 50]
    for row in result["rows"]:
        assert (
            row["logits"]["gap"] < 1e-4
            and row["logits"]["same_argmax"] == 1
            and row["logits"]["largest"] > 1
        )
        assert list(row["texts"]) == [
            "transformers",
            "selfspec",
            "selfspec, ngram",
            "selfspec, auto",
        ]
        assert all(
            text["first_difference"] is None and text["seconds"] for text in row["texts"].values()
        )
    assert result["model"]["family"] == "llama" and result["provenance"]["command"].startswith(
        "scripts/bench against_transformers"
    )
    assert json.loads(found.stdout.splitlines()[-1])["wrong_texts"] == 0


def test_a_model_that_is_not(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A difference that is reported and then forgotten, so that a script passes."""
    generate = against_transformers.LLM.generate

    def wrong(self, prompt, **options):
        result = generate(self, prompt, **options)
        if options["draft"] == "ngram":
            result.tokens[5] = (result.tokens[5] + 1) % 259
        return result

    monkeypatch.setattr(against_transformers.LLM, "generate", wrong)
    found = run(str(folder))
    assert isinstance(found.exception, SelfCheckFailed) and "2 texts differ" in str(found.exception)
    assert "differs at 5, best logits" in found.output and found.output.count("the same text") == 6


def test_the_gap_is_that_of_the_place_where_texts_part() -> None:
    """The gap of another position, or of our logits instead of transformers': a bug called a
    tie."""
    model, ids = tiny_model("llama"), [5, 6, 7]
    expected = [9, 8, 7, 6]
    with torch.inference_mode():
        best = model(input_ids=torch.tensor([[*ids, 9, 8]])).logits[0, -1].topk(2).values
    found = against_transformers._difference(model, ids, expected, [9, 8, 1, 6])
    assert found == {"first_difference": 2, "gap_there": pytest.approx((best[0] - best[1]).item())}
    assert against_transformers._difference(model, ids, expected, expected) == {
        "first_difference": None
    }
