"""The door of the API: what users pass is taken where it has one meaning, and refused by an error
of ours otherwise. Each was a traceback, or silently something else, before there was a door."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from selfspec import LLM, ModelError, OptionError, PromptError, SamplingParams, ScriptedDrafter
from selfspec.core import door
from selfspec.core.json_text import from_json
from selfspec.core.options import numbers, with_options
from selfspec.draft.from_layers.early_exit import EarlyExit
from selfspec.testing import tiny_llm, tiny_model, tiny_tokenizer

IDS = [104, 101, 108, 108, 111]
SHORT: dict[str, Any] = {"max_new_tokens": 3, "draft": None, "eos": []}
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return tiny_llm()


@pytest.mark.parametrize(
    "prompt",
    [
        np.array(IDS),
        np.array(IDS, dtype=np.uint8),
        torch.tensor(IDS),
        torch.tensor(IDS, dtype=torch.int16),
        tuple(IDS),
        [np.int64(each) for each in IDS],
        range(104, 109),
    ],
    ids=str,
)
def test_ids_of_other_libraries_are_ids(llm: LLM, prompt: Any) -> None:
    """An array that fails on its truth value, or numpy's numbers taken for several prompts."""
    plain = [int(each) for each in prompt]
    assert llm.generate(prompt, **SHORT).tokens == llm.generate(plain, **SHORT).tokens
    assert llm.generate([prompt, plain], **SHORT)[0].tokens == llm.generate(plain, **SHORT).tokens
    assert llm.stream(prompt, **SHORT) is not None


@pytest.mark.parametrize(
    "prompts",
    [
        None,
        5,
        3.5,
        True,
        [1.5, 2.0],
        [True, False],
        [1, "two"],
        [1, None],
        ["one", 2],
        [[1], 2],
        [[1, 2.5]],
        [[]],
        [],
        [None],
        b"hello",
        [b"hello"],
        {"input_ids": IDS},
        {1, 2},
        pytest.param(iter(IDS), id="an iterator"),
        np.array([IDS, IDS]),
        np.array([1.0, 2.0]),
        np.array([True]),
        np.array(5),
        torch.tensor([IDS]),
        torch.tensor([1.0]),
        [torch.tensor(1)],
        [-1],
        [10**30],
        "half \ud800 of a pair",
        ["fine", "\udcff"],
    ],
    ids=door.shown,
)
def test_what_is_no_prompt_is_a_prompt_error(llm: LLM, prompts: Any) -> None:
    """Types that end in a traceback, and bytes that would be read as ids."""
    with pytest.raises(PromptError):
        llm.generate(prompts, **SHORT)


@pytest.mark.parametrize(
    "option",
    [
        {"max_new_tokens": 3.0},
        {"max_new_tokens": "3"},
        {"max_new_tokens": None},
        {"max_new_tokens": True},
        {"max_new_tokens": math.inf},
        {"max_new_tokens": math.nan},
        {"stop": 5},
        {"stop": ""},
        {"stop": [""]},
        {"stop": [1]},
        {"stop": b"x"},
        {"stop": "\ud800"},
        {"eos": "x"},
        {"eos": [1.5]},
        {"eos": [True]},
        {"eos": torch.tensor([[1]])},
        {"eos": [-1]},
        {"eos": [10**6]},
        {"eos": {}},
        {"draft": 123},
        {"draft": ""},
        {"draft": []},
        {"draft": EarlyExit},
        {"draft": "ngram", "draft_options": [1]},
        {"draft": "ngram", "draft_options": ""},
        {"draft": "ngram", "draft_options": {1: 2}},
        {"draft": "ngram", "draft_options": {"longest": 2.5}},
        {"draft": "ngram", "draft_options": {"least": math.nan}},
        {"draft": "ngram", "control": ""},
        {"draft": "ngram", "control": 0},
        {"draft": "ngram", "control_options": []},
        {"draft": "auto", "control_options": 0},
        {"draft": ScriptedDrafter([[10**6] * 9])},
        {"draft": ScriptedDrafter([[-7] * 9])},
        {"sampling": []},
        {"sampling": 0},
        {"sampling": ""},
        {"sampling": {"temperature": 1}},
        {"logprobs": 1.5},
        {"logprobs": True},
        {"logprobs": -1},
        {"logits_processors": 5},
        {"logits_processors": [5]},
        {"stopping_criteria": None},
        {"stopping_criteria": "x"},
    ],
    ids=str,
)
def test_wrong_options_are_option_errors(llm: LLM, option: Mapping[str, Any]) -> None:
    """Values that end in a traceback, and empty ones that silently became the default."""
    with pytest.raises(OptionError):
        llm.generate(IDS, **{**SHORT, **option})


def test_numbers_of_other_libraries_are_numbers(llm: LLM) -> None:
    """numpy's whole numbers refused where Python's are taken; one id to stop at without a list."""
    expected = llm.generate(IDS, **SHORT).tokens
    for count in (np.int64(3), np.uint8(3)):
        assert llm.generate(IDS, **{**SHORT, "max_new_tokens": count}).tokens == expected
    for eos in (expected[0], np.int64(expected[0]), torch.tensor([expected[0]])):
        assert llm.generate(IDS, **{**SHORT, "eos": eos}).finish_reason == "eos"


@pytest.mark.parametrize("threads", [0, -3, 10**6, 2**70, 1.5, "2", True, door.THREADS + 1])
def test_threads_within_what_can_compute(threads: Any) -> None:
    """So many threads that the process hangs or is ended."""
    with pytest.raises(OptionError, match="threads="):
        LLM.from_pretrained(tiny_model(), threads=threads)


@pytest.mark.parametrize(
    "option",
    [
        {"model": 5},
        {"model": None},
        {"model": b"demo"},
        {"model": "a\0b"},
        {"dtype": 5},
        {"dtype": []},
        {"device": None},
        {"device": []},
        {"device": {}},
        {"device": -1},
        {"kernel": 5},
        {"kernel": []},
        {"weights": []},
        {"weights": 5},
        {"adapter": 5},
        {"adapter": []},
        {"tokenizer": 5},
        {"trust_remote_code": "no"},
        {"long_context": 1},
    ],
    ids=str,
)
def test_wrong_ways_to_load(option: Mapping[str, Any]) -> None:
    """A traceback, and text such as "no" that counts as true."""
    with pytest.raises(OptionError):
        LLM.from_pretrained(**{"model": tiny_model(), **option})


def test_a_tokenizer_that_knows_more_tokens_than_the_model() -> None:
    """An id that reads beyond the embedding."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<beyond>"])
    llm = LLM.from_pretrained(tiny_model(), tokenizer=tokenizer)
    for ask in (llm.generate, lambda text, **_: llm.chat([{"role": "user", "content": text}])):
        with pytest.raises(PromptError, match="token 259"):
            ask("a <beyond> b", **SHORT)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("draft", [None, "ngram"])
def test_logits_that_are_no_numbers(rows: int, draft: str | None) -> None:
    """Greedy decoding that writes token 0 for ever where sampling says what is wrong."""
    model = tiny_model()
    model.model.layers[1].mlp.down_proj.weight.data[0, 0] = math.nan
    from selfspec.model.from_transformers import from_transformers

    llm = LLM(from_transformers(model, check=False), tiny_tokenizer(), "broken")
    with pytest.raises(ModelError, match="not finite"):
        llm.generate([IDS] * rows, **{**SHORT, "draft": draft})


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1e39},
        {"temperature": 1e-40},
        {"repetition_penalty": 1e39},
        {"repetition_penalty": 1e-40},
        {"logit_bias": {3: 1e39}},
        {"logit_bias": {3: -1e300}},
    ],
    ids=str,
)
def test_numbers_that_overflow_name_themselves(params: Any) -> None:
    """The model's weights blamed, or nothing said, for a number of the user's."""
    with pytest.raises(OptionError, match=next(iter(params))):
        SamplingParams(**{"temperature": 1.0, **params})


# ---------------------------------------------------------------------------------- conversations


@pytest.mark.parametrize(
    "messages",
    [
        [],
        None,
        "hello",
        5,
        {"role": "user"},
        ["hello"],
        [{"content": "x"}],
        [{"role": 1, "content": "x"}],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": b"x"}],
        [{"role": "user", "content": "\udcff"}],
        [{"role": "\ud800", "content": "x"}],
    ],
    ids=door.shown,
)
def test_what_is_no_conversation(llm: LLM, messages: Any) -> None:
    """Tracebacks from inside a template, or "None" written into the prompt."""
    with pytest.raises(PromptError):
        llm.chat(messages, **SHORT)


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{% for m in messages %}",
        "{{ messages[99].content + 1 }}",
        "{{ 1 / 0 }}",
        "{{ nothing.of.this }}",
        "{% for x in range(10 ** 9) %}{% endfor %}",
        "{{ messages.__class__.__mro__ }}{{ ''.__class__.__base__.__subclasses__() }}",
    ],
)
def test_what_a_template_raises_is_a_prompt_error(template: str) -> None:
    """jinja2's own errors, and whatever a template's expressions raise."""
    llm = tiny_llm()
    assert llm.tokenizer is not None
    llm.tokenizer.chat_template = template
    with pytest.raises(PromptError, match="chat template"):
        llm.chat(HELLO, **SHORT)


def test_the_reason_of_a_template_is_said() -> None:
    """An error that says that there was one, and not which."""
    llm = tiny_llm()
    assert llm.tokenizer is not None
    llm.tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(PromptError, match="roles must alternate"):
        llm.chat(HELLO, **SHORT)


# -------------------------------------------------------------------------------------- small doors


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 50_000, '"\\ud800"', '{"a": "\\uDFFF x"}', b"\xff", "{"]
)
def test_json_that_cannot_be_read_is_a_value_error(text: str | bytes) -> None:
    """RecursionError, and half of a pair that fails much later, when it is written."""
    with pytest.raises(ValueError):
        from_json(text)


def test_ranges_that_fill_the_memory() -> None:
    """1-9999999999 on the command line."""
    with pytest.raises(OptionError, match="more than"):
        numbers("1-9999999999", "--layers")


@pytest.mark.parametrize("value", [math.nan, math.inf, -1, "5", True])
def test_a_limit_of_minutes(value: Any) -> None:
    """A limit that is never reached, or reached at once, without a word."""
    with pytest.raises(OptionError, match="--max-minutes"):
        door.minutes("--max-minutes", value)


def test_an_option_without_a_value_it_needs() -> None:
    """A required option that is a TypeError of a constructor."""
    from dataclasses import dataclass

    @dataclass(frozen=True)
    class Needs:
        size: int

    with pytest.raises(OptionError, match="size"):
        with_options(Needs, {}, "this")


def test_errors_can_be_printed_whatever_was_passed() -> None:
    """A repr that raises, is endless, or cannot be written to a terminal."""

    class Bad:
        def __repr__(self) -> str:
            raise ZeroDivisionError

    assert "Bad" in door.shown(Bad())
    assert len(door.shown("x" * 10**6)) < 100
    io.BytesIO().write(door.shown("\ud800").encode())
