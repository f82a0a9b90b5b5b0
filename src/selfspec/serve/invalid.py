"""Pydantic's findings about a body, as one sentence about one field."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError

from ..errors import nearest
from .problems import Problem
from .schemas import ChatRequest, CompletionRequest, SelfspecFields

_KINDS = {"str", "int", "float", "bool", "dict", "list", "none", "constrained"}  # of a union
_NO_OBJECT = {"missing", "model_attributes_type", "model_type"}
_NAMED = re.compile(r"[A-Za-z_]\w{0,60}")


def problem_of_body(error: RequestValidationError) -> Problem:
    """The first finding, with the field's name. An unknown field comes first: what else is wrong
    may be because of it."""
    found = sorted(error.errors(), key=lambda each: each["type"] != "extra_forbidden")[0]
    param = _param(found["loc"][1:])
    if found["type"] == "json_invalid" or not param and found["type"] in _NO_OBJECT:
        said = "the body is no JSON object; send one, with 'Content-Type: application/json'"
        return Problem(said, code="invalid_json")
    if found["type"] == "extra_forbidden":
        known = {*ChatRequest.model_fields, *CompletionRequest.model_fields}
        if param.startswith("selfspec."):
            known = {*SelfspecFields.model_fields}
        said = f"there is no field {param!r}; {nearest(param.rpartition('.')[2], known)}"
        return Problem(said, param=param, code="unknown_field")
    words = found["msg"].removeprefix("Value error, ")
    where = f"{param}: " if param else ""
    return Problem(f"{where}{words}", param=param or None, code="invalid_value")


def _param(place: Sequence[Any]) -> str:
    """Where in the body, without the names that pydantic gives to the kinds of a union."""
    parts = [
        str(each)
        for each in place
        if isinstance(each, int) or (_NAMED.fullmatch(str(each)) and each not in _KINDS)
    ]
    return ".".join(parts)
