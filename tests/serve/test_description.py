"""The OpenAPI description says what is answered. `scripts/clients` sends schemathesis over it."""

from __future__ import annotations

from typing import Any

import httpx
import jsonschema
import pytest

from selfspec.serve.schemas import IGNORED

ASKS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
    "/v1/completions": {"prompt": "x", "max_tokens": 2, "logprobs": 1},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [70]},
}


def described(client: httpx.Client) -> dict[str, Any]:
    found: dict[str, Any] = client.get("/openapi.json").json()
    return found


def check(whole: dict[str, Any], path: str, method: str, answer: httpx.Response) -> None:
    """The answer is one that the description knows."""
    said = whole["paths"][path][method]["responses"][str(answer.status_code)]
    kind = answer.headers["content-type"].partition(";")[0]
    schema = {**said["content"][kind]["schema"], "components": whole["components"]}
    jsonschema.validate(answer.json(), schema)


@pytest.mark.parametrize("path", ASKS)
def test_answers_and_refusals_are_described(client: httpx.Client, path: str) -> None:
    """A field of an answer, or a status, that the description does not have, and the framework's
    own error, which nobody gets."""
    whole = described(client)
    for body in (ASKS[path], {**ASKS[path], "temprature": 1}, {**ASKS[path], "model": "gpt"}):
        check(whole, path, "post", client.post(path, json=body))
    assert "422" not in str(whole["paths"]) and "HTTPValidationError" not in str(whole)
    for path in ("/v1/models", "/version"):
        check(whole, path, "get", client.get(path))
    check(whole, "/v1/models/{name}", "get", client.get("/v1/models/gpt"))


def test_bodies_are_described_with_what_is_ignored(client: httpx.Client) -> None:
    """A description that forbids what is taken, or allows what is refused."""
    parts = described(client)["components"]["schemas"]
    for name in ("ChatRequest", "CompletionRequest"):
        assert set(parts[name]["properties"]) >= IGNORED
        assert parts[name]["additionalProperties"] is False
    schema = {**parts["TokenizeRequest"], "components": {"schemas": parts}}
    both = {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}
    for body, status in ((both, 400), ({}, 400), ({"prompt": "x"}, 200)):
        assert client.post("/tokenize", json=body).status_code == status
        fits = jsonschema.Draft202012Validator(schema).is_valid(body)
        assert fits is (status == 200)


def test_keys_are_described_where_they_are_wanted(serving: Any, client: httpx.Client) -> None:
    """A client made from the description that sends no key."""
    assert "securitySchemes" not in described(client)["components"]
    with serving(keys=["k"]) as (closed, _):
        whole = described(closed)
        assert whole["components"]["securitySchemes"]
        for path, kinds in whole["paths"].items():
            for method, operation in kinds.items():
                wanted = closed.request(method, path.replace("{name}", "tiny")).status_code == 401
                assert bool(operation.get("security")) is wanted, path


def test_a_method_that_is_not_there_names_those_that_are(client: httpx.Client) -> None:
    """405 without an Allow header, which HTTP wants."""
    assert client.put("/health").headers["Allow"] == "GET"
    assert client.get("/v1/completions").headers["Allow"] == "POST"
