"""What every test gets: two threads, no spinning, the `demo` and `gpu` markers, and `--isolated` for an empty model cache.

Environment variables are set here because OpenMP reads them once, when torch is first imported; this file imports no torch.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("MKL_NUM_THREADS", "2")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from selfspec.errors import Unavailable


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--isolated",
        action="store_true",
        help="start from empty model caches, so that nothing found on this machine can make a test pass (fetches the demo model)",
    )


@pytest.fixture(scope="session", autouse=True)
def isolated_caches(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """With --isolated: empty selfspec and Hugging Face caches for the whole run."""
    if not request.config.getoption("--isolated"):
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SELFSPEC_CACHE", str(tmp_path_factory.mktemp("selfspec-cache")))
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("hf-home")))
        yield


def _in_ci() -> bool:
    return os.environ.get("CI", "").lower() == "true"


def _skip_or_raise(error: Unavailable) -> None:
    """No demo model: a reason to skip on someone's laptop, a failure in CI, where it would hide every demo test."""
    if _in_ci():
        raise error
    pytest.skip(f"the demo model cannot be had: {error}")


@pytest.fixture(scope="session")
def demo_path() -> Path:
    """The folder of the demo model, made once; skips the test when the model cannot be had (in CI: fails)."""
    from selfspec.model.demo import demo_folder

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
