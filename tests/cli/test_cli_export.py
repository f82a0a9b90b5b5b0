"""`selfspec export` writes a draft model and says how an engine is started with it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from selfspec.testing import tiny_model, tiny_tokenizer


def test_a_folder_for_vllm(run: Any, tmp_path: Path) -> None:
    """Options that do not arrive, or a command that nobody can paste."""
    tiny_model().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    asked = ["--to", "vllm", "--layer", "2", "--tokens", "3", "--out", str(tmp_path / "draft")]
    found = run("export", str(tmp_path / "model"), *asked)
    assert found.exit_code == 0, found.stderr
    command = shlex.split(found.stdout.splitlines()[-1])
    assert command[:2] == ["vllm", "serve"]
    told = json.loads(command[-1])
    assert told["num_speculative_tokens"] == 3 and told["model"] == str(tmp_path / "draft")
    assert json.loads((tmp_path / "draft" / "config.json").read_text())["num_hidden_layers"] == 2


def test_an_engine_that_nobody_knows(run: Any, tmp_path: Path) -> None:
    """A word that is mistyped."""
    found = run("export", "demo", "--to", "llamacpp", "--out", str(tmp_path / "draft"))
    assert found.exit_code == 1 and "llama.cpp" in found.stderr
