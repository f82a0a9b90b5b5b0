"""Running out of a device's memory: said with what was asked, what is free and what would fit.
Simulated, there is no GPU."""

from __future__ import annotations

import pytest
import torch

from selfspec.errors import ResourceError
from selfspec.llm import LLM
from selfspec.model import from_transformers as opening
from selfspec.model.compute import memory
from selfspec.model.compute.cuda import storage
from selfspec.model.compute.memory import cache_too_large, weights_too_large, work_too_large
from selfspec.model.from_transformers import from_transformers
from selfspec.model.layered import LayeredModel
from selfspec.testing import tiny_llm, tiny_model

CARD = torch.device("cuda:0")
LLAMA_7B = (32, 16, 32, 128)  # layers, rows, heads, size: half a megabyte a token in bfloat16


def refuse(*_: object, **__: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def test_a_cache_that_does_not_fit_says_what_would():
    """Bytes, tokens or rows off by a factor: keys and values are two, a row is many tokens."""
    text = str(cache_too_large(LLAMA_7B, 4096, torch.bfloat16, CARD, free=20 * 10**9))
    assert (
        "16 rows of 4096 tokens take 34.36 GB in bfloat16, and 20.00 GB are free on cuda:0" in text
    )
    assert "what would fit: 2384 tokens of text in each of 16 rows, or 9 rows of 4096" in text
    assert "bfloat16' halves" not in text
    assert 2384 * 16 * 2 * 32 * 32 * 128 * 2 <= 20e9 < 2385 * 16 * 2 * 32 * 32 * 128 * 2
    assert "dtype='bfloat16' halves it" in str(
        cache_too_large(LLAMA_7B, 4096, torch.float32, CARD, free=10**9)
    )
    assert "not even one token a row" in str(
        cache_too_large(LLAMA_7B, 4096, torch.bfloat16, CARD, free=10**6)
    )


def test_weights_that_do_not_fit_name_a_dtype_that_would():
    """A remedy that would fail the same way."""
    fits = str(weights_too_large("big", 7 * 10**9, torch.float32, CARD, free=24 * 10**9))
    assert (
        "28.00 GB in float32" in fits
        and "24.00 GB are free" in fits
        and "dtype='bfloat16', 14.00 GB, would fit" in fits
    )
    assert "would fit" not in str(
        weights_too_large("big", 70 * 10**9, torch.float32, CARD, free=24 * 10**9)
    )
    assert "would fit" not in str(
        weights_too_large("big", 7 * 10**9, torch.bfloat16, CARD, free=24 * 10**9)
    )


def test_work_that_does_not_fit_asks_for_less():
    """Advice for a batch given to a single text."""
    assert "fewer rows at a time (there are 16)" in str(work_too_large(16, 10**9, CARD, free=5))
    assert "a shorter text" in str(work_too_large(1, 10**9, CARD, free=5))


@pytest.mark.parametrize("kernel", ["plain", "static"])
def test_a_cache_that_cannot_be_made(monkeypatch, kernel):
    """torch's own error, in the middle of `generate`, without a word about rows and tokens; later
    calls must still work."""
    llm = LLM(from_transformers(tiny_model(), kernel=kernel, check=False), None, "tiny")
    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", refuse)
        with pytest.raises(
            ResourceError, match=r"for 3 rows of \d+ tokens take .* are free on cpu"
        ):
            llm.generate([[5], [6], [7]], max_new_tokens=4, draft=None)
    assert len(llm.generate([5], max_new_tokens=4, eos=[], draft=None).tokens) == 4


def test_a_cpu_that_has_not_the_memory_says_so(monkeypatch):
    """The system's promise taken for memory: it ends the process when the pages are touched."""
    shape, size = (2, 3, 2, 4), 2 * 2 * 3 * 2 * 512 * 4 * 4
    monkeypatch.setattr(memory, "LOOKED_AT", size - 1)
    monkeypatch.setattr(memory, "free_memory", lambda device: size)
    assert memory.room_for(shape, 512, torch.float32, torch.device("cpu"))[0].shape[3] == 512
    monkeypatch.setattr(memory, "free_memory", lambda device: size - 1)
    with pytest.raises(ResourceError, match=r"3 rows of 512 tokens .* fewer prompts"):
        memory.room_for(shape, 512, torch.float32, torch.device("cpu"))


def test_idle_storages_make_room(monkeypatch):
    """Memory that only waits for the next generation of its shape, while this one is refused."""
    model = from_transformers(tiny_model(), kernel="static", check=False)
    del (caches := [model.new_cache(rows, 64) for rows in (2, 3)])[:]
    room, tries = storage.room_for, []

    def tight(*arguments: object) -> object:
        tries.append(len(model.steps.pool._idle))
        if model.steps.pool._idle:
            raise cache_too_large(LLAMA_7B, 9, torch.bfloat16, CARD, free=0)
        return room(*arguments)

    monkeypatch.setattr(storage, "room_for", tight)
    assert caches == [] and model.new_cache(5, 64).rows == 5
    assert tries[0] > 0 and tries[1:] == [0]


def test_a_step_that_runs_out(monkeypatch):
    """The same in the middle of a step, where only the engine knows what is being computed; the
    next call must work."""
    llm = tiny_llm()
    with monkeypatch.context() as patch:
        patch.setattr(LayeredModel, "_run_layers", refuse)
        with pytest.raises(
            ResourceError,
            match="ran out in the middle of a step; keys and values of the 2 rows hold",
        ):
            llm.generate([[5], [6]], max_new_tokens=4, draft=None)
    assert len(llm.generate([5], max_new_tokens=4, eos=[], draft=None).tokens) == 4


def test_a_model_that_runs_out_while_it_is_packed(monkeypatch):
    """The same at load, after transformers is done: our own copies."""
    monkeypatch.setattr(opening, "own_block", refuse)
    with pytest.raises(
        ResourceError, match=r"ran out while its weights, 0\.00 GB in float32, were brought there"
    ):
        LLM.from_pretrained(tiny_model())


def test_free_memory_counts_what_torch_keeps(monkeypatch):
    """Memory that torch holds without using it counted as gone, so that advice would be too
    small."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 70)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 30)
    assert memory.free_memory(CARD) == 140 and memory.free_memory(torch.device("cpu")) > 140


@pytest.mark.parametrize("capacity", [1, 511, 512, 513])
def test_the_spare_slot_is_beside_what_was_asked_for(capacity):
    """A cache that has to move at its last token, because one of the slots asked for is the spare
    one."""
    model = from_transformers(tiny_model(), kernel="static", check=False)
    cache = model.new_cache(1, capacity)
    number = cache.storage.number
    cache.reserve(capacity)
    assert cache.capacity >= capacity and cache.storage.number == number
    cache.reserve(cache.capacity + 1)
    assert (
        cache.storage.number != number and cache.spare == cache.capacity == cache.keys.shape[3] - 1
    )
