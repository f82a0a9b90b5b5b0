"""A real server on loopback, with a tiny model whose drafts are often kept."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

from selfspec import LLM
from selfspec.serve.running import served
from selfspec.serve.service import Service
from selfspec.serve.settings import Limits, Settings
from selfspec.testing import tiny_tokenizer
from test_drafter_conformance import alike


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """A command's handlers on streams that are gone by the next test."""
    loggers = [logging.getLogger(name) for name in ("selfspec.serve", "uvicorn")]
    before = [(each.handlers, each.propagate, each.level) for each in loggers]
    yield
    for each, (handlers, propagate, level) in zip(loggers, before, strict=True):
        each.handlers, each.propagate = handlers, propagate
        each.setLevel(level)


@pytest.fixture(scope="session")
def llm() -> LLM:
    return LLM.from_pretrained(alike(), tokenizer=tiny_tokenizer())


@pytest.fixture(scope="session")
def serving(llm: LLM) -> Callable[..., Any]:
    """A context with a server of these settings: its client and its service."""

    @contextlib.contextmanager
    def run(**settings: Any) -> Iterator[tuple[httpx.Client, Service]]:
        limits = settings.pop("limits", Limits(rows=4))
        service = Service(Settings(limits, name="tiny", **settings))
        service.adopt(llm)
        with served(service) as url, httpx.Client(base_url=url, timeout=60) as client:
            yield client, service
        assert service.worker is not None and not service.worker.alive

    return run


@pytest.fixture(scope="session")
def server(serving: Any) -> Iterator[tuple[httpx.Client, Service]]:
    """One that many tests share."""
    with serving() as both:
        yield both


@pytest.fixture
def client(server: tuple[httpx.Client, Service]) -> httpx.Client:
    return server[0]


@pytest.fixture
def service(server: tuple[httpx.Client, Service]) -> Service:
    return server[1]


def api(client: httpx.Client) -> str:
    """Where openai's clients find the server."""
    return str(client.base_url).rstrip("/") + "/v1"


@pytest.fixture
def sdk(client: httpx.Client) -> openai.OpenAI:
    return openai.OpenAI(base_url=api(client), api_key="-", max_retries=0)
