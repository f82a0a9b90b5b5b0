"""What a server answers when it does not answer: OpenAI's error object with a status.

Knows neither requests nor the engine.
"""

from __future__ import annotations

import math
from typing import Any

from ..errors import OptionError, PromptError, ResourceError, SelfspecError, Unavailable

INVALID, OVERLOADED = "invalid_request_error", "overloaded_error"


class Problem(SelfspecError):
    """A refusal: its status, OpenAI's `type`, the field that is at fault, and a code."""

    def __init__(
        self,
        message: str,
        status: int = 400,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.param, self.code = status, kind, param, code
        self.retry_after = None if retry_after is None else max(1, math.ceil(retry_after))
        """Whole seconds until it is worth asking again."""

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        return {
            "error": {
                "message": str(self),
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}


def overloaded(message: str, retry_after: float) -> Problem:
    """Too much to do. Nothing was begun."""
    return Problem(message, 429, kind=OVERLOADED, code="overloaded", retry_after=retry_after)


def ending() -> Problem:
    """The server takes nothing new, as it is about to end."""
    said = "the server is about to end and takes no new requests; send it to another one"
    return Problem(said, 503, kind=OVERLOADED, code="shutting_down", retry_after=5)


def problem_of(error: BaseException) -> Problem:
    """What to answer for an error. Whatever is not foreseen is our own fault, and says no more."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, PromptError):
        return Problem(str(error), 400, code="invalid_prompt")
    if isinstance(error, OptionError):
        return Problem(str(error), 400, code="invalid_option")
    if isinstance(error, (ResourceError, Unavailable)):
        return Problem(str(error), 503, kind=OVERLOADED, code="unavailable", retry_after=5)
    said = "the server made a mistake with this request; its log says which, by the request's id"
    return Problem(said, 500, kind="server_error", code="internal_error")
