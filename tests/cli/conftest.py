"""The command line on a tiny random model: `run` invokes it, `opened` says which models were asked
for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import CliRunner

from selfspec import LLM
from selfspec.cli import common
from selfspec.cli.app import app
from selfspec.cli.options import ModelOptions
from selfspec.testing import tiny_llm

Run = Callable[..., Any]


@pytest.fixture(scope="session")
def llm() -> LLM:
    return tiny_llm()


@pytest.fixture
def opened(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ModelOptions]]:
    """Every command gets the tiny model; the list fills with what it asked for."""
    asked: list[tuple[str, ModelOptions]] = []

    def open_model(name: str, how: ModelOptions) -> LLM:
        asked.append((name, how))
        return llm

    monkeypatch.setattr(common, "open_model", open_model)
    return asked


@pytest.fixture
def run(opened: list[tuple[str, ModelOptions]], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command; a crash that is not one of our errors fails the test with its own
    traceback."""
    monkeypatch.delenv("SELFSPEC_TRACEBACK", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")

    def invoke(*words: str, stdin: str | None = None, crash: bool = False) -> Any:
        result = CliRunner().invoke(app, list(words), input=stdin)
        if (
            not crash
            and result.exception is not None
            and not isinstance(result.exception, SystemExit)
        ):
            raise result.exception
        return result

    return invoke
