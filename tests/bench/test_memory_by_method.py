"""`scripts/bench memory`: a process for each method."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import memory
from selfspec.errors import OptionError
from selfspec.testing import tiny_model, tiny_tokenizer


def test_each_method_has_a_process_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Peaks of other methods in a method's figure; a process that failed and left no row."""
    folder, out = tmp_path / "tiny", tmp_path / "memory.json"
    tiny_model(max_position_embeddings=4096).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    memory.memory(model=str(folder), methods="plain ngram", max_new_tokens=3, out=out)
    rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert [row["method"] for row in rows] == ["plain", "ngram"]
    assert all(row["answering"] > 10**8 and row["tokens"] == 3 for row in rows)
    assert all(10**8 < row["imported"] <= row["loaded"] <= row["loading"] for row in rows)
    assert all(row["imported"] < row["answered"] <= row["answering"] for row in rows)
    assert "| ngram" in capsys.readouterr().out
    memory.memory(show=out)
    assert "| plain" in capsys.readouterr().out
    with pytest.raises(OptionError, match=r"ngrm: its process ended with 1 .*did you mean 'ngram'"):
        memory.memory(model=str(folder), methods="ngrm", max_new_tokens=3, out=out)
