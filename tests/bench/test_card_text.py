"""Text written many rows at a time: the model's own answers, and the table counted beside them.

What is recorded as a CUDA graph on a card is run step by step here.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from benchmarks import card_text as card
from selfspec import LLM
from selfspec.errors import OptionError
from selfspec.testing import tiny_model, tiny_tokenizer
from selfspec.trained.files import load_part
from selfspec.trained.successors import Successors

LONGEST = 21


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny = tiny_model("llama", seed=5, num_key_value_heads=2)
    tiny.config.eos_token_id = [7, 31]
    tiny.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    dice = random.Random(3)
    texts = ["".join(dice.choices("abcdefgh ", k=dice.randrange(3, 60))) for _ in range(23)]
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    lines = [json.dumps({"prompt": text}) for text in [*texts, texts[0]]]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def written(model: Path, prompts: Path, out: Path, **changed: object) -> list[dict[str, list[int]]]:
    settings = {"model": str(model), "rows": 5, "temperatures": "0", "new_tokens": LONGEST}
    card.card_text([prompts], out, **{**settings, "device": "cpu", **changed})  # type: ignore[arg-type]
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


def test_answers_are_the_models_own(
    model: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slot that sees what an earlier answer left, a place that is one off, an end that is
    overrun, a prompt that is lost when slots are filled."""
    monkeypatch.setattr(card, "PREFILLED", 200)  # so that a fill takes several passes
    rows = written(model, prompts, tmp_path / "own.jsonl")
    assert len({tuple(row["prompt_ids"]) for row in rows}) == len(rows) == 23
    results = LLM.from_pretrained(model).generate(
        [row["prompt_ids"] for row in rows], max_new_tokens=LONGEST, draft=None, eos=[7, 31]
    )
    assert [row["response_ids"] for row in rows] == [result.tokens for result in results]
    lengths = {len(row["response_ids"]) for row in rows}
    assert LONGEST in lengths and min(lengths) < LONGEST


def test_long_prompts_are_answered_once(model: Path, prompts: Path, tmp_path: Path) -> None:
    """A second answer that costs as much as many short ones, or a drawn one where one is asked."""
    rows = written(model, prompts, tmp_path / "own.jsonl", temperatures="0,0.9", once=40)
    long = [row for row in rows if len(row["prompt_ids"]) > 40]
    assert 0 < len(long) < 23 and len(rows) == 46 - len(long)
    assert all(row["temperature"] == 0 for row in long)
    drawn = {tuple(row["response_ids"]) for row in rows if row["temperature"]}
    assert drawn - {tuple(row["response_ids"]) for row in rows if not row["temperature"]}


def test_the_table_says_what_the_model_says(model: Path, prompts: Path, tmp_path: Path) -> None:
    """Likely tokens that belong to the next place or to another row: then a table would promise
    what the text does not hold."""
    rows = written(model, prompts, tmp_path / "own.jsonl", table=tmp_path / "table")
    part = load_part(tmp_path / "table")
    assert part.kind == "successors" and part.facts["tokens"] == sum(
        len(row["response_ids"]) for row in rows
    )
    table, hits, places = Successors(part), 0, 0
    for row in rows:
        text = row["prompt_ids"][-2:] + row["response_ids"]
        for at in range(2, len(text)):
            likely = [token for token, _ in table.after(text[at - 2 : at])]
            hits, places = hits + (text[at] in likely), places + 1
    assert hits > 0.8 * places  # a pair keeps four successors only
    assert LLM.from_pretrained(model).generate(
        rows[0]["prompt_ids"],
        max_new_tokens=4,
        draft="recycle",
        draft_options={"part": tmp_path / "table"},
        eos=[],
    )


def test_what_it_cannot_do_it_says(
    model: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's own error where there is no card, or another family's layers taken for llama's."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(OptionError, match="no card here; --device cpu"):
        written(model, prompts, tmp_path / "own.jsonl", device="cuda")
    other = tiny_model("qwen2", seed=5)
    other.save_pretrained(tmp_path / "other")
    tiny_tokenizer().save_pretrained(tmp_path / "other")
    with pytest.raises(OptionError, match=r"type 'qwen2'.*selfspec data"):
        written(tmp_path / "other", prompts, tmp_path / "own.jsonl")
