"""What a chat may reuse after a round was interrupted: only what the cache holds for good.

Every call inside a round is made to raise in turn, as Ctrl-C or a user's stopping criterion would,
and the turn that follows is compared with that of a model that knows nothing of the first.
"""

from __future__ import annotations

import inspect
import sys
from types import FrameType
from typing import Any

import pytest
from transformers.generation.stopping_criteria import StoppingCriteria

from selfspec import LLM, ScriptedDrafter
from selfspec.testing import tiny_model, tiny_tokenizer

FIRST = [{"role": "user", "content": "once upon a time, once upon"}]
OPTIONS: dict[str, Any] = {"max_new_tokens": 16, "eos": [], "logprobs": 2}
DEFAULTS: dict[str, Any] = {
    name: parameter.default
    for name, parameter in inspect.signature(LLM.generate).parameters.items()
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY
}
DRAFTS: dict[str, dict[str, Any]] = {
    "wrong": {"control": "fixed"},
    "hybrid": {"draft": "hybrid", "control": "fixed", "control_options": {"tokens": 7}},
    "early-exit": {"draft": "early-exit", "draft_options": {"layer": 2}, "control": "fixed"},
    "kv-subset": {
        "draft": "kv-subset",
        "draft_options": {"recent": 2, "sink": 1},
        "control": "fixed",
    },
    # its drafts pass through every layer, with other weights
    "quantised": {"draft": "quantised", "draft_options": {"first": "none"}, "control": "fixed"},
    "auto": {"draft": "auto"},
    "plain": {"draft": None},
}


class Interrupted(Exception):
    pass


class Interruption:
    """Raises at the n-th call within selfspec, and counts calls if there are fewer."""

    def __init__(self, at: int) -> None:
        self.at, self.seen = at, 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or "/selfspec/" not in frame.f_code.co_filename:
            return
        if self.seen == self.at:
            sys.setprofile(None)
            raise Interrupted
        self.seen += 1


class RaisesAfter(StoppingCriteria):
    """A user's criterion with a bug."""

    def __init__(self, tokens: int) -> None:
        self.left = tokens

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> bool:
        self.left -= 1
        if self.left < 0:
            raise Interrupted
        return False


@pytest.fixture(scope="module")
def llms() -> tuple[LLM, LLM]:
    model = tiny_model("llama", seed=4)
    return LLM.from_pretrained(model, tokenizer=tiny_tokenizer()), LLM.from_pretrained(
        model, tokenizer=tiny_tokenizer()
    )


def options_of(name: str, fresh: LLM) -> dict[str, Any]:
    if name != "wrong":
        return OPTIONS | DRAFTS[name]
    answer = fresh.chat(FIRST, **OPTIONS, draft=None).tokens
    return OPTIONS | DRAFTS[name] | {"draft": ScriptedDrafter([answer], wrong_every=2)}


def check_next_turn(llm: LLM, fresh: LLM, shown: list[int]) -> None:
    """The next turn begins with all that the first one wrote, wrong drafts that came after it
    included."""
    prompt = fresh.encode_chat(FIRST) + shown
    fresh._chats._kept.clear()
    options: Any = DEFAULTS | OPTIONS | {"draft": None}
    expected = fresh._start([prompt], options).finish()[0]
    found = llm._start([prompt], options, llm._chats).finish()[0]
    assert found.tokens == expected.tokens
    assert [each.logprob for each in found.logprobs or ()] == [
        each.logprob for each in expected.logprobs or ()
    ]


@pytest.mark.parametrize("name", DRAFTS)
def test_a_turn_after_an_interrupted_one_is_right(llms: tuple[LLM, LLM], name: str) -> None:
    """Rejected drafts that stay in a chat's cache: the round that was interrupted had kept its
    tokens and not yet its cache. A lucky pass needs drafts that are all right or none at all; the
    scripted ones are wrong every second time."""
    llm, fresh = llms
    options = options_of(name, fresh)
    whole = Interruption(10**9)
    sys.setprofile(whole)
    answer = fresh.chat(FIRST, **options).tokens
    sys.setprofile(None)
    for at in range(0, whole.seen, 1 + whole.seen // 60):
        llm._chats._kept.clear()
        sys.setprofile(Interruption(at))
        try:
            llm.chat(FIRST, **options)
        except Interrupted:
            pass
        finally:
            sys.setprofile(None)
        check_next_turn(llm, fresh, answer)


@pytest.mark.parametrize("name", [name for name in DRAFTS if name != "plain"])
@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 8])
def test_a_criterion_that_raises_leaves_no_draft_behind(
    llms: tuple[LLM, LLM], name: str, tokens: int
) -> None:
    """The same by a user's stopping criterion, in the middle of a block of drafts."""
    llm, fresh = llms
    options = options_of(name, fresh)
    answer = fresh.chat(FIRST, **options).tokens
    with pytest.raises(Interrupted):
        llm.chat(FIRST, **options, stopping_criteria=[RaisesAfter(tokens)])
    check_next_turn(llm, fresh, answer)
