"""Our own caches, damaged or where nothing can be kept: what is damaged is made again, and what
cannot be kept is said."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from selfspec.core.user_cache import CACHE_VARIABLE, cache_root
from selfspec.errors import ResourceError
from selfspec.model.compute.cpu import native, tuning
from selfspec.model.compute.cpu.native import NoNative, compiled

SOURCE = 'extern "C" long answer() { return 42; }\n'
PROGRAM = """
import sys
from pathlib import Path
from selfspec.model.compute.cpu.native import compiled
print(compiled(Path(sys.argv[1])).answer())
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    compiled.cache_clear()
    yield tmp_path / "cache"
    compiled.cache_clear()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "small.cpp"
    path.write_text(SOURCE)
    return path


def built(source: Path) -> int:
    compiled.cache_clear()
    try:
        return int(compiled(source).answer())
    except NoNative as error:
        if "no C++ compiler" in str(error):
            pytest.skip("no compiler here")
        raise


def test_a_header_that_changed_is_compiled(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels of before, after an update that changed a header that they include through
    another one; or all of them compiled anew for a header that none includes."""
    monkeypatch.setattr(native, "HEADERS", tmp_path)
    source, deep = tmp_path / "small.cpp", tmp_path / "deep.h"
    source.write_text('#include "near.h"\nextern "C" long answer() { return ANSWER; }\n')
    (tmp_path / "near.h").write_text('#pragma once\n#include "deep.h"\n')
    deep.write_text("#define ANSWER 42\n")
    assert built(source) == 42
    deep.write_text("#define ANSWER 43\n")
    assert built(source) == 43
    (tmp_path / "other.h").write_text("#define ANSWER 44\n")
    assert built(source) == 43 and len([*(cache / "native").glob("*.so")]) == 2


def test_a_header_beside_the_source_is_its_own(cache: Path, tmp_path: Path) -> None:
    """A kind of weights that brings a header of its own, looked for among ours."""
    source, own = tmp_path / "small.cpp", tmp_path / "own.h"
    source.write_text('#include "own.h"\nextern "C" long answer() { return ANSWER; }\n')
    for answer in (42, 43):
        own.write_text(f"#define ANSWER {answer}\n")
        assert built(source) == answer


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[: len(data) // 2],
        lambda data: data[:4096],
        lambda data: data[:-1],
        lambda data: data[:3000] + bytes([data[3000] ^ 1]) + data[3001:],
        lambda data: b"\x7fELF" * 10,
    ],
)
def test_a_damaged_kernel_is_compiled_again(
    cache: Path, source: Path, damage: Callable[[bytes], bytes]
) -> None:
    """A cut library ends the process by SIGBUS when it is used, and an empty one was silently
    replaced by slower operations of other bits, for good. In a process of its own, as a signal
    would end this one."""
    built(source)
    (library,) = (cache / "native").glob("*.so")
    whole = library.read_bytes()
    replaced = library.with_suffix(".other")
    replaced.write_bytes(damage(whole))
    os.replace(replaced, library)  # not written over: this process has it mapped
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(source)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "42\n"), done.stderr
    assert native._is_whole(library) and not list((cache / "native").glob("tmp*"))


def blocked_by_a_file(cache: Path) -> None:
    cache.write_text("not a folder")


def blocked_inside(cache: Path) -> None:
    cache.mkdir()
    (cache / "native").write_text("not a folder")


@pytest.mark.parametrize("block", [blocked_by_a_file, blocked_inside])
def test_kernels_without_a_cache(
    cache: Path, source: Path, block: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    """A traceback where the cache cannot be written, or torch's other bits without a word."""
    block(cache)
    with caplog.at_level(logging.WARNING):
        assert built(source) == 42
    assert f"${CACHE_VARIABLE}" in caplog.text


def test_nobody_s_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """RuntimeError of pathlib where no home folder is known."""
    monkeypatch.setenv(CACHE_VARIABLE, "~nobody-has-this-name/cache")
    with pytest.raises(ResourceError, match=CACHE_VARIABLE):
        cache_root()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "5",
        '{"soon": 1e999}',
        '{"soon": "16"}',
        '{"rows": 10000}',
        '{"x": 1}',
        "[" * 100_000,
        '{"soon": -5}',
        '{"rows": 0}',
        '{"soon": 1.5}',
        '{"soon": true}',
    ],
    ids=lambda text: text[:20],
)
def test_a_damaged_choice_is_measured_again(tmp_path: Path, text: str) -> None:
    """OverflowError and RecursionError at every load."""
    path = tmp_path / "kernels.json"
    path.write_text(text)
    assert tuning._kept(path, tuning.Tuning, lambda found: found.possible(12)) is None


def test_a_choice_is_kept(tmp_path: Path) -> None:
    """The check above refusing everything."""
    path = tmp_path / "kernels.json"
    path.write_text(json.dumps({"soon": 16, "later": 128, "rows": 8}))
    kept = tuning._kept(path, tuning.Tuning, lambda found: found.possible(12))
    assert kept == tuning.Tuning(16, 128, 8)
