"""`selfspec quantise`: what it writes is a model for every other command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from selfspec.cli.app import app
from selfspec.testing import tiny_model, tiny_tokenizer


def invoke(*words: str) -> Any:
    return CliRunner().invoke(app, list(words))


def test_a_folder_that_generate_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that no other command can open, other text than `--weights` gives, or an error with
    a traceback."""
    monkeypatch.setenv("SELFSPEC_PACKED_GB", "0")
    monkeypatch.setattr("selfspec.model.remembered.cache_root", lambda: tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    tiny_model().save_pretrained("tiny")
    tiny_tokenizer().save_pretrained("tiny")
    written = invoke("quantise", "tiny", "--to", "int4")
    assert written.exit_code == 0 and "tiny-int4" in written.stdout, written.output
    asked = ("Hello", "-n", "12", "--draft", "none")
    ours = invoke("generate", "tiny-int4", *asked)
    assert ours.exit_code == 0 and ours.stdout.strip()
    assert ours.stdout == invoke("generate", "tiny", *asked, "--weights", "int4").stdout
    again = invoke("quantise", "tiny", "--to", "int4")
    assert again.exit_code == 1 and "there already" in again.output
