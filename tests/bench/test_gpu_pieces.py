"""`scripts/gpu` on a CPU: its pieces with a tiny shape, and how a run goes on."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks import gpu
from benchmarks.command import run_command
from benchmarks.exact import exact
from benchmarks.gpu import Piece, pieces, work
from benchmarks.plain.__main__ import plain
from selfspec.errors import OptionError
from selfspec.testing import tiny_model, tiny_tokenizer

LATER = time.monotonic() + 1e6


def quiet(_: str) -> None:
    pass


def in_this_process(piece: Piece, more: list[str], patch: pytest.MonkeyPatch) -> int:
    """Run a piece's command with its arguments, without the seconds of a process of its own."""
    module, *arguments = piece.command[3:]
    patch.setattr(sys, "argv", [module, *arguments, *more])
    with pytest.raises(SystemExit) as ended:
        run_command({"benchmarks.exact": exact, "benchmarks.plain": plain}[module])
    return int(ended.value.code or 0)


def test_pieces_run_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece whose command was renamed, which a borrowed card would find out."""
    model = tmp_path / "model"
    tiny_model("llama", 4).save_pretrained(model)
    tiny_tokenizer().save_pretrained(model)
    todo = {piece.name: piece for piece in pieces(tmp_path, str(model), "cpu", "tiny", heads=1)}
    few = {
        "identity": ["--rows", "2", "--length", "20", "--max-new-tokens", "6", "--draft", "ngram"],
        "plain": ["--rounds", "1", "--batches", "1", "--contexts", "8", "--verify", "1,2",
                  "--max-new-tokens", "3", "--peers", "selfspec"],
    }  # fmt: skip
    monkeypatch.setattr("benchmarks.plain.gpu.copy_bandwidth", lambda device, size: [1e9])
    for name, more in few.items():
        assert in_this_process(todo[name], more, monkeypatch) == 0
        assert todo[name].result.exists(), name
    assert todo["tests"].command[3:6] == ["pytest", "-m", "gpu"]
    head = todo["head-1"]
    assert Path(head.command[0]).exists() and head.environment["FOLDER"] == str(tmp_path / "heads")


def test_it_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    """Minutes of a card for what was measured before, or a failure that counts as done."""
    todo = [Piece(name, tmp_path / f"{name}.json", ()) for name in ("one", "two", "three")]
    ran: list[str] = []

    def run(piece: Piece) -> int:
        ran.append(piece.name)
        piece.result.write_text("{}")
        return int(piece.name == "two" and len(ran) == 2)

    assert work(todo, run, quiet, LATER) == ["two"]
    assert (tmp_path / "failed-two.json").exists()
    assert work(todo, run, quiet, LATER) == [] and ran == ["one", "two", "three", "two"]
    said: list[str] = []
    fresh = [Piece("four", tmp_path / "four.json", ())]
    assert work(fresh, run, said.append, time.monotonic()) == [] and ran[-1] == "two"
    assert "no time left" in said[0]


def test_without_a_card_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of minutes on a CPU, or an error of torch's from inside."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(OptionError, match=r"no card to measure.*--device cpu --shape tiny"):
        gpu.gpu(folder=tmp_path / "gpu")
    assert not (tmp_path / "gpu").exists()
    with pytest.raises(OptionError, match=r"identiy.*did you mean.*identity"):
        gpu.gpu(only="identiy", device="cpu", folder=tmp_path / "gpu")
