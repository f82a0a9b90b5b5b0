"""Caches that grow in the middle of texts, those of drafters as well, and what is drafted at a
text's end. Most texts of the suite fit into one chunk, so that nothing is ever moved."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from selfspec import ScriptedDrafter
from selfspec.control.registry import make_controller
from selfspec.core.contract import Budget, Draft
from selfspec.core.sampling import Sampler, SamplingParams
from selfspec.draft.base import Drafter, DraftSession, Target
from selfspec.engine.generation import Generation
from selfspec.engine.row import Request
from selfspec.model.compute import cache as caches
from selfspec.model.compute.cache import KVCache
from selfspec.model.compute.uneven_cache import UnevenCache
from test_drafter_conformance import DRAFTERS, PROMPTS, World

NEW = 70
HELLO = [{"role": "user", "content": "once upon"}]
FIXED = make_controller("fixed", {"tokens": 5})


@functools.cache
def here() -> tuple[World, list[list[int]]]:
    """A world, and what is written there where nothing grows."""
    world = World("alike")
    results = world.llm.generate(PROMPTS, max_new_tokens=NEW, eos=[], draft=None)
    return world, [result.tokens for result in results]


@pytest.fixture
def grown(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Caches of few slots, and how they grow."""
    _, grow, log = here(), KVCache._grow, list[tuple[int, ...]]()

    def note(cache: KVCache, capacity: int) -> None:
        log.append((id(cache), cache.capacity, int(cache.lengths.max())))
        grow(cache, capacity)

    monkeypatch.setattr(caches, "CHUNK", 8)
    monkeypatch.setattr(KVCache, "_grow", note)
    monkeypatch.setattr(Generation, "_slots_wanted", lambda self, request: len(request.prompt))
    return log


@pytest.mark.parametrize("name", DRAFTERS)
def test_texts_past_every_growth(name: str, grown: list[tuple[int, ...]]) -> None:
    """Values that stay behind when keys move, or a row's that are moved to another's place. A
    lucky pass would be a cache that is empty when it grows: what it held is counted."""
    world, texts = here()
    drafter = DRAFTERS[name][0](world, texts)
    control = None if drafter.decides_how_much else FIXED
    how: Any = {"max_new_tokens": NEW, "eos": [], "draft": drafter, "control": control}
    results = world.llm.generate(PROMPTS, **how)
    assert [result.tokens for result in results] == texts
    assert any(held > 8 for _, _, held in grown), "no cache grew that held something"


def test_a_chat_past_growth(grown: list[tuple[int, ...]]) -> None:
    """The cache that a chat keeps is another one after it grew."""
    llm, messages = here()[0].llm, list(HELLO)
    for _ in range(3):
        how: Any = {"max_new_tokens": 24, "eos": [], "control": "fixed"}
        answer = llm.chat(messages, **how, draft="hybrid")
        alone = llm.generate(llm.encode_chat(messages), max_new_tokens=24, eos=[], draft=None)
        assert answer.tokens == alone.tokens
        messages += [{"role": "assistant", "content": answer.text}, *HELLO]
    assert answer.stats.cached_prompt_tokens > 0 and any(held > 8 for _, _, held in grown)


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("what", ["slots", "rows"])
def test_growing_moves_all_that_is_known(what: str, uneven: bool) -> None:
    """Keys, values, lengths: each compared bit for bit with what was there. A layer of a row may
    know more than all others."""
    on = torch.float32, torch.device("cpu")
    cache = UnevenCache(3, [(2, 4), (1, 3)], 8, *on) if uneven else KVCache((2, 3, 2, 4), 8, *on)
    layers = [cache.of_layer(layer) for layer in range(2)]
    before = [tensor.normal_().clone() for layer in layers for tensor in layer]
    cache._lengths, cache._computed = ([[0, 1], [2, 3], [4, 5]] for _ in range(2))
    slots = cache.capacity
    cache.reserve(slots + 1) if what == "slots" else cache.reserve_rows(5)
    assert (cache.capacity > slots) == (what == "slots")
    now = [tensor for layer in range(2) for tensor in cache.of_layer(layer)]
    for old, new in zip(before, now, strict=True):
        assert torch.equal(new[:3, :, :5], old[:, :, :5])
    for counts in (cache.lengths, cache.computed):
        assert counts[:3].ravel().tolist() == [*range(6)] and not counts[3:].any()


# ------------------------------------------------------------------------------------ at the end


@dataclass(frozen=True)
class Noting(Drafter):
    """Drafts what it may, and notes how much that is."""

    name = "noting"
    drafter: ScriptedDrafter
    asked: list[tuple[int, int]] = field(default_factory=list)

    def start(self, target: Target) -> DraftSession:
        return _Noting(self.drafter.start(target), self.asked)


class _Noting(DraftSession):
    def __init__(self, inner: DraftSession, asked: list[tuple[int, int]]) -> None:
        self._inner, self._asked = inner, asked

    def admit(self, *given: Any) -> None:
        self._inner.admit(*given)

    def propose(self, rows: Sequence[int], texts: Any, budget: Budget) -> Sequence[Draft]:
        self._asked += [(len(text), most) for text, most in zip(texts, budget.tokens, strict=True)]
        return self._inner.propose(rows, texts, budget)


@pytest.mark.parametrize("new", [3, 4, 7, 15])
def test_nothing_is_drafted_that_has_no_room(new: int) -> None:
    """A draft for the place of the model's own last token, which nobody would ever see: work for
    nothing, and at the end of the context a slot that is not there."""
    world, texts = here()
    noting = Noting(ScriptedDrafter(texts))
    prompt = PROMPTS[0]
    request = Request(prompt, Sampler(SamplingParams(), 0), new, drafter=noting, controller=FIXED)
    list(Generation(world.llm.model, [request]))
    assert noting.asked, "it was asked for drafts"
    for length, most in noting.asked:
        assert most <= len(prompt) + new - length - 1
    assert any(most == len(prompt) + new - length - 1 for length, most in noting.asked)
