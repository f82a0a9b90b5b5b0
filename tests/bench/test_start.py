"""The start's benchmark: what it waits for, and its table by known numbers."""

from __future__ import annotations

import sys

import pytest
from suite_world import PROVENANCE

from benchmarks.start import Start, StartRun, markdown, until_it_writes
from selfspec.errors import OptionError


def test_it_waits_for_the_first_letter_and_no_longer() -> None:
    """The whole answer's time, or that of a process that wrote nothing yet."""
    late = "import time; time.sleep({}); print('a', flush=True); time.sleep({})"
    soon = until_it_writes([sys.executable, "-S", "-c", late.format(0, 1.5)])
    whole = until_it_writes([sys.executable, "-S", "-c", late.format(1.5, 0)])
    assert soon < whole and whole >= 1.5


def test_a_command_that_fails_is_no_start() -> None:
    """The time of an error message as the fastest start of all."""
    with pytest.raises(OptionError, match="ended with 3"):
        until_it_writes([sys.executable, "-S", "-c", "raise SystemExit(3)"])


def test_the_tables_have_medians() -> None:
    """An import's own seconds where what it adds should be."""
    imports = [Start("import torch", [1.0, 3.0, 2.0]), Start("ours", [2.5, 2.25, 2.75])]
    starts = [Start("int8", [5.0, 4.0, 9.0])]
    lines = markdown(StartRun(PROVENANCE, "m", imports, starts, complete=True)).splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert ["int8", "5.00"] in rows
    assert ["import torch", "2.00", "0.00"] in rows and ["ours", "2.50", "0.50"] in rows
