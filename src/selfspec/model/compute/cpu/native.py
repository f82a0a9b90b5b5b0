"""Compiles kernels.cpp and its headers once on this machine and hands out their functions.

The library has no Python or torch headers in it, so it compiles in seconds and survives their
upgrades. It is kept in the user's cache under a name made of everything that shaped it. Where there
is no compiler the reason is kept and shown, and torch computes instead. A kind of weights may bring
a source of its own, which is `compiled` in the same way.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import logging
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch  # noqa: F401  (loads its OpenMP runtime, which the kernels share)

from ....core.files import whole_file
from ....core.user_cache import CACHE_VARIABLE, cache_root
from .interface import declare
from .tuning import tuning, use

SOURCE = Path(__file__).with_name("kernels.cpp")
HEADERS = SOURCE.parent
_DIGEST = hashlib.sha256().digest_size
_log = logging.getLogger(__name__)
# a * b + c is one rounding everywhere. Tuned for some processors (Zen 2 and 3, in newer versions
# others as well) GCC rounds twice in some loops and once in others, unless told not to.
ONE_ROUNDING = ("-ffp-contract=fast", "--param=avoid-fma-max-bits=0")
FLAGS = ("-std=c++17", "-O3", "-march=native", *ONE_ROUNDING, "-fPIC")


class NoNative(Exception):
    """The kernels cannot be had here; the message says why."""


@functools.cache
def library() -> ctypes.CDLL:
    """The kernels, built and tuned if this machine has not done so yet."""
    native = compiled(SOURCE)
    declare(native)
    use(native, tuning(native))
    return native


@functools.cache
def compiled(source: Path) -> ctypes.CDLL:
    """The functions of a C++ file, which may include the headers beside kernels.cpp."""
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")
    if compiler is None:
        raise NoNative("no C++ compiler found (g++ or clang++)")
    path = _built(compiler, source)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NoNative(f"the compiled kernels do not load: {error}") from error


def function_of(source: Path, name: str, result: Any, *arguments: Any) -> Callable[..., Any] | None:
    """A function of a C++ file, with its types. None: it cannot be had here, so torch computes."""
    try:
        found: Any = getattr(compiled(source), name)
    except NoNative:
        return None
    found.argtypes, found.restype = arguments, result
    function: Callable[..., Any] = found
    return function


def _built(compiler: str, source: Path) -> Path:
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, text=True, check=False
    ).stdout
    identity = [
        *map(Path.read_text, _with_headers(source)),
        *FLAGS,
        version,
        platform.machine(),
        _cpu_features(),
    ]
    name = hashlib.sha256("\n".join(identity).encode()).hexdigest()[:16]
    file = f"{source.stem}-{name}.so"
    target = cache_root() / "native" / file
    if not _is_whole(target):
        try:
            _compile(compiler, source, target)
        except OSError as error:
            target = _elsewhere() / file
            _log.warning(
                "The kernels cannot be kept in %s (%s), so every process compiles them anew. Name "
                "a folder that can be written to in $%s.",
                *(cache_root(), error, CACHE_VARIABLE),
            )
            _compile(compiler, source, target)
    return target


def _with_headers(source: Path) -> list[Path]:
    """A source, and the headers beside it and of ours that it includes, by itself or through
    others."""
    found = [source]
    for file in found:
        for name in re.findall(r'^#include "(.+)"$', file.read_text(), re.MULTILINE):
            beside = file.parent / name
            header = beside if beside.exists() else HEADERS / name
            if header not in found:
                found.append(header)
    return found


def _is_whole(library: Path) -> bool:
    """Whether a library was written to its end. A cut one would end the process when it is used."""
    try:
        data = library.read_bytes()
    except OSError:  # it is not there yet, or cannot be read: it is made again
        return False
    return hashlib.sha256(data[:-_DIGEST]).digest() == data[-_DIGEST:]


@functools.cache
def _elsewhere() -> Path:
    """A folder of this process's own, removed at its end. No fixed name in a place that others can
    write to, as what lies in it is run."""
    folder = tempfile.TemporaryDirectory(prefix="selfspec-", ignore_cleanup_errors=True)
    atexit.register(folder.cleanup)
    return Path(folder.name)


def _compile(compiler: str, source: Path, target: Path) -> None:
    """Links without naming an OpenMP library first, so that torch's own is used and there is one
    pool of threads. The file's own hash is put behind it, where loaders do not look."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made, linked = Path(folder) / "made.o", Path(folder) / "made.so"
        for command in (
            [compiler, *FLAGS, "-fopenmp", f"-I{HEADERS}", "-c", str(source), "-o", str(made)],
            [compiler, "-shared", str(made), "-o", str(linked)],
        ):
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            if result.returncode:
                raise NoNative(f"{compiler} failed: {result.stderr.strip()[-500:]}")
        data = linked.read_bytes()
        with whole_file(target, durable=True) as file:
            file.write(data + hashlib.sha256(data).digest())


def _cpu_features() -> str:
    """-march=native means another thing on another processor, and caches are shared over network
    homes."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next(
        (line for line in lines if line.startswith(("flags", "Features"))), platform.processor()
    )


def give_back() -> None:
    """Hand memory that is free but still held back to the system, where the C library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)
