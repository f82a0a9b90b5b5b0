"""Answers of the server through real clients, whole and streamed, next to the library's own."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx
import openai
import pytest

from selfspec import LLM, SamplingParams
from selfspec.serve.service import Service

CHAT: Any = [{"role": "user", "content": "one two three one two three one two"}]
PROMPT = "abcabcabcabc"


def expected(llm: LLM, tokens: int = 24, **options: Any) -> Any:
    return llm.chat(CHAT, max_new_tokens=tokens, draft=None, **options)


def body_of(**more: Any) -> dict[str, Any]:
    return {"messages": CHAT, "temperature": 0, "max_tokens": 24, **more}


def lines_of(client: httpx.Client, path: str = "chat/completions", **more: Any) -> list[Any]:
    """The chunks of a stream."""
    with client.stream("POST", f"/v1/{path}", json={**more, "stream": True}) as found:
        assert found.status_code == 200, found.read()
        assert found.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in found.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


# ---- openai's own client


def test_the_sdk_gets_the_text_of_the_library(sdk: openai.OpenAI, llm: LLM) -> None:
    """Another template, other defaults, or drafts that change the text."""
    own = expected(llm)
    found = sdk.chat.completions.create(
        model="tiny", messages=CHAT, temperature=0, max_completion_tokens=24
    )
    assert found.choices[0].message.content == own.text
    assert found.choices[0].finish_reason == "length"
    assert found.usage is not None and found.usage.completion_tokens == len(own.tokens) == 24
    assert found.usage.prompt_tokens == len(llm.encode_chat(CHAT))
    assert [model.id for model in sdk.models.list()] == ["tiny"]
    assert sdk.models.retrieve("tiny").id == "tiny"


def test_the_sdk_streams(sdk: openai.OpenAI, llm: LLM) -> None:
    """Chunks that lack what a client reads: roles, ids, usage, the end."""
    stream = sdk.chat.completions.create(
        model="tiny", messages=CHAT, temperature=0, max_tokens=24, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    texts = [each.choices[0].delta.content or "" for each in chunks[:-1]]
    assert "".join(texts) == expected(llm).text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 24


def test_many_at_once_are_each_what_they_are_alone(sdk: openai.OpenAI, llm: LLM) -> None:
    """Streams that get each other's text, with openai's asynchronous client."""

    async def ask(asks: openai.AsyncOpenAI, number: int) -> str:
        stream = await asks.completions.create(
            model="tiny", prompt=PROMPT + str(number), max_tokens=12, seed=number, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=sdk.base_url, api_key="-") as asks:
            return await asyncio.gather(*(ask(asks, number) for number in range(8)))

    for number, text in enumerate(asyncio.run(all_of_them())):
        sampling = SamplingParams(temperature=1.0, seed=number)
        own = llm.generate(PROMPT + str(number), sampling=sampling, max_new_tokens=12, draft=None)
        assert text == own.text


def test_errors_are_what_the_sdk_knows(sdk: openai.OpenAI) -> None:
    """Errors without a type, or with a status that makes clients try again."""
    with pytest.raises(openai.NotFoundError, match="no model 'other'"):
        sdk.chat.completions.create(model="other", messages=CHAT)
    with pytest.raises(openai.BadRequestError) as refused:
        sdk.chat.completions.create(model="tiny", messages=CHAT, extra_body={"temprature": 1})
    assert refused.value.param == "temprature" and "temperature" in refused.value.message
    with pytest.raises(openai.BadRequestError, match="has 600 tokens and the context"):
        sdk.completions.create(model="tiny", prompt=[5] * 600)


# ---- what is asked


def test_choices_have_consecutive_seeds(client: httpx.Client, llm: LLM) -> None:
    """Answers that are all alike, or in another order, or prompts that are counted twice."""
    asked = {"prompt": [PROMPT, "xyz"], "n": 2, "seed": 5, "max_tokens": 8, "echo": True}
    found = client.post("/v1/completions", json=asked).json()
    texts = [choice["text"] for choice in found["choices"]]
    own = [
        prompt + llm.generate(prompt, sampling=SamplingParams(temperature=1.0, seed=5 + number),
                              max_new_tokens=8, draft=None).text
        for prompt in (PROMPT, "xyz") for number in range(2)
    ]  # fmt: skip
    assert texts == own and len(set(texts)) == 4
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2, 3]
    assert found["usage"]["prompt_tokens"] == len(PROMPT) + 3
    assert found["usage"]["completion_tokens"] == 32


@pytest.mark.parametrize(
    ("asked", "sampling"),
    [
        ({"temperature": 0, "top_p": 0.5, "seed": 3}, {}),
        ({"temperature": 0.7, "top_k": 5, "seed": 3}, {"temperature": 0.7, "top_k": 5, "seed": 3}),
        (
            {"top_p": 0.9, "min_p": 0.05, "seed": 3, "top_k": -1},
            {"temperature": 1.0, "top_p": 0.9, "min_p": 0.05, "seed": 3},
        ),
        (
            {"temperature": 0, "presence_penalty": 1, "frequency_penalty": 0.5},
            {"presence_penalty": 1, "frequency_penalty": 0.5},
        ),
        ({"temperature": 0, "repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
        ({"temperature": 0, "logit_bias": {"70": 100}}, {"logit_bias": {70: 100}}),
        (
            {"temperature": 0.9, "seed": -1},
            {"temperature": 0.9, "seed": 2**63 - 1},
        ),
    ],
)  # fmt: skip
def test_fields_reach_the_sampler(
    client: httpx.Client, llm: LLM, asked: dict[str, Any], sampling: dict[str, Any]
) -> None:
    """A field that is accepted and then forgotten."""
    found = client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 12, **asked})
    own = llm.generate(
        PROMPT, sampling=SamplingParams(**sampling), max_new_tokens=12, draft=None
    ).text
    assert found.json()["choices"][0]["text"] == own


def test_ends_and_least_lengths(client: httpx.Client, llm: LLM) -> None:
    """Answers that end where they should not, or do not end where they should."""
    own = llm.generate(PROMPT, max_new_tokens=12, eos=[], draft=None).tokens
    end = own[4]
    ask: dict[str, Any] = {"prompt": PROMPT, "temperature": 0, "max_tokens": 12}
    cut = client.post("/v1/completions", json=ask | {"stop_token_ids": [end]}).json()
    assert cut["choices"][0]["finish_reason"] == "stop"
    assert cut["usage"]["completion_tokens"] == own.index(end) + 1
    late = ask | {"stop_token_ids": [end], "min_tokens": 9}
    assert client.post("/v1/completions", json=late).json()["usage"]["completion_tokens"] >= 9
    never = ask | {"logit_bias": {"2": 100}, "max_tokens": 5}
    assert client.post("/v1/completions", json=never).json()["usage"]["completion_tokens"] == 1
    goes_on = never | {"ignore_eos": True}
    assert client.post("/v1/completions", json=goes_on).json()["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize("draft", ["none", "ngram", "early-exit", "hybrid", "auto"])
def test_a_request_chooses_how_to_draft(client: httpx.Client, llm: LLM, draft: str) -> None:
    """A drafter that changes the text, or is not the one that was named."""
    how = {"draft": draft, "stats": True}
    if draft not in ("none", "auto"):
        how |= {"control": "fixed", "most": 3}
    found = client.post("/v1/chat/completions", json=body_of(selfspec=how)).json()
    choice = found["choices"][0]
    assert choice["message"]["content"] == expected(llm).text
    stats = choice["selfspec"]
    assert (stats["drafted"] > 0) is (draft != "none") or draft in ("auto", "ngram", "hybrid")
    assert 0 <= stats["accepted"] <= stats["drafted"]
    assert len(stats["acceptance_by_position"]) < 24, "no draft is longer than what is wanted"
    assert stats["rounds"] > 0
    plain = client.post("/v1/chat/completions", json=body_of()).json()
    assert "selfspec" not in plain["choices"][0], "only for those who ask"


def test_a_stream_says_which_tokens_were_drafts(client: httpx.Client) -> None:
    """The page colours by this."""
    how = {"draft": "early-exit", "control": "fixed", "stats": True}
    chunks = [each["choices"][0] for each in lines_of(client, **body_of(selfspec=how))]
    told = [each["selfspec"] for each in chunks if "tokens" in each.get("selfspec", {})]
    assert sum(len(each["tokens"]) for each in told) == 24
    accepted = sum(each["accepted"] for each in told)
    assert accepted == chunks[-1]["selfspec"]["stats"]["accepted"] > 5
    assert all(each["accepted"] < max(2, len(each["tokens"])) for each in told)


# ---- known bugs of others


@pytest.mark.parametrize("draft", ["none", "early-exit", "hybrid"])
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_logprobs_are_those_without_drafts(
    client: httpx.Client, llm: LLM, draft: str, streamed: bool
) -> None:
    """Log-probabilities of drafts, or of other positions, under speculation."""
    own = expected(llm, logprobs=2).logprobs
    asked = body_of(logprobs=True, top_logprobs=2, selfspec={"draft": draft})
    if streamed:
        pieces = [each["choices"][0]["logprobs"] for each in lines_of(client, **asked)]
        content = [entry for piece in pieces if piece for entry in piece["content"]]
    else:
        found = client.post("/v1/chat/completions", json=asked).json()
        content = found["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == [each.logprob for each in own]
    tops = [[top["logprob"] for top in entry["top_logprobs"]] for entry in content]
    assert tops == [list(each.top.values()) for each in own]
    seen = [bytes(entry["bytes"]) for entry in content]
    written = b"".join(each for each in seen if not each.startswith(b"<|"))  # special tokens
    assert written.decode(errors="replace") == expected(llm).text


def test_completions_say_where_each_token_begins(client: httpx.Client) -> None:
    """Offsets that are those of tokens and not of characters."""
    ask = {"prompt": PROMPT, "temperature": 0, "max_tokens": 16, "logprobs": 1}
    choice = client.post("/v1/completions", json=ask).json()["choices"][0]
    logprobs, text = choice["logprobs"], choice["text"]
    assert len(logprobs["tokens"]) == len(logprobs["top_logprobs"]) == 16
    whole = [
        text[at : at + len(token)] == token
        for at, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True)
        if "\N{REPLACEMENT CHARACTER}" not in token and token.isprintable()
    ]
    assert len(whole) > 3 and all(whole)


@pytest.mark.parametrize("draft", ["none", "early-exit"])
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_nothing_comes_behind_a_stop(
    client: httpx.Client, llm: LLM, draft: str, streamed: bool
) -> None:
    """Text, tokens or usage behind a stop string that lies within accepted drafts."""
    text = expected(llm).text
    at = next(
        at
        for at, each in enumerate(text)
        if 3 < at < len(text) - 3 and "!" <= each <= "~" and text.find(each) == at
    )
    stop = text[at]
    asked = body_of(
        stop=[stop], logprobs=True, selfspec={"draft": draft},
    )  # fmt: skip
    own = expected(llm, stop=stop)
    if streamed:
        chunks = lines_of(client, **asked, stream_options={"include_usage": True})
        choices = [each["choices"][0] for each in chunks[:-1]]
        said = "".join(each["delta"].get("content", "") for each in choices)
        logprobs = [e for c in choices if c["logprobs"] for e in c["logprobs"]["content"]]
        finish, usage = choices[-1]["finish_reason"], chunks[-1]["usage"]
    else:
        found = client.post("/v1/chat/completions", json=asked).json()
        choice, usage = found["choices"][0], found["usage"]
        said, finish = choice["message"]["content"], choice["finish_reason"]
        logprobs = choice["logprobs"]["content"]
    assert said == text[:at] == own.text and finish == "stop"
    assert usage["completion_tokens"] == len(own.tokens) < 24
    shown = b"".join(bytes(entry["bytes"]) for entry in logprobs).decode(errors="replace")
    assert shown == said, "and no log-probability of what is not shown"


def test_only_the_last_chunk_has_a_finish_reason(client: httpx.Client) -> None:
    """Clients that stop reading at the first chunk with one."""
    asked = body_of(n=2, temperature=1, seed=1, selfspec={"draft": "early-exit"})
    chunks = lines_of(client, **asked)
    for index in (0, 1):
        mine = [c for each in chunks for c in each["choices"] if c["index"] == index]
        assert [each["finish_reason"] for each in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1]["finish_reason"] == "length" and mine[-1]["delta"] == {}
        assert mine[0]["delta"]["role"] == "assistant" and len(mine) > 3


def test_usage_ends_with_the_limit(client: httpx.Client) -> None:
    """Accepted drafts beyond max_tokens that are counted, or shown."""
    for most in (1, 2, 5, 7):
        how = {"draft": "early-exit", "control": "fixed", "most": 8}
        asked = body_of(max_tokens=most, selfspec=how, logprobs=True)
        found = client.post("/v1/chat/completions", json=asked).json()
        assert found["usage"]["completion_tokens"] == most
        assert len(found["choices"][0]["logprobs"]["content"]) == most


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
def test_a_client_that_leaves_frees_its_row(
    client: httpx.Client, service: Service, streamed: bool
) -> None:
    """Work that goes on after a disconnect."""
    worker = service.worker
    assert worker is not None
    asked = {**body_of(max_tokens=400, ignore_eos=True), "stream": streamed}
    with httpx.Client(base_url=client.base_url) as other:
        if streamed:
            with other.stream("POST", "/v1/chat/completions", json=asked) as found:
                next(found.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                other.post("/v1/chat/completions", json=asked, timeout=httpx.Timeout(60, read=0.02))
    end = time.monotonic() + 60
    while worker._running or len(worker._waiting):
        assert time.monotonic() < end
        time.sleep(0.005)
    cancelled = service.metrics.registry.get_sample_value(
        "selfspec:request_success_total", {"finished_reason": "cancelled"}
    )
    assert cancelled and cancelled >= 1


# ---- other routes


def test_tokens_and_text_and_back(client: httpx.Client, llm: LLM) -> None:
    """Counts that clients rely on before they send a prompt."""
    found = client.post("/tokenize", json={"prompt": "héllo", "model": "tiny"}).json()
    assert found["tokens"] == llm.encode("héllo") and found["count"] == 6
    assert client.post("/detokenize", json={"tokens": found["tokens"]}).json()["prompt"] == "héllo"
    chat = client.post("/tokenize", json={"messages": CHAT}).json()
    assert chat["tokens"] == llm.encode_chat(CHAT)
    assert chat["max_model_len"] == 512


def test_a_next_turn_reads_only_what_is_new(client: httpx.Client) -> None:
    """A conversation that is read from its beginning at every turn."""
    talk = [{"role": "user", "content": "tell me something long " * 4}]
    first = client.post("/v1/chat/completions", json=body_of(messages=talk)).json()
    talk += [first["choices"][0]["message"], {"role": "user", "content": "more"}]
    second = client.post("/v1/chat/completions", json=body_of(messages=talk)).json()["usage"]
    cached = second["prompt_tokens_details"]["cached_tokens"]
    assert cached > 90 and second["prompt_tokens"] > cached
