"""All that this folder touches of selfspec: when something there is renamed, this file follows.

It builds the models and drafters, runs them and hands back plain bytes, numbers and lists. It does
not know what is recorded or compared.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import struct
import subprocess
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from selfspec import LLM, SamplingParams, ScriptedDrafter
from selfspec.draft.auto import Auto, AutoSession
from selfspec.draft.base import Drafter, Target
from selfspec.draft.from_models.draft_head import DraftHead
from selfspec.draft.registry import BUILT_IN, make_drafter
from selfspec.model.compute.cpu import native
from selfspec.testing import tiny_head, tiny_model, tiny_predictors, tiny_tokenizer

Draft = tuple[str, dict[str, Any]]  # a drafter's name and its options


# -------------------------------------------------------------------------------------- machine


# Compilers tune for the processor that they run on, and for this one (AMD's Zen 3) GCC likes to
# leave products and sums apart. What is recorded must not depend on that.
TUNED_FOR = "-mtune=znver3"


def compile_for(march: str) -> None:
    """From now on the kernels are those of `-march=...`. Must come before any model is loaded."""
    assert native.library.cache_info().currsize == 0, "the kernels were loaded already"
    flags = tuple(re.sub("^-march=.*", f"-march={march}", flag) for flag in native.FLAGS)
    assert f"-march={march}" in flags, "the kernels are compiled without -march now: follow that"
    native.FLAGS = (*flags, TUNED_FOR)  # type: ignore[assignment]


def compiler() -> str:
    """Name and version of the compiler that makes the kernels; "" where there is none."""
    path = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")
    if path is None:
        return ""
    said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    version = re.findall(r"\d+\.\d+\.\d+", said)
    return f"{path.rsplit('/', 1)[-1]} {version[-1] if version else 'unknown'}"


def built_in_drafters() -> set[str]:
    return {*BUILT_IN, "auto"}


# --------------------------------------------------------------------------------------- models


def load(family: str, seed: int, late: float = 1.0, **config: Any) -> LLM:
    """A tiny model run by our kernels. Its layers but the first change the stream `late` times
    as much as they would: little makes parts of it agree with the whole, so that drafts are kept.
    """
    model = tiny_model(family, **config)
    for name, parameter in model.named_parameters():
        offset = 1.0 if re.search(r"(norm|ln_\w+)\.weight$", name) and "gemma" not in family else 0
        parameter.data = _numbers(f"{seed} {name}", parameter.shape, 0.35, offset)
        layer = re.search(r"layers\.(\d+)\..*(o_proj|down_proj)", name)
        if layer and int(layer[1]):
            parameter.data *= late
    return LLM.from_pretrained(model, tokenizer=tiny_tokenizer(), kernel="native")


def _numbers(name: str, shape: Sequence[int], width: float, offset: float = 0) -> torch.Tensor:
    """Numbers that are the same on every machine: from a generator of whole numbers whose stream
    numpy keeps for good, and sums and products only."""
    dice = np.random.RandomState(zlib.crc32(name.encode()))
    drawn = (dice.random_sample(tuple(shape)) - 0.5) * 2 * width + offset
    return torch.from_numpy(drawn.astype(np.float32))


class Reading:
    """A model that reads some texts: each call returns logits as raw float32 bytes."""

    def __init__(self, llm: LLM, texts: Sequence[Sequence[int]]) -> None:
        self._model, self._texts = llm.model, texts
        self._cache = self._model.new_cache(len(texts))

    def prefill(self) -> bytes:
        """All of the texts; logits after each one's last token."""
        return _raw(self._model.prefill(self._texts, self._cache))

    def read(
        self, tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]] | None = None
    ) -> bytes:
        """More tokens of each text, as chains or as trees; logits of all of them. Read for good."""
        layout = self._cache.layout([len(row) for row in tokens], parents)
        flat = torch.tensor([token for row in tokens for token in row])
        return _raw(self._model.forward(flat, self._cache, layout))

    def forget(self) -> None:
        """Back to the texts as they were after `prefill`."""
        for row, text in enumerate(self._texts):
            self._cache.rollback(row, len(text))


def _raw(logits: torch.Tensor) -> bytes:
    assert logits.dtype == torch.float32
    return logits.numpy().tobytes()


# ---------------------------------------------------------------------------------------- texts


@dataclass(frozen=True)
class Written:
    """What one call of `generate` gave: of each row, and the drafts of the call."""

    texts: list[tuple[list[int], str]]  # tokens and why they end
    logprobs: bytes
    drafted: int
    kept: int


def write(
    llm: LLM,
    prompts: list[list[int]],
    new: int,
    sampling: dict[str, Any],
    drafter: Drafter | None,
    control: Draft | None = None,
) -> Written:
    """Continue all prompts in one call. Without a control the drafter brings its own."""
    results: list[Any] = llm.generate(
        prompts,
        max_new_tokens=new,
        eos=[],
        sampling=SamplingParams(**sampling),
        draft=drafter,
        control=control[0] if control else None,
        control_options=control[1] if control else {},
        logprobs=2,
    )
    return Written(
        [(result.tokens, result.finish_reason) for result in results],
        b"".join(_packed(token) for result in results for token in result.logprobs or ()),
        results[0].call.drafted,
        results[0].call.accepted,
    )


def _packed(token: Any) -> bytes:
    pairs = [(token.token, token.logprob), *token.top.items()]
    return b"".join(struct.pack("<qd", *pair) for pair in pairs)


# ------------------------------------------------------------------------------------- drafters


@dataclass(frozen=True)
class Restless(Auto):
    """Asks its candidates in turn, plain rounds in between, so that no clock decides anything."""

    def start(self, target: Target) -> AutoSession:
        session, turns = super().start(target), itertools.count()

        def choose(rows: int, most: int, beside: int) -> tuple[Any, int]:
            turn = next(turns)
            arm = [*session._arms, None][turn % (len(session._arms) + 1)]
            return (arm, min(1 + turn % 6, most)) if arm and most else (None, 0)

        session._choose = choose  # type: ignore[method-assign]
        return session


def drafter(llm: LLM, draft: Draft, script: Sequence[list[int]]) -> Drafter:
    """A drafter by name. `script`: what the model will write, for those that need to be told."""
    name, options = draft
    if name == "scripted":
        return ScriptedDrafter(script, **options)
    if name == "draft-head":
        return DraftHead(_head(llm, sorted({token for row in script for token in row})), **options)
    if name == "draft-model":
        options = {"model": _small(), **options}
    if name == "dynamic-exit":
        options = {"part": tiny_predictors(llm.model), **options}
    if name == "auto":
        return Restless([drafter(llm, candidate, script) for candidate in options["candidates"]])
    made = make_drafter(name, options)
    assert made is not None
    return made


@cache
def _small() -> LLM:
    """The second, smaller model of draft-model."""
    return load("llama", seed=9, num_hidden_layers=2)


def _head(llm: LLM, vocabulary: Sequence[int]) -> Any:
    """A random head that says little else than what is right somewhere, so that some is kept."""
    part = tiny_head(llm.model, vocabulary=vocabulary)
    for name, tensor in part.tensors.items():
        if tensor.is_floating_point():
            offset = 1.0 if tensor.dim() == 1 else 0.0
            tensor.copy_(_numbers(f"head {name}", tensor.shape, 0.35, offset))
    return part
