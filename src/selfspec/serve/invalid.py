"""Pydantic's findings about a body, as one sentence about one field."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError

from ..errors import nearest
from .problems import Problem
from .schemas import BODIES, SelfspecFields

_KINDS = {"str", "int", "float", "bool", "dict", "list", "none", "constrained"}  # of a union
_NO_OBJECT = {"missing", "model_attributes_type", "model_type"}
_NAMED = re.compile(r"[A-Za-z_]\w{0,60}")


def problem_of_body(error: RequestValidationError, path: str) -> Problem:
    """One finding, with the field's name. An unknown field comes first: what else is wrong may be
    because of it. Then the deepest: of a union's, it belongs to the kind that was meant."""
    findings = error.errors()
    found = max(findings, key=lambda each: (each["type"] == "extra_forbidden", len(each["loc"])))
    param = _param(found["loc"][1:])
    if found["type"] == "json_invalid" or (not param and found["type"] in _NO_OBJECT):
        said = "the body is no JSON object; send one, with 'Content-Type: application/json'"
        return Problem(said, code="invalid_json")
    if found["type"] == "extra_forbidden":
        inside, _, name = param.rpartition(".")
        kind = SelfspecFields if inside == "selfspec" else None if inside else BODIES.get(path)
        hint = nearest(name, kind.model_fields) if kind else "leave it out"
        return Problem(f"there is no field {param!r}; {hint}", param=param, code="unknown_field")
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
