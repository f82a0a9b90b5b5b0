"""Memory after thousands of requests and after a day of chats: is it flat after the first hundred?

Requests are of mixed lengths and kinds: alone, in batches, streamed to the end or left, sampled,
with every drafter, refused at the door, ended by a user's criterion that raises. The first ones are
the longest, so that what follows needs no more. Beside the size of the process, which an allocator
makes noisy, this counts what cannot be noise: Python's objects, Python's bytes (numpy's among
them), and the bytes of tensors. The caches of chats are dropped before each reading, since their
size is that of the last texts; how many there are is counted.
"""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import psutil
import torch

from selfspec import LLM, SamplingParams
from selfspec.errors import SelfspecError
from selfspec.testing import tiny_llm

EVERY = 100
DRAFTERS: list[dict[str, Any]] = [
    {},
    {"draft": None},
    *({"draft": name, "control": "fixed"} for name in ("ngram", "recycle", "jacobi", "hybrid")),
    *({"draft": name, "control": "fixed"} for name in ("early-exit", "layer-skip", "kv-subset")),
    {"draft": "quantised", "control": "confidence"},
    {"draft": "early-exit", "control": "cost-aware"},
]
OBJECTS, BYTES = 0.5, 400.0
"""That a request may leave behind: less than one of anything. In the first few hundred, tables by
length and tries of the controllers still fill: up to 210 bytes a request, by chance."""


class Enough(Exception):
    """What a user's criterion raises."""


@dataclass(frozen=True)
class Reading:
    """What was in use after so many requests or turns."""

    done: int
    objects: int
    python_bytes: int
    tensor_bytes: int
    resident_bytes: int
    kept_chats: int


@dataclass(frozen=True)
class Measured:
    """Readings of a whole run."""

    model: str
    seed: int
    requests: list[Reading]
    turns: list[Reading]

    @property
    def flat(self) -> bool:
        return not self.growth(self.requests) + self.growth(self.turns)

    @staticmethod
    def growth(readings: list[Reading]) -> list[str]:
        """What grew from every reading to the next. What grows once is no leak: a module that is
        imported when it is first needed, or the lines of a file for a warning."""
        stretches, found = list(pairwise(readings)), []
        for name, least in (("objects", OBJECTS), ("python_bytes", BYTES), ("tensor_bytes", 1.0)):
            grown = [getattr(new, name) - getattr(old, name) for old, new in stretches]
            done = [new.done - old.done for old, new in stretches]
            if all(more > least * count for more, count in zip(grown, done, strict=True)):
                found.append(f"{name} grew by {sum(grown)} in {sum(done)}")
        if max(each.kept_chats for each in readings) > 2:
            found.append("chats that ended are kept")
        return found

    def as_dict(self) -> dict[str, Any]:
        grown = {"requests": self.growth(self.requests), "turns": self.growth(self.turns)}
        return {**asdict(self), "grown": grown, "flat": self.flat}


def reading(llm: LLM, done: int) -> Reading:
    """What is in use now."""
    kept = llm._chats._kept
    chats = len(kept)
    kept.clear()
    while gc.collect():
        continue
    objects = gc.get_objects()
    storages = {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
        for each in objects
        if issubclass(type(each), torch.Tensor) and each.device.type == "cpu"
    }
    count = len(objects)
    del objects
    python, _ = tracemalloc.get_traced_memory()
    resident = psutil.Process().memory_info().rss
    return Reading(done, count, python, sum(storages.values()), resident, chats)


class Work:
    """Requests and conversations by chance. `longest`: of prompts; `new`: of answers."""

    def __init__(self, llm: LLM, seed: int, longest: int, new: int) -> None:
        self.llm, self.dice, self.longest, self.new = llm, random.Random(seed), longest, new
        self.talk: list[dict[str, str]] = []
        self.kinds: list[Callable[..., object]] = [
            *(self.alone, self.alone, self.batch, self.stream, self.left),
            *(self.sampled, self.refused, self.raising),
        ]

    def request(self, number: int) -> None:
        """One request; the first ones go through all kinds and drafters at full length."""
        how, kind = DRAFTERS[number % len(DRAFTERS)], self.kinds[number % len(self.kinds)]
        share = 1.0 if number < EVERY // 2 else self.dice.random() ** 2
        length = max(1, round(share * self.longest))
        limit = max(1, round(share * self.new))
        kind(self.prompt(length), {**how, "max_new_tokens": limit, "eos": []})

    def prompt(self, length: int) -> list[int]:
        """Tokens with repetitions, so that lookups find something."""
        pieces = [[self.dice.randrange(3, 250) for _ in range(4)] for _ in range(8)]
        tokens = [token for _ in range(length // 4 + 1) for token in self.dice.choice(pieces)]
        return tokens[:length]

    def alone(self, prompt: list[int], how: dict[str, Any]) -> None:
        self.llm.generate(prompt, **how)

    def batch(self, prompt: list[int], how: dict[str, Any]) -> None:
        self.llm.generate([prompt, prompt[: len(prompt) // 2 + 1], prompt[-3:]], **how)

    def stream(self, prompt: list[int], how: dict[str, Any]) -> None:
        for _ in self.llm.stream(prompt, **how, logprobs=2):
            continue

    def left(self, prompt: list[int], how: dict[str, Any]) -> None:
        """A reader that goes away, without closing."""
        next(iter(self.llm.stream(prompt, **how)))

    def sampled(self, prompt: list[int], how: dict[str, Any]) -> None:
        drawn = SamplingParams(temperature=0.8, top_p=0.9, seed=self.dice.randrange(1000))
        self.llm.generate(prompt, **how, sampling=drawn)

    def refused(self, prompt: list[int], how: dict[str, Any]) -> None:
        try:
            self.llm.generate(prompt, **{**how, "max_new_tokens": -1})
        except SelfspecError:
            return
        raise AssertionError("-1 new tokens were taken")

    def raising(self, prompt: list[int], how: dict[str, Any]) -> None:
        def stops(ids: Any, scores: Any, **_: Any) -> bool:
            raise Enough

        try:
            self.llm.generate(prompt, **how, stopping_criteria=[stops])  # type: ignore[list-item]
        except Enough:
            return
        raise AssertionError("a criterion was not asked")

    def turn(self, number: int) -> None:
        """A turn of a chat; now and then another one begins, or an answer is left."""
        if len(self.talk) > 1 and (self.dice.random() < 0.15 or len(self.talk) > 12):
            self.talk = []
        words = " ".join(self.dice.choice(["boat", "sea", "far", "home"]) for _ in range(4))
        self.talk.append({"role": "user", "content": words})
        how: dict[str, Any] = {**DRAFTERS[number % len(DRAFTERS)], "max_new_tokens": self.new // 2}
        if self.dice.random() < 0.1:
            next(iter(self.llm.stream_chat(self.talk, **how)))
            self.talk = []
            return
        text = self.llm.chat(self.talk, **how).text
        self.talk.append({"role": "assistant", "content": text})


def readings(llm: LLM, count: int, work: Callable[[int], None], every: int) -> list[Reading]:
    """Do so much of that, and read after every hundred, say."""
    found = []
    for number in range(count):
        work(number)
        if (number + 1) % every == 0:
            found.append(reading(llm, number + 1))
    return found


def measured(model: str, requests: int, turns: int, seed: int, every: int = EVERY) -> Measured:
    """A run with a tiny model, or with a real one."""
    tiny = model == "tiny"
    llm = tiny_llm() if tiny else LLM.from_pretrained(model)
    work = Work(llm, seed, longest=160 if tiny else 48, new=24 if tiny else 12)
    tracemalloc.start()
    try:
        asked = readings(llm, requests, work.request, every)
        return Measured(model, seed, asked, readings(llm, turns, work.turn, every))
    finally:
        tracemalloc.stop()
