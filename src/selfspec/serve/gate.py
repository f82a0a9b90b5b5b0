"""Around all routes: a request's id, its key, the size of its body, its line in the log.

The log has no prompts, no answers and no keys. An error that nobody foresaw is answered with
OpenAI's error object and logged with its traceback.
"""

from __future__ import annotations

import json
import logging
import time
import traceback
import uuid
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .problems import Problem, problem_of
from .service import Service

log = logging.getLogger("selfspec.serve")

OPEN = frozenset({"/", "/health", "/metrics", "/openapi.json", "/ready", "/version"})
"""Paths that need no key."""
_ID = 128  # characters of a request's id that a client may choose


class Lines(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        made: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            made["traceback"] = "".join(traceback.format_exception(*record.exc_info))
        return json.dumps(made)


def answer(problem: Problem) -> Response:
    """A refusal as a response. In ASCII, as it may quote anything."""
    body = json.dumps(problem.body())
    return Response(body, problem.status, problem.headers, "application/json")


class Gate:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        visit = Visit(scope, self._service.settings.limits.body, receive, send)
        try:
            self._check(scope, visit)
            await self._app(scope, visit.receive, visit.send)
        except Exception as error:
            problem = problem_of(error)
            if problem.status == 500:
                log.exception("a request has failed", extra={"fields": {"id": visit.id}})
            if visit.status:
                raise  # its answer has begun: the connection breaks
            await answer(problem)(scope, visit.receive, visit.send)
        finally:
            visit.log()
            self._service.metrics.http.labels(visit.route, visit.status or 499).inc()

    def _check(self, scope: Scope, visit: Visit) -> None:
        key = visit.headers.get("authorization")
        if scope["path"] not in OPEN and not self._service.knows(key):
            said = "this server wants a key that it knows; send 'Authorization: Bearer KEY'"
            raise Problem(said, 401, kind="authentication_error", code="invalid_api_key")
        length = visit.headers.get("content-length", "0")
        if length.isdecimal() and int(length) > visit.most:
            raise visit.too_large()


class Visit:
    """One request as it passes."""

    def __init__(self, scope: Scope, most: int, receive: Receive, send: Send) -> None:
        self.headers, self.most = Headers(scope=scope), most
        self._scope, self._receive, self._send = scope, receive, send
        self._begin, self._read = time.monotonic(), 0
        self.id = _usable(self.headers.get("x-request-id")) or uuid.uuid4().hex
        self.status = 0
        self.facts: dict[str, Any] = {}  # what the route adds to the line in the log
        scope.setdefault("state", {})["visit"] = self

    async def receive(self) -> Message:
        message = await self._receive()
        self._read += len(message.get("body", b""))
        if self._read > self.most:
            raise self.too_large()
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(scope=message)["X-Request-Id"] = self.id
        await self._send(message)

    def too_large(self) -> Problem:
        said = f"the body is larger than {self.most} bytes, the limit of this server; send less"
        return Problem(said, 413, code="body_too_large")

    @property
    def route(self) -> str:
        """The route's own path, which has no values of a client's."""
        return getattr(self._scope.get("route"), "path", "unknown")

    def log(self) -> None:
        fields = {
            "id": self.id,
            "method": self._scope["method"][:16],
            "route": self.route,
            "status": self.status or 499,
            "seconds": round(time.monotonic() - self._begin, 4),
            **self.facts,
        }
        log.info("request", extra={"fields": fields})


def _usable(name: str | None) -> str:
    """A client's id, if it can be written into a header and a log as it is."""
    fits = name and len(name) <= _ID and name.isascii() and name.isprintable()
    return name if fits and name else ""
