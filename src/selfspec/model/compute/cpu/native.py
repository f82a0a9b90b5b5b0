"""Compiles kernels.cpp once on this machine and hands out its functions.

The library has no Python or torch headers in it, so it compiles in seconds and survives their
upgrades. It is kept in the user's cache under a name made of everything that shaped it. Where there
is no compiler the reason is kept and shown, and `linear.py` and `ops.py` use torch instead.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from ctypes import POINTER, c_float, c_int, c_int64, c_void_p
from pathlib import Path

import torch  # noqa: F401  (loads its OpenMP runtime, which the kernels share)

from ....core.user_cache import cache_root

SOURCE = Path(__file__).with_name("kernels.cpp")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-fPIC")


class LayerStruct(ctypes.Structure):
    """Where one layer's keys and values lie."""

    _fields_ = [
        ("keys", c_void_p),
        ("values", c_void_p),
        ("row_stride", c_int64),
        ("head_stride", c_int64),
        ("size", c_int64),
    ]


class NormStruct(ctypes.Structure):
    """A norm: its weights, over how many numbers, and its kind."""

    _fields_ = [
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("size", c_int64),
        ("stride", c_int64),
        ("eps", c_float),
        ("centred", c_int),
    ]


class ProductStruct(ctypes.Structure):
    """A packed weight and its bias."""

    _fields_ = [("pack", c_void_p), ("bias", c_void_p), ("outputs", c_int64), ("inputs", c_int64)]


class HeadsStruct(ctypes.Structure):
    """What an attention is, beside its projections."""

    _fields_ = [
        ("queries", c_int64),
        ("keys", c_int64),
        ("size", c_int64),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("scale", c_float),
        ("cap", c_float),
    ]


class RopeStruct(ctypes.Structure):
    """Angles by position."""

    _fields_ = [("cosines", c_void_p), ("sines", c_void_p), ("rotary", c_int64)]


class WhereStruct(ctypes.Structure):
    """Where the tokens of a call go."""

    _fields_ = [(name, c_void_p) for name in ("rows", "slots", "positions")]


class SightStruct(ctypes.Structure):
    """What each query of a call sees."""

    _fields_ = [(name, c_void_p) for name in ("rows", "starts", "stops", "first_extra", "extras")]


class HalfStruct(ctypes.Structure):
    """Half of a layer."""

    _fields_ = [
        ("layer", c_int64),
        ("attention", c_int64),
        ("parallel", c_int64),
        ("before", c_void_p),
        ("after", c_void_p),
        ("into", ProductStruct),
        ("out", ProductStruct),
        ("heads", HeadsStruct),
        ("rope", c_int64),
        ("sight", c_int64),
        ("activation", c_int64),
        ("gated", c_int64),
        ("scale", c_float),
    ]


class CallStruct(ctypes.Structure):
    """What all halves of a call share: how many tokens, where they go, what they see, the cache
    with its strides, and what entered the first half's layer."""

    _fields_ = [
        ("tokens", c_int64),
        ("width", c_int64),
        ("where", WhereStruct),
        ("ropes", c_void_p),
        ("sights", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("layer_stride", c_int64),
        ("row_stride", c_int64),
        ("head_stride", c_int64),
        ("entered", c_void_p),
    ]


_TYPES = {
    "p": c_void_p,
    "n": c_int64,
    "f": c_float,
    "i": c_int,
    "L": POINTER(LayerStruct),
    "S": POINTER(SightStruct),
    "N": POINTER(NormStruct),
    "P": POINTER(ProductStruct),
    "H": POINTER(HeadsStruct),
    "R": POINTER(RopeStruct),
    "W": POINTER(WhereStruct),
    "C": POINTER(CallStruct),
}
_SIGNATURES = {  # a letter an argument, in the order of kernels.cpp
    "linear": "pnPppi",
    "normalise": "pnNpi",
    "gated": "pnnipi",
    "activated": "pnnii",
    "soft_cap": "pnfi",
    "rotate_and_store": "pnHRWLi",
    "attend": "pnHLSpi",
    "run_halves": "pppnCi",
}


class NoNative(Exception):
    """The kernels cannot be had here; the message says why."""


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled kernels, built if this machine has not built them yet."""
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")
    if compiler is None:
        raise NoNative("no C++ compiler found (g++ or clang++)")
    path = _built(compiler)
    try:
        native = ctypes.CDLL(str(path))
    except OSError as error:
        raise NoNative(f"the compiled kernels do not load: {error}") from error
    for name, arguments in _SIGNATURES.items():
        getattr(native, name).argtypes = [_TYPES[letter] for letter in arguments]
        getattr(native, name).restype = None
    native.panel_width.restype = c_int64
    return native


def _built(compiler: str) -> Path:
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, text=True, check=False
    ).stdout
    identity = [SOURCE.read_text(), *FLAGS, version, platform.machine(), _cpu_features()]
    name = hashlib.sha256("\n".join(identity).encode()).hexdigest()[:16]
    target = cache_root() / "native" / f"kernels-{name}.so"
    if not target.exists():
        _compile(compiler, target)
    return target


def _compile(compiler: str, target: Path) -> None:
    """Links without naming an OpenMP library first, so that torch's own is used and there is one
    pool of threads."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        compiled, linked = Path(folder) / "kernels.o", Path(folder) / "kernels.so"
        for command in (
            [compiler, *FLAGS, "-fopenmp", "-c", str(SOURCE), "-o", str(compiled)],
            [compiler, "-shared", str(compiled), "-o", str(linked)],
        ):
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            if result.returncode:
                raise NoNative(f"{compiler} failed: {result.stderr.strip()[-500:]}")
        os.replace(linked, target)


def _cpu_features() -> str:
    """-march=native means another thing on another processor, and caches are shared over network
    homes."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next(
        (line for line in lines if line.startswith(("flags", "Features"))), platform.processor()
    )
