"""Drafting with a copy of the model in fewer bits."""

from __future__ import annotations

import pytest
import torch

from selfspec import LLM
from selfspec.draft.from_layers.quantised import Quantised
from selfspec.draft.from_text.ngram import _Index
from selfspec.errors import OptionError, ResourceError
from selfspec.model import copies
from selfspec.model.compute.cpu.few_bits import Int4, Int8
from selfspec.model.copies import copy_in
from selfspec.model.from_transformers import from_transformers
from selfspec.testing import tiny_model

PROMPT = [*b"once upon a time, once upon a time, once"]
OPTIONS = {"max_new_tokens": 24, "eos": []}


def tiny(**options):
    return LLM(from_transformers(tiny_model(), **options), None, "tiny")


def fixed(tokens):
    return {"control": "fixed", "control_options": {"tokens": tokens}}


def test_a_copy_is_made_once_and_leaves_the_model_alone():
    """A copy for each request, or products of the model's own replaced."""
    model = tiny().model
    before = model.linears
    copy = copy_in(model, "int8")
    assert copy is copy_in(model, "int8") and model.linears == before
    assert all(isinstance(linear, Int8) for linear in copy.linears)
    assert copy.embedding is model.embedding


def test_few_bits_are_taken_where_they_lose_nothing():
    """4 bits for weights that they round, or 8 for weights that were 4 bits before."""
    hf = tiny_model()
    model = from_transformers(hf)
    assert isinstance(copy_in(model, "auto").linears[0], Int8)
    for layer in hf.model.layers:
        for linear in (*layer.self_attn.children(), *layer.mlp.children()):
            if hasattr(linear, "weight"):
                packed = Int4([linear.weight.detach()], [None])
                linear.weight.data = packed.rows(torch.arange(len(linear.weight)))
    rounded = copy_in(from_transformers(hf), "auto")
    assert isinstance(rounded.linears[0], Int4) and isinstance(rounded.head_product, Int8)


def test_a_model_of_few_bits_is_drafted_for_by_fewer():
    """A copy as large as the model, which could not pay."""
    model = from_transformers(tiny_model(), weights="int8")
    assert isinstance(copy_in(model, "auto").linears[0], Int4)
    with pytest.raises(OptionError, match="a copy in int8 is no smaller than the model"):
        copy_in(model, "int8")
    llm = LLM(model, None, "tiny")
    plain = llm.generate(PROMPT, draft=None, **OPTIONS)
    drafted = llm.generate(PROMPT, draft="quantised", **fixed(5), **OPTIONS)
    assert drafted.tokens == plain.tokens and drafted.stats.accepted > 0


def test_models_that_torch_runs_have_no_copy():
    """An option that is accepted and changes nothing."""
    llm = tiny(kernel="plain")
    with pytest.raises(OptionError, match="run by kernel 'plain'; draft with 'hybrid'"):
        llm.generate(PROMPT, draft="quantised", **OPTIONS)
    llm.generate(PROMPT, draft="auto", **OPTIONS)  # it does without


def test_without_memory_for_a_copy_drafting_goes_on(monkeypatch):
    """A request that fails for want of what only makes it faster."""
    monkeypatch.setattr(copies, "available_memory", lambda device: 1000)
    llm = tiny()
    with pytest.warns(UserWarning, match="are free: drafting goes on without it"):
        found = llm.generate(PROMPT, draft="quantised", **fixed(5), **OPTIONS)
    assert found.tokens == llm.generate(PROMPT, draft=None, **OPTIONS).tokens
    with pytest.raises(ResourceError, match="a copy of the weights in int8 needs about"):
        llm.generate(
            PROMPT, draft="quantised", draft_options={"first": "none"}, **fixed(5), **OPTIONS
        )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"first": "auto"}, "decides itself how much it drafts"),
        ({"guesses": -1}, "guesses is 0 or more"),
        ({"sure": 1.5}, "a probability from 0"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, words):
    """A controller that nobody asks, a draft that never stops or never begins."""
    with pytest.raises(OptionError, match=words):
        Quantised(**options)


def test_a_first_drafter_that_reads_states_is_refused():
    """States of the copy taken for the model's."""
    with pytest.raises(OptionError, match="reads states of the whole model"):
        tiny().generate(
            PROMPT, draft="quantised", draft_options={"first": "cosine"}, **fixed(5), **OPTIONS
        )


def test_drafts_stop_where_the_copy_is_unsure():
    """A threshold that is never looked at."""
    llm = tiny()
    sure, bold = (
        llm.generate(
            PROMPT, draft="quantised", draft_options={"sure": share}, **fixed(6), **OPTIONS
        )
        for share in (1.0, 0.0)
    )
    assert sure.tokens == bold.tokens
    assert sure.stats.drafted == sure.stats.verifications > bold.stats.verifications


def test_an_index_takes_back_what_was_not_kept():
    """Guesses of another drafter that stay in the index as if they were text."""
    text, guessed = [1, 2, 3, 1, 2], [1, 2, 3, 1, 2, 9, 1, 2, 9]
    index, fresh = _Index(1, 3), _Index(1, 3)
    index.enter(guessed)
    index.enter([*text, 3, 4])
    fresh.enter([*text, 3, 4])
    held = {gram: places for gram, places in index._places.items() if places}
    assert held == fresh._places
