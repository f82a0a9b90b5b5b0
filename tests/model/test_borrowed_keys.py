"""Layers that read the keys and values of another one: which one, which plans are left, and what is
not computed where nobody asks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_conformance import TEXT, read
from test_peculiarities import changed, gap
from variants import build

from selfspec import LLM, SamplingParams
from selfspec.draft.from_layers.cosine import Cosine
from selfspec.draft.from_layers.dynamic_exit import DynamicExit
from selfspec.draft.from_layers.early_exit import EarlyExit
from selfspec.draft.from_layers.layer_skip import STRATEGIES, LayerSkip
from selfspec.draft.from_models.draft_head import DraftHead
from selfspec.errors import OptionError
from selfspec.model.compute.hidden_states import StateCollector
from selfspec.model.compute.plan import LayerPlan
from selfspec.model.from_transformers import from_transformers
from selfspec.model.layered import LayeredModel
from selfspec.testing import tiny_adapter, tiny_head, tiny_predictors

SIX = {"num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3}
WRONG = (0, 1, 2, 3, 0, 1)  # the first layers of their kinds, not the last with keys of their own


@pytest.fixture(scope="module", params=["gemma4-small", "gemma3n"])
def small(request) -> LayeredModel:
    """Layers 2 and 3 read the keys of 0 and 1."""
    return from_transformers(build(request.param))


def test_the_lender_is_the_last_of_its_kind(monkeypatch):
    """Keys of another layer of the same shape, which fit and say something else."""
    model = build("gemma4-small", **SIX)
    assert from_transformers(model).shape.lenders == (0, 1, 2, 3, 2, 3)
    assert gap(model) < 1e-4
    changed(monkeypatch, "gemma4_text", lenders=lambda config: WRONG)
    assert gap(model) > 0.01


def test_layers_that_borrow_have_no_room_in_the_cache(small):
    """Room for keys that are never written."""
    cache = small.new_cache(2, 64)
    assert len(cache.keys) == 2 and cache.lengths.shape == (2, 4)


def test_a_plan_without_a_lender_is_refused(small):
    """Entries of an earlier text, or zeros, read as if they were this text's."""
    x, cache = small.embed(torch.tensor(TEXT[:5])), small.new_cache(1, 64)
    for plan in (LayerPlan.skipping(4, attention=[1]), LayerPlan(1, 4, frozenset({1}))):
        with pytest.raises(OptionError, match=r"layer 1's attention is left out, and layer 3 wou"):
            small.run(x, plan, cache, cache.layout([5]))
    assert cache.lengths.sum() == 0
    with pytest.raises(AssertionError, match="layer 1 has not made the keys"):
        small.run(x, LayerPlan(3, 4), cache, cache.layout([5]))


def test_drafts_may_leave_out_lenders_and_borrowers_together(small):
    """A user's skip set that reads keys which nobody made, or one that is refused for nothing."""
    llm = LLM(small, None, "tiny")
    plain = llm.generate(TEXT[:20], max_new_tokens=30, eos=[], draft=None).tokens
    for skipped in ((1, 3), (2, 3), (3,), (0, 2)):
        skip = LayerSkip(attention=skipped)
        assert llm.generate(TEXT[:20], max_new_tokens=30, eos=[], draft=skip).tokens == plain
    with pytest.raises(OptionError, match=r"layer 0's attention .* layer 2 would .*leave theirs"):
        llm.generate(TEXT[:20], max_new_tokens=4, draft=LayerSkip(attention=(0, 1, 3)))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_we_choose_to_skip_spares_lenders(strategy, small):
    """A strategy whose plan is refused on models whose layers borrow."""
    for share in (0.25, 0.5, 0.75):
        drafter = LayerSkip(strategy=strategy, attention_share=share, mlp_share=0.25)
        small.shape.check_plan(LayerPlan.skipping(4, *drafter.skipped(small.shape)))
    assert small.shape.free_to_skip((0, 1, 3)) == (1, 3)
    assert small.shape.free_to_skip((2, 3)) == (2, 3)
    alone = replace(small.shape, lenders=())
    assert alone.free_to_skip((0, 1, 3)) == (0, 1, 3)


def test_only_a_prompts_last_tokens_run_through_layers_without_keys(small):
    """A prompt that is read twice as slowly as it could be; or one whose shortcut changes a bit, in
    rows of different lengths or for whoever looks at states."""
    prompts, last = [TEXT[:60], TEXT[7:20]], StateCollector([3])
    cache, watched = small.new_cache(2, 64), small.new_cache(2, 64)
    logits = small.prefill(prompts, cache)
    ended = small.blocks[1].files_keys  # then layer 1 leaves keys of the others, and no more
    assert cache.computed.tolist() == [
        [60, 1 if ended else 60, 1, 1],
        [13, 1 if ended else 13, 1, 1],
    ]
    assert cache.lengths.tolist() == [[60] * 4, [13] * 4]
    assert torch.equal(logits, small.prefill(prompts, watched, collectors=[last]))
    assert watched.computed.tolist() == [[60] * 4, [13] * 4]
    for row, prompt in enumerate(prompts):
        assert torch.equal(logits[row], read(small, prompt)[0][-1])
    step = small.forward(torch.tensor([9, 9]), cache, cache.layout([1, 1]))
    assert torch.equal(step, small.forward(torch.tensor([9, 9]), watched, watched.layout([1, 1])))


def test_what_goes_along_is_seen_by_layers_only(small):
    """Numbers of the token handed to collectors, heads and adapters as if they were states."""
    tokens, seen = torch.tensor(TEXT[:7]), StateCollector([1, 3])
    cache = small.new_cache(1, 64)
    x = small.run(small.embed(tokens), small.full_plan, cache, cache.layout([7]), collectors=[seen])
    own = 64 * small.shape.streams
    assert x.shape == (7, small.carried) and small.carried == own + 4 * 24
    assert torch.equal(x[:, own:], small.embed(tokens)[:, own:])
    ((_, states),) = seen.take()
    assert states.shape == (7, 2, 64) and torch.equal(states[:, 1], small.states(x))


DRAFTERS = {
    **{
        name: (lambda model, name=name: name)
        for name in ("auto", "early-exit", "hybrid", "jacobi", "layer-skip", "ngram",
                     "quantised", "recycle")
    },
    "cosine": lambda model: Cosine(every=2, keep_last=0),
    "draft-head": lambda model: DraftHead(tiny_head(model, vocabulary=range(3, 259))),
    "exit-adapter": lambda model: EarlyExit(part=tiny_adapter(model, vocabulary=range(3, 259))),
    "dynamic-exit": lambda model: DynamicExit(part=tiny_predictors(model), threshold=0.3),
}  # fmt: skip
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=5)


@pytest.mark.parametrize("weights", ["float32", "int8"])
@pytest.mark.parametrize("variant", ["gemma4-small", "gemma4-experts", "gemma3n"])
def test_every_drafter_leaves_the_text_as_it_is(variant, weights):
    """States without the numbers that go with them, or with them where none are wanted; rows of a
    batch that take each other's."""
    model = from_transformers(build(variant), weights=weights, check=weights == "float32")
    llm = LLM(model, None, "tiny")
    prompts = [TEXT[:30] + TEXT[:10], TEXT[40:43], TEXT[5:40]]
    for sampling in (SamplingParams(), SAMPLED):
        options = {"max_new_tokens": 20, "eos": [], "sampling": sampling}
        plain = [each.tokens for each in llm.generate(prompts, draft=None, **options)]
        for name, make in DRAFTERS.items():
            if weights == "int8" and name == "quantised":
                continue  # it would be the same model
            together = llm.generate(prompts, draft=make(model), **options)
            assert [each.tokens for each in together] == plain, name
            drafted = sum(each.stats.drafted for each in together)
            assert drafted > 0 or name in ("auto", "ngram", "jacobi", "recycle"), name
