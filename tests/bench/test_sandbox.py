"""Programs that a model wrote: what passes, what does not, and that nothing outlives its time."""

from __future__ import annotations

import time

import pytest

from benchmarks.paper import sandbox
from benchmarks.paper.sandbox import run_python


def test_a_program_that_reaches_its_end_passes() -> None:
    """Also one that prints much, or whose last line is not ended."""
    assert run_python("print('x' * 5000)\nassert 1 + 1 == 2").passed


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("assert 1 + 1 == 3, 'wrong sum'", "wrong sum"),
        ("def broken(:", "SyntaxError"),
        ("import sys; sys.exit(0)", "before its last line"),
        ("import os; os._exit(0)", "before its last line"),
        ("a = bytearray(3 * 2**29)", "MemoryError"),
        ("open('big', 'wb').write(b'0' * (1 << 25))", "File too large"),
        ("import os; assert 'HOME' not in os.environ; raise KeyError('clean')", "clean"),
        ("import os; assert os.listdir('.') == 1", "AssertionError"),
    ],
)
def test_a_program_that_does_not_is_told_why(source: str, said: str) -> None:
    """Exit status 0 is no proof: a program that leaves before its tests ran would count as
    right."""
    ran = run_python(source)
    assert not ran.passed and said in ran.reason


def test_an_endless_loop_ends_with_all_its_children() -> None:
    """A child that sleeps on would pile up over 164 problems."""
    start = time.monotonic()
    ran = run_python(
        "import subprocess, time\nsubprocess.Popen(['sleep', '60'])\ntime.sleep(60)", seconds=1
    )
    assert not ran.passed and "longer than 1 s" in ran.reason
    assert time.monotonic() - start < 30


def test_no_network_where_the_system_allows_it() -> None:
    """A program that reaches the network could send what it read."""
    if not sandbox.isolation():
        pytest.skip("unshare is not there or not allowed here")
    ran = run_python("import socket\nsocket.create_connection(('127.0.0.1', 9), timeout=2)")
    assert "unreachable" in ran.reason
    assert run_python("import socket\nassert len(socket.if_nameindex()) <= 1").passed


def test_it_says_what_it_is_not() -> None:
    """The notice that commands print before they run what a model wrote."""
    assert "no security boundary" in sandbox.WARNING
