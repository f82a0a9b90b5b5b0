"""Near-ties: what is counted, and that what is none is found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import typer

from benchmarks.exact import exact
from benchmarks.ties import NEAR, Parting, Ties, find_ties, sentence
from selfspec.draft.scripted import ScriptedDrafter
from selfspec.engine import keeping as engine_module
from selfspec.llm import LLM
from selfspec.model.from_transformers import from_transformers
from selfspec.testing import tiny_model, tiny_tokenizer

PROMPTS = [[10, 11, 12], [40, 41], [7]]
FIXED = {"control": "fixed", "control_options": {"tokens": 4}}


@pytest.fixture(scope="module")
def llm() -> LLM:
    model = tiny_model(seed=4, tie_word_embeddings=False).to(torch.bfloat16)
    return LLM(from_transformers(model, kernel="static", check=False), None, "tiny")


def script(llm: LLM) -> list[list[int]]:
    return [
        llm.generate([prompt], max_new_tokens=12, eos=[], draft=None)[0].tokens
        for prompt in PROMPTS
    ]


def test_every_text_is_compared_alone_and_in_a_batch(llm: LLM) -> None:
    """A report that leaves out ways or texts, and looks clean."""
    reports = find_ties(llm, PROMPTS, 12, {"early-exit": {"draft": "early-exit", **FIXED}}, rows=2)
    assert [each.name for each in reports] == [
        "plain, 2 at a time",
        "early-exit",
        "early-exit, 2 at a time",
    ]
    for ties in reports:
        assert ties.texts == len(PROMPTS) and not ties.wrong
        whole = sum(12 for _ in PROMPTS) - sum(12 - (each.at + 1) for each in ties.partings)
        assert ties.tokens == whole and ties.match_rate == 1 - len(ties.partings) / 3


def test_a_verifier_that_keeps_what_it_should_not_is_found(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: a bug hidden behind "it is only rounding"."""
    drafter = ScriptedDrafter(script(llm), wrong_every=3)  # alone, every text is row 0
    monkeypatch.setattr(
        engine_module, "accepted_path", lambda tree, choices: list(range(len(tree)))
    )
    alone, together = find_ties(
        llm, PROMPTS, 12, {"scripted": {"draft": drafter, **FIXED}}, rows=3
    )[1:]
    assert alone.wrong and together.wrong and together.match_rate < 1
    assert "NO near-tie" in sentence(together) and together.as_dict()["wrong"] == len(
        together.wrong
    )
    parting = together.wrong[0]
    assert parting.plain == script(llm)[parting.prompt][parting.at] != parting.other


def test_a_gap_is_judged_by_the_dtype() -> None:
    """A bound of 8 bits where there are 24, or a NaN that passes for a tie."""
    parting = Parting(0, 3, 5, 6, gap=0.1, share=0.01)
    assert not Ties("x", NEAR[torch.bfloat16], 2, 8, [parting]).wrong
    assert (
        Ties("x", NEAR[torch.float16], 2, 8, [parting]).wrong
        == Ties("x", NEAR[torch.float32], 2, 8, [parting]).wrong
    )
    assert Ties(
        "x", NEAR[torch.bfloat16], 2, 8, [Parting(0, 3, 5, 6, float("nan"), float("nan"))]
    ).wrong
    assert Ties("x", 0.03, 2, 8, [parting]).match_rate == 0.5


def test_the_command_writes_and_says_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a dtype that is not handed on, a file without the gaps, or a bug that ends with exit
    code 0."""
    model = tiny_model(seed=4, tie_word_embeddings=False)
    model.save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    arguments = {
        "model": str(tmp_path / "model"),
        "rows": 2,
        "length": 40,
        "max_new_tokens": 6,
        "draft": "hybrid",
    }
    exact(**arguments, dtype="bfloat16", out=tmp_path / "ties.json")
    result = json.loads((tmp_path / "ties.json").read_text())
    assert (result["kind"], result["dtype"], result["texts"]) == ("ties", "bfloat16", 6)
    assert [way["name"] for way in result["ways"]] == [
        "plain, 4 at a time",
        "hybrid",
        "hybrid, 4 at a time",
    ]
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {
        "texts": 6, "partings": result["partings"], "wrong": 0, "file": "ties.json"
    }  # fmt: skip
    exact(**{**arguments, "rows": 1}, out=tmp_path / "exact.json")
    assert json.loads((tmp_path / "exact.json").read_text())["kind"] == "exact"
    monkeypatch.setitem(NEAR, torch.bfloat16, -1.0)
    monkeypatch.setattr(
        engine_module, "accepted_path", lambda tree, choices: list(range(len(tree)))
    )
    with pytest.raises(typer.Exit):
        exact(**{**arguments, "draft": "early-exit"}, dtype="bfloat16", out=tmp_path / "ties.json")
