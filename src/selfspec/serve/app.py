"""The routes. Each turns a body into what the worker is asked, and its events into an answer."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse

from .. import __version__
from ..errors import SelfspecError, nearest
from . import asked as asking
from .answers import Answer
from .asked import Asked
from .description import Described
from .gate import Gate, answer
from .invalid import problem_of_body
from .job import Event
from .problems import Problem, problem_of
from .schemas import Asking, ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from .service import Service
from .tickets import Tickets, unless_left
from .worker import Worker

PAGE = Path(__file__).with_name("page.html")
# Signs that many readers of streams take for the end of a line, as Python's splitlines does.
_ENDS_A_LINE = {code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029)}
_UNBUFFERED = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def create_app(service: Service) -> FastAPI:
    """The server as an ASGI app, for uvicorn or for others that run such apps."""
    keyed = bool(service.settings.keys)
    app = Described(keyed, title="selfspec", version=__version__, docs_url=None, redoc_url=None)
    app.add_middleware(Gate, service=service)
    if service.settings.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(service.settings.origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    app.add_exception_handler(SelfspecError, _refused)
    app.add_exception_handler(RequestValidationError, _refused)
    app.add_exception_handler(HTTPException, _refused)
    _add_answers(app, service)
    _add_words(app, service)
    _add_operations(app, service)
    return app


async def _refused(request: Request, error: Exception) -> Response:
    if isinstance(error, RequestValidationError):
        return answer(problem_of_body(error, request.url.path))
    found = answer(_problem(error))
    if isinstance(error, HTTPException) and error.status_code == 405:
        found.headers["Allow"] = (error.headers or {})["Allow"]  # the methods that there are
    return found


def _problem(error: Exception) -> Problem:
    if not isinstance(error, HTTPException):
        return problem_of(error)
    if isinstance(error.__cause__, Problem):  # while the body was read
        return error.__cause__
    said = "the body cannot be read as JSON in UTF-8; send an object"
    words = {400: said, 404: "there is no such path here", 405: "this path has other methods"}
    return Problem(words.get(error.status_code, str(error.detail)), error.status_code)


def _add_answers(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        return await _answered(service, request, body, asking.chat)

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue a text."""
        return await _answered(service, request, body, asking.completion)


def _add_words(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Response:
        """Text as token ids."""
        worker = _worker(service, body.model)
        if body.messages is not None:
            ids = worker.llm.encode_chat(asking.conversation(body.messages))
        else:
            ids = asking.ids_of(worker, body.prompt or "", body.add_special_tokens)
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": worker.context})

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Response:
        """Token ids as text."""
        worker = _worker(service, body.model)
        return JSONResponse({"prompt": asking.text_of(worker, body.tokens)})


def _add_operations(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models")
    async def models() -> Response:
        """The one model."""
        return JSONResponse({"object": "list", "data": [_card(service)]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        """What is known of a model."""
        _worker(service, name)
        return JSONResponse(_card(service))

    @app.get("/health")
    async def health() -> Response:
        """Whether the process is alive and its engine has not broken."""
        return Response(status_code=200 if service.healthy else 503)

    @app.get("/ready")
    async def ready() -> Response:
        """Whether it takes requests: not while it loads, and not while it drains."""
        service.at_work()
        return Response()

    @app.get("/metrics")
    async def metrics() -> Response:
        """Figures for Prometheus."""
        kind = "text/plain; version=0.0.4; charset=utf-8"
        return Response(service.metrics.text(), media_type=kind)

    @app.get("/version")
    async def version() -> Response:
        """Of selfspec."""
        return JSONResponse({"version": __version__})

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        """The page, where there is one."""
        if PAGE.is_file():
            return FileResponse(PAGE)
        return JSONResponse({"selfspec": __version__, "model": service.name})


def _card(service: Service) -> dict[str, Any]:
    worker = service.at_work()
    return {
        "id": service.name,
        "object": "model",
        "created": service.started,
        "owned_by": "selfspec",
        "max_model_len": worker.context,
    }


def _worker(service: Service, name: str | None) -> Worker:
    """The worker of the model that is named, or of the only one there is."""
    worker = service.at_work()
    if name is not None and name != service.name:
        raise Problem(
            f"there is no model {name[:100]!r} here; {nearest(name, [service.name])}",
            404,
            param="model",
            code="model_not_found",
        )
    return worker


async def _answered(
    service: Service, request: Request, body: Asking, ask: Callable[..., Asked]
) -> Response:
    worker = _worker(service, body.model)
    asked = ask(worker, body, service.settings.draft)
    request.state.visit.facts |= {"prompt_tokens": asked.prompt_tokens}
    found = Answer(asked, worker.llm.words, service.name)
    tickets = Tickets(worker, asked)
    tickets.submit()
    if body.stream:
        return await _stream(request, found, tickets)
    try:
        whole = await unless_left(request, _whole(found, tickets))
    finally:
        tickets.leave()
    if whole is None:
        return Response(status_code=499)  # nobody will read it
    request.state.visit.facts |= _written(found)
    return JSONResponse(whole)


async def _whole(found: Answer, tickets: Tickets) -> dict[str, Any]:
    async for index, event in tickets.events():
        found.choices[index].take(event)
    return found.whole()


async def _first(events: AsyncIterator[tuple[int, Event]]) -> tuple[int, Event]:
    return await anext(events)


async def _stream(request: Request, found: Answer, tickets: Tickets) -> Response:
    """A stream begins once its first row has: until then an error still has a status."""
    events = tickets.events()
    try:
        first = await unless_left(request, _first(events))
    except BaseException:
        tickets.leave()
        raise
    if first is None:
        tickets.leave()
        return Response(status_code=499)

    async def lines() -> AsyncIterator[str]:
        try:
            for chunk in found.opening():
                yield _line(chunk)
            async for index, event in events:
                for chunk in found.chunks(index, event):
                    yield _line(chunk)
            for chunk in found.closing():
                yield _line(chunk)
        except SelfspecError as error:
            yield _line(problem_of(error).body())
        except Exception as error:  # noqa: BLE001  (of a request's own code, logged already)
            yield _line(problem_of(error).body())
        finally:
            tickets.leave()
            request.state.visit.facts |= _written(found)
        yield "data: [DONE]\n\n"

    return StreamingResponse(lines(), headers=_UNBUFFERED, media_type="text/event-stream")


def _line(chunk: dict[str, Any]) -> str:
    text = json.dumps(chunk, ensure_ascii=False)
    return f"data: {text.translate(_ENDS_A_LINE)}\n\n"


def _written(found: Answer) -> dict[str, Any]:
    """What of an answer is logged."""
    ends = [choice.finish or "cancelled" for choice in found.choices]
    return {"completion_tokens": found.usage["completion_tokens"], "finish": ",".join(ends)}
