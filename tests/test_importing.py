"""What importing the package does beside making names known."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import gc
{before}
import selfspec
gc.callbacks.append(lambda phase, info: seen.append(info["generation"]))
seen = []
try:
    selfspec.{name}
except (AttributeError, ImportError):
    print("not there")
print(2 in seen, gc.isenabled())
"""


def said(name: str, before: str = "") -> list[str]:
    code = CODE.format(name=name, before=before)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_no_garbage_is_looked_for_meanwhile() -> None:
    """A tenth of a second for a look through all of torch, or a collector that stays off."""
    assert said("LLM") == ["False", "True"]


def test_a_collector_that_was_off_stays_off() -> None:
    """A program that times something, with pauses that it had ruled out."""
    assert said("LLM", "gc.disable()") == ["False", "False"]


def test_an_import_that_fails_leaves_the_collector_on() -> None:
    """Memory that is never given back, because a module was missing."""
    broken = "import sys\nsys.modules['selfspec.llm'] = None"
    assert said("LLM", broken)[-3:] == ["there", "False", "True"]
