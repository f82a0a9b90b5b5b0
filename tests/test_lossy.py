"""Early exit without verification: what the exit alone would write, flagged, and nothing of the
whole model is touched."""

from __future__ import annotations

import copy
import gc

import pytest
import torch

from selfspec import LLM, OptionError, SamplingParams
from selfspec.lossy import LossyResult, early_exit_generate, first_layers
from selfspec.model.from_transformers import from_transformers
from selfspec.testing import tiny_llm, tiny_model, tiny_tokenizer

PROMPTS = [
    list(b"once upon a time"),
    list(b"the"),
    list(b"a longer prompt, longer than the window of the others"),
]
CHANGES = {"llama": {}, "mistral": {"sliding_window": 12}, "qwen3": {}}


@pytest.fixture(scope="module")
def llm():
    return tiny_llm(seed=4)


@pytest.mark.parametrize("family", CHANGES)
@pytest.mark.parametrize("layer", [1, 3])
def test_the_exit_writes_what_a_shallower_model_writes(family, layer):
    """A later layer that still runs, or a final norm left out. The reference is transformers on a
    model that was cut off."""
    model = tiny_model(family, 4, **CHANGES[family])
    llm = LLM.from_pretrained(model, tokenizer=tiny_tokenizer())
    cut = copy.deepcopy(model)
    cut.model.layers = cut.model.layers[:layer]
    cut.config.num_hidden_layers = layer
    cut.config.layer_types = (
        cut.config.layer_types[:layer] if getattr(cut.config, "layer_types", None) else None
    )
    found = early_exit_generate(llm, PROMPTS, layer, max_new_tokens=24, eos=[])
    for prompt, result in zip(PROMPTS, found, strict=True):
        expected = cut.generate(
            torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=None
        )[0, len(prompt) :]
        assert result.tokens == expected.tolist()
    whole = llm.generate(PROMPTS[0], max_new_tokens=24, eos=[])
    assert found[0].tokens != whole.tokens, "the exit and the model agree, so nothing is shown"


def test_results_are_flagged(llm):
    """A lossy answer that could be taken for an exact one."""
    result = early_exit_generate(llm, PROMPTS[0], 2, max_new_tokens=4, eos=[], logprobs=1)
    assert isinstance(result, LossyResult) and result.lossy is True and result.layer == 2
    assert result.stats.layer_tokens == 2 * (len(PROMPTS[0]) + 3), "layers beyond the exit were run"
    assert result.call.layer_tokens == result.stats.layer_tokens
    assert len(result.logprobs) == 4


def test_the_whole_model_stays_whole(llm):
    """An exit that shortens the model for later calls, the classic fault of changing
    num_hidden_layers."""
    before = llm.generate(PROMPTS, max_new_tokens=20, eos=[])
    early_exit_generate(llm, PROMPTS, 1, max_new_tokens=5)
    with pytest.raises(OptionError, match="no option"):
        early_exit_generate(llm, PROMPTS, 1, max_tokens=5)
    assert llm.model.layers == 4 and llm.model.full_plan.stop == 4 and len(llm.model.blocks) == 4
    assert [r.tokens for r in llm.generate(PROMPTS, max_new_tokens=20, eos=[])] == [
        r.tokens for r in before
    ]


def test_sampling_stops_and_drafts_are_those_of_generate(llm):
    """A loop of its own that forgets seeds or stops; and drafts that change what the exit
    writes."""
    sampled = {
        "sampling": SamplingParams(temperature=0.8, top_k=40, seed=7),
        "max_new_tokens": 20,
        "eos": [],
    }
    first = early_exit_generate(llm, PROMPTS, 3, **sampled)
    assert [r.tokens for r in first] == [
        r.tokens for r in early_exit_generate(llm, PROMPTS, 3, **sampled)
    ]
    drafted = early_exit_generate(
        llm, PROMPTS, 3, **sampled, draft="early-exit", draft_options={"layer": 2}
    )
    assert [r.tokens for r in drafted] == [r.tokens for r in first] and drafted[0].stats.drafted > 0
    eos = first[0].tokens[6]
    stopped = early_exit_generate(llm, PROMPTS[0], 3, **{**sampled, "eos": [eos]})
    assert (
        stopped.finish_reason == "eos"
        and stopped.tokens == first[0].tokens[: first[0].tokens.index(eos) + 1]
    )


def test_an_exit_has_caches_of_its_own():
    """On a GPU caches lie in storages that are used again. One of the exit's few layers handed to
    the whole model, which writes beyond it."""
    llm = LLM(from_transformers(tiny_model(seed=4), kernel="static", check=False), None, "tiny")
    call = {"max_new_tokens": 12, "eos": [], "draft": None}
    before = [result.tokens for result in llm.generate(PROMPTS, **call)]
    llm.model.free_idle()
    early_exit_generate(llm, PROMPTS, 2, **call)
    gc.collect()  # the exit's cache is given back
    assert [result.tokens for result in llm.generate(PROMPTS, **call)] == before


def test_an_exit_is_made_once(llm):
    """What is recorded or made ready for an exit thrown away after every call."""
    assert first_layers(llm.model, 2) is first_layers(llm.model, 2)
    assert first_layers(llm.model, 2) is not first_layers(llm.model, 3)


@pytest.mark.parametrize("layer", [0, -1, 4, 9])
def test_an_exit_outside_the_model_is_explained(llm, layer):
    """A model of no layers, or the whole model under a lossy name."""
    with pytest.raises(
        OptionError,
        match=rf"exit layer {layer} is not inside this model of 4 layers; choose 1 to 3",
    ):
        first_layers(llm.model, layer)
