"""`scripts/bench checkouts`: each process runs its own checkout's code, and ratios are the right
way round."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from suite_world import PROVENANCE

from benchmarks import checkouts
from benchmarks.checkouts import HERE, CheckoutsRun, Start, named, tables
from selfspec.bench.provenance import CHECKOUT
from selfspec.bench.schema import read
from selfspec.errors import OptionError
from selfspec.testing import tiny_model, tiny_tokenizer

SLOWER = """
_run = Passes.run


def _slow(self: Passes, tokens: int) -> None:
    time.sleep(0.2)
    _run(self, tokens)


Passes.run = _slow
"""


def test_each_process_runs_the_code_of_its_checkout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same code in all processes; a pass that is timed with another number of tokens."""
    folder, other, out = tmp_path / "tiny", tmp_path / "slower", tmp_path / "found.json"
    tiny_model(max_position_embeddings=4096).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    shutil.copytree(CHECKOUT / "src", other / "src")
    with (other / "src" / "selfspec" / "bench" / "costs.py").open("a", encoding="utf-8") as costs:
        costs.write(SLOWER)
    checkouts.checkouts(
        [other], model=str(folder), weights="auto", tokens="1,3", starts=1, rounds=2, out=out
    )
    run = read(CheckoutsRun, out)
    assert run.complete and [start.tokens for start in run.starts] == [1, 3]
    for start in run.starts:
        assert list(start.seconds) == [HERE, "slower"] and len(start.seconds[HERE]) == 2
        assert max(start.seconds[HERE]) < 0.2 <= min(start.seconds["slower"])
    assert "| slower" in capsys.readouterr().out


def test_ratios_are_this_codes_time_over_the_others() -> None:
    """A ratio the wrong way round; one start's noise taken for all of it."""
    starts = [Start(8, {HERE: [0.5, 0.5], "old": [1.0, 1.0]}), Start(8, {HERE: [2], "old": [1]})]
    text = tables(CheckoutsRun(PROVENANCE, "demo", "int8", 300, starts))
    line = next(line for line in text.splitlines() if line.startswith("| old"))
    assert [cell.strip() for cell in line.split("|")[2:4]] == ["8", "1000.00"]
    assert "1.000 (0.500-2.000)" in line


def test_what_is_no_checkout_is_refused(tmp_path: Path) -> None:
    """A folder without code, which would run this code twice and find it as fast as itself."""
    with pytest.raises(OptionError, match=r"no folder src/selfspec.*git worktree add"):
        named([tmp_path])
    with pytest.raises(OptionError, match="name a checkout"):
        checkouts.checkouts([])


def test_a_process_that_ends_says_why(tmp_path: Path) -> None:
    """Waiting for ever for a process that could not load the model."""
    words = [str(tmp_path / "none"), "auto", "1", "1", "1"]
    with (
        checkouts.process_of(CHECKOUT, words) as seconds,
        pytest.raises(OptionError, match=r"ended and said: .*none"),
    ):
        seconds(1)
