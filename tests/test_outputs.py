"""Where output goes when it cannot: a full disk, a folder, a device, a place that is read-only.
One error that says what to do, what was written stays, and the rerun goes on."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from selfspec import LLM, Busy, OptionError, ResourceError
from selfspec.cli.show import marked
from selfspec.core.files import require_output, write_whole
from selfspec.results import Piece
from selfspec.testing import tiny_llm, tiny_tokenizer
from selfspec.train import own_text, plots
from selfspec.train.own_text import OwnText, Question, made_up_so_far, write

QUESTIONS = [Question(f"question {n}", [70 + n, 80, 90], f"file:{n}") for n in range(6)]
ANSWERS = OwnText(max_new_tokens=4, batch=2)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return tiny_llm()


@pytest.mark.parametrize("name", ["/dev/full", "/dev/zero", "/dev/null", "."])
def test_what_is_no_file_is_refused(llm: LLM, name: str) -> None:
    """`selfspec data --out /dev/full` read its own output without end and filled the memory; a
    replaced device is gone."""
    for use in (
        lambda: write(llm, QUESTIONS, Path(name), ANSWERS),
        lambda: made_up_so_far(Path(name), 0),
        lambda: write_whole(Path(name), b"x"),
        lambda: require_output(Path(name)),
    ):
        with pytest.raises(OptionError, match="name a file"):
            use()
    assert Path(name).exists() and not Path(name).is_file()


@pytest.mark.parametrize("name", ["a" * 300, "x\0y"])
def test_a_name_that_no_file_can_have(tmp_path: Path, name: str) -> None:
    """ENAMETOOLONG, and ValueError for a zero byte."""
    with pytest.raises((OptionError, ResourceError)):
        write_whole(tmp_path / name, b"x")


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    """NotADirectoryError."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(ResourceError, match="cannot be written"):
        write_whole(tmp_path / "file" / "out.json", b"x")


class Full:
    """A disk that has room for so many writes."""

    def __init__(self, room: int) -> None:
        self.room = room

    def __call__(self, descriptor: int) -> None:
        self.room -= 1
        if self.room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a file, or none, where there was a whole one."""
    path = tmp_path / "result.json"
    write_whole(path, b"first")
    monkeypatch.setattr(os, "fsync", Full(0))
    with pytest.raises(ResourceError, match="No space"):
        write_whole(path, b"second")
    assert path.read_bytes() == b"first" and [path] == list(tmp_path.iterdir())


def test_a_run_on_a_full_disk_goes_on(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A traceback, and answers that are lost or written twice."""
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    write(llm, QUESTIONS, whole, ANSWERS)
    with monkeypatch.context() as patch:
        patch.setattr(own_text.os, "fsync", Full(1))
        with pytest.raises(ResourceError, match="Make room"):
            write(llm, QUESTIONS, out, ANSWERS)
    write(llm, QUESTIONS, out, ANSWERS)
    assert out.read_bytes() == whole.read_bytes()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("words", [["--version"], ["drafters"], ["--help"]])
def test_standard_output_that_is_full(words: list[str]) -> None:
    """A traceback at the very end, when Python writes what is left."""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "selfspec", *words],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert "cannot be written" in done.stderr and "Exception ignored" not in done.stderr


# -------------------------------------------------------------------------------------- small ones


def test_several_threads_on_one_stream(llm: LLM) -> None:
    """ValueError: generator already executing."""
    begun, go_on, raised = threading.Event(), threading.Event(), []

    class Waits:
        def __call__(self, ids: Any, scores: Any) -> bool:
            begun.set()
            go_on.wait(10)
            return False

    stream = llm.stream([5, 6, 7], max_new_tokens=3, draft=None, stopping_criteria=[Waits()])  # type: ignore[list-item]
    reader = threading.Thread(target=lambda: list(stream))
    reader.start()
    begun.wait(10)
    for use in (lambda: next(stream), stream.close):
        try:
            use()
        except Busy as error:
            raised.append(error)
    go_on.set()
    reader.join()
    assert len(raised) == 2 and stream.result.tokens


def test_refused_drafts_without_colours() -> None:
    """Refused drafts in the text as if they had been kept, in a pipe or with NO_COLOR."""
    piece = Piece("abc", [100, 101], accepted=1, rejected=[102])
    tokenizer = tiny_tokenizer()
    kept, refused, own = (tokenizer.decode([token]) for token in (100, 102, 101))
    assert marked(piece, tokenizer) == f"{kept}[-{refused}-]{own}"
    assert marked(Piece("a", [100], accepted=1), tokenizer) == kept


@pytest.fixture
def axes() -> Iterator[Any]:
    pyplot = plots.require_matplotlib()
    figure, drawn = pyplot.subplots()
    yield drawn
    pyplot.close(figure)


def test_a_picture_of_one_step(axes: Any) -> None:
    """A line through one point, which shows nothing."""
    plots._losses(axes, [{"step": 1, "loss": 2.0, "exit_1": 3.0}])
    assert [line.get_marker() for line in axes.lines] == ["o"]
