"""Drafts that can say nothing: a shorter vocabulary of which a logits processor allows no token, or
a processor that fails on a guess."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor

from selfspec import LLM, SamplingParams
from selfspec.draft.base import Drafter
from selfspec.draft.from_layers.cosine import Cosine
from selfspec.draft.from_layers.early_exit import EarlyExit
from selfspec.draft.from_layers.quantised import Quantised
from selfspec.draft.from_models.draft_head import DraftHead
from selfspec.draft.from_models.draft_model import DraftModel
from selfspec.testing import tiny_head, tiny_model

SCORED = 100


class Above(LogitsProcessor):
    """Every third token of the text may be below SCORED, the others may not."""

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        if ids.shape[1] % 3:
            scores[:, :SCORED] = -torch.inf
        return scores


class Strict(LogitsProcessor):
    """Raises where it is shown a text that is not the beginning of the one it knows."""

    def __init__(self, text: list[int]) -> None:
        self._text = text

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        if ids[0].tolist() != self._text[: ids.shape[1]]:
            raise ValueError("another text")
        return scores


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM.from_pretrained(tiny_model())


def drafters(llm: LLM, sample: bool) -> list[Drafter]:
    head = tiny_head(llm.model, vocabulary=range(SCORED))
    return [
        EarlyExit(layer=2, vocabulary=SCORED, sample=sample),
        Cosine(threshold=0.5, keep_last=1, vocabulary=SCORED, sample=sample),
        DraftModel(vocabulary=SCORED, sample=sample),
        DraftHead(head, sample=sample),
        DraftHead(head, width=3, sample=sample),
        Quantised("int8", sample=sample),
    ]


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_that_can_say_nothing_ends(llm: LLM, temperature: float, sample: bool) -> None:
    """A draft that fails the request although the model has tokens left."""
    options: dict[str, Any] = {
        "sampling": SamplingParams(temperature=temperature, seed=5 if temperature else None),
        "max_new_tokens": 12,
        "eos": [],
        "logits_processors": [Above()],
    }
    prompt = [7, 8]
    plain = llm.generate(prompt, **options, draft=None)
    drafted = 0
    for draft in drafters(llm, sample):
        found = llm.generate(prompt, **options, draft=draft)
        assert len(found.tokens) == 12, draft
        assert found.tokens == plain.tokens or (sample and temperature), draft
        drafted += found.stats.drafted
    assert drafted > 10, "where some may be said, some are"


@pytest.mark.parametrize("sample", [False, True])
def test_a_processor_that_fails_on_a_guess_fails_no_request(llm: LLM, sample: bool) -> None:
    """A grammar that raises at what no text can have, and is shown a wrong guess. A failure after
    the model's own token still ends the request, as it does without drafts."""
    options: dict[str, Any] = {"max_new_tokens": 24, "eos": []}
    if sample:  # among the first alone, so that drawn drafts write the text of plain decoding
        options["sampling"] = SamplingParams(temperature=1.0, top_k=1, seed=1)
    prompt = [7, 8]
    text = prompt + llm.generate(prompt, **options, draft=None).tokens
    draft = EarlyExit(layer=2, sample=sample)
    found = llm.generate(prompt, **options, draft=draft, logits_processors=[Strict(text)])
    assert prompt + found.tokens == text
    assert found.stats.drafted > found.stats.accepted
    broken = Strict([*text[:12], 0, *text[13:]])
    with pytest.raises(ValueError, match="another text"):
        llm.generate(prompt, **options, draft=draft, logits_processors=[broken])
