"""What a machine is called: costs, profiles and results are kept under that name."""

from pathlib import Path

import pytest

from selfspec.core.machine import cpu_name


@pytest.mark.parametrize(
    ("told", "flags", "name"),
    [
        ("AMD EPYC", "avx avx2 avx512f", "AMD EPYC (family 25 model 17)"),
        ("AMD EPYC", "avx avx2 fma", "AMD EPYC (family 25 model 17, AVX2)"),
        ("AMD EPYC 9454 48-Core Processor", "avx avx2", "AMD EPYC 9454 48-Core Processor"),
    ],
)
def test_a_name_tells_apart_what_differs_in_speed(told, flags, name, monkeypatch):
    """One name for two generations, or for a processor with and without its longest vectors: then
    each is given the other's costs."""
    lines = f"cpu family\t: 25\nmodel\t\t: 17\nmodel name\t: {told}\nflags\t\t: {flags}\n"
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: lines)
    assert cpu_name() == name
