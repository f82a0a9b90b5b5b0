"""What the OpenAPI description says beside the bodies: answers, and how requests are refused.

The framework describes bodies by their models and knows nothing else of what routes return. Here
are its additions, as data. Knows no engine, and nothing is checked by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from .schemas import BODIES

_STATUSES = {
    400: "A field is wrong or unknown, or prompt and answer are longer than the context.",
    401: "No key, or another one.",
    404: "Another model, or another path.",
    413: "The body is too large.",
    429: "Too many wait already. Retry-After says when to try again.",
    503: "The model is being loaded, or the server is about to end.",
    504: "The request took longer than a request may.",
}
_ANSWERS = ("/v1/chat/completions", "/v1/completions")
_STREAM = "With stream: true. The data of each event is a chunk as JSON, of the last one [DONE]."
_KEYLESS = ("/health", "/metrics", "/ready", "/version")


class Fault(BaseModel):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None
    code: str | None


class Refusal(BaseModel):
    """What every refused request gets."""

    error: Fault


class Cached(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: Cached


class Choice(BaseModel):
    """What both kinds of answers have in common."""

    index: int
    logprobs: dict[str, Any] | None
    finish_reason: str


class AnswerMessage(BaseModel):
    role: str
    content: str | None
    refusal: str | None
    tool_calls: list[dict[str, Any]] | None = None


class ChatChoice(Choice):
    message: AnswerMessage


class CompletionChoice(Choice):
    text: str


class Answered(BaseModel):
    id: str
    object: str
    created: int
    model: str
    usage: Usage


class ChatAnswer(Answered):
    """The answer to a conversation."""

    choices: list[ChatChoice]


class CompletionAnswer(Answered):
    """A text, or several, continued."""

    choices: list[CompletionChoice]


class Card(BaseModel):
    """A model."""

    id: str
    object: str
    created: int
    owned_by: str
    max_model_len: int


class Cards(BaseModel):
    object: str
    data: list[Card]


class Tokens(BaseModel):
    """Text as token ids."""

    tokens: list[int]
    count: int
    max_model_len: int


class Prompt(BaseModel):
    """Token ids as text."""

    prompt: str


class Version(BaseModel):
    version: str


_MODELS: Mapping[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatAnswer,
    "/v1/completions": CompletionAnswer,
    "/tokenize": Tokens,
    "/detokenize": Prompt,
    "/v1/models": Cards,
    "/v1/models/{name}": Card,
    "/version": Version,
}


class Described(FastAPI):
    """An app whose description also says what its routes answer. `keyed`: a key is needed."""

    def __init__(self, keyed: bool, **options: Any) -> None:
        super().__init__(**options)
        self._keyed = keyed

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            made = super().openapi()
            parts = made.setdefault("components", {}).setdefault("schemas", {})
            models: list[type[BaseModel]] = [Refusal, *_MODELS.values()]
            for model in models:
                own = model.model_json_schema(ref_template="#/components/schemas/{model}")
                parts |= own.pop("$defs", {}) | {model.__name__: own}
            for name in ("HTTPValidationError", "ValidationError"):
                parts.pop(name, None)  # the framework's, which nobody gets
            for path, kinds in made["paths"].items():
                for operation in kinds.values():
                    self._describe(path, operation)
            if self._keyed:
                made["components"]["securitySchemes"] = {
                    "key": {"type": "http", "scheme": "bearer"}
                }
        assert self.openapi_schema is not None
        return self.openapi_schema

    def _describe(self, path: str, operation: dict[str, Any]) -> None:
        if self._keyed and path not in _KEYLESS:
            operation["security"] = [{"key": []}]
        found = {"200": {"description": "Done."} | _content(path)}
        for status in _statuses(path):
            found[str(status)] = {"description": _STATUSES[status]} | _json("Refusal")
        if path == "/health":
            found["503"] = {"description": "The engine has broken."}
        operation["responses"] = found


def _content(path: str) -> dict[str, Any]:
    if path == "/metrics":
        return {"content": {"text/plain": {"schema": {"type": "string"}}}}
    if path not in _MODELS:
        return {}
    made = _json(_MODELS[path].__name__)
    if path in _ANSWERS:
        made["content"]["text/event-stream"] = {"schema": {"description": _STREAM}}
    return made


def _json(name: str) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{name}"}
    return {"content": {"application/json": {"schema": schema}}}


def _statuses(path: str) -> list[int]:
    """How a route may refuse."""
    if path in _KEYLESS:
        return [503] if path == "/ready" else []
    found = [401, 413, 503]
    if path in BODIES or path.startswith("/v1/models/"):
        found += [404]
    if path in BODIES:
        found += [400]
    if path in _ANSWERS:
        found += [429, 504]
    return sorted(found)
