"""What every test gets: two threads, no spinning, the `demo`, `gpu` and `zeros` markers, and
`--isolated` for an empty model cache.

Environment variables are set here because OpenMP reads them once, when torch is first imported;
this file imports no torch.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("MKL_NUM_THREADS", os.environ["OMP_NUM_THREADS"])
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import math
import sys
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
from hypothesis import settings

from selfspec.errors import Unavailable


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--isolated",
        action="store_true",
        help="start from empty model caches, so that nothing found on this machine can make a "
        "test pass (fetches the demo model)",
    )
    parser.addoption(
        "--full",
        action="store_true",
        help="every combination in the drafters' conformance suite, not every pair only; more "
        "commands that are killed",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Before any test module is imported: huggingface_hub reads its folders once, at import."""
    if config.getoption("--isolated"):
        caches = tempfile.TemporaryDirectory(
            prefix="selfspec-isolated-", ignore_cleanup_errors=True
        )
        config.add_cleanup(caches.cleanup)
        os.environ["SELFSPEC_CACHE"] = os.path.join(caches.name, "selfspec")
        os.environ["HF_HOME"] = os.path.join(caches.name, "huggingface")


@pytest.fixture(autouse=True)
def unwritten_is_unread(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a cache need not begin with zeros it begins with NaN: whoever reads a slot that was not
    written shows it."""
    value = 0.0 if request.node.get_closest_marker("zeros") else math.nan
    memory = sys.modules.get("selfspec.model.compute.memory")
    if memory is not None:
        real = memory.unwritten
        monkeypatch.setattr(memory, "unwritten", lambda *a, **k: real(*a, **k).fill_(value))


@pytest.fixture
def threads() -> Generator[Callable[[int], None], None, None]:
    """Sets torch's threads for a test."""
    import torch

    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def _in_ci() -> bool:
    return os.environ.get("CI", "").lower() == "true"


def _skip_or_raise(error: Unavailable) -> None:
    """No demo model: a reason to skip on someone's laptop, a failure in CI, where it would hide
    every demo test."""
    if _in_ci():
        raise error
    pytest.skip(f"the demo model cannot be had: {error}")


# No deadlines: a busy machine is not a bug. CI draws the same examples every time, so that red
# means that something was changed.
settings.register_profile("selfspec", deadline=None, derandomize=_in_ci())
settings.load_profile("selfspec")


@pytest.fixture(scope="session")
def demo_path() -> Path:
    """The folder of the demo model, made once; skips the test when the model cannot be had (in CI:
    fails)."""
    from selfspec.model.load.demo import demo_folder

    try:
        return demo_folder(progress=False)
    except Unavailable as error:
        _skip_or_raise(error)
        raise


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """A test marked demo that fetches the model itself skips like one that uses the fixture."""
    try:
        return (yield)
    except Unavailable as error:
        if pyfuncitem.get_closest_marker("demo") is None:
            raise
        _skip_or_raise(error)
        raise


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU, and torch sees none"))
