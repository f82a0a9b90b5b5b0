"""Whole passes in one call to the kernels, against the same halves run one by one."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from variants import VARIANTS, build

from selfspec.model.compute.cache import RowSpan
from selfspec.model.compute.plan import LayerPlan
from selfspec.model.from_transformers import from_transformers
from selfspec.model.layered import LayeredModel
from selfspec.model.passes import Passes
from selfspec.testing import tiny_lora
from selfspec.trained.lora import lora_view

PLANS = [
    LayerPlan(0, 4),
    LayerPlan(1, 3),
    LayerPlan.skipping(4, attention=[1], mlp=[1, 2]),
    LayerPlan.skipping(4, attention=[0, 3]),
]
WITH_EXPERTS = {"mixtral", "qwen3-moe", "qwen3-moe-weights-as-they-are"}
dense = pytest.mark.parametrize("variant", sorted(set(VARIANTS) - WITH_EXPERTS))


@pytest.fixture
def threads():
    """Sets torch's threads for a test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def one_by_one(model: LayeredModel) -> LayeredModel:
    """The same model, each half run by its own operations."""
    other = model.view(blocks=model.blocks)
    other._passes._native = None
    return other


def states_of(model: LayeredModel, plan: LayerPlan, sizes=(37, 1, 5)):
    """What leaves the plan, and what it leaves in the cache, over some calls of these sizes for two
    rows."""
    tokens = torch.arange(3, 3 + 2 * sum(sizes)) % 250
    cache, out, at = model.new_cache(2, 64), [], 0
    for size in sizes:
        place = cache.layout_at([RowSpan(row, at, size) for row in range(2)])
        x = model.embed(tokens[2 * at : 2 * (at + size)])
        out.append(model.run(x, plan, cache, place))
        at += size
    layers = list(plan.attention_layers)
    return torch.cat(out), cache.keys[layers, :, :, :at], cache.values[layers, :, :, :at]


@pytest.mark.parametrize("variant", sorted(WITH_EXPERTS))
def test_experts_run_one_by_one(variant):
    """Experts choose their products by the token; taken for an MLP they would compute nonsense."""
    assert not from_transformers(build(variant), kernel="native")._passes.in_one_call


@dense
def test_one_call_computes_what_single_halves_compute(variant):
    """A norm, scale, window, rope or parallel residual that got lost, for whole layers and where
    halves are skipped. And a norm or product that the runner does not know any more, which would
    silently make every pass slow again."""
    model = from_transformers(build(variant), kernel="native", check=False)
    assert model._passes.in_one_call
    for plan in PLANS:
        for ours, expected in zip(
            states_of(model, plan), states_of(one_by_one(model), plan), strict=True
        ):
            assert torch.allclose(ours, expected, atol=2e-5, rtol=2e-5), (
                f"{(ours - expected).abs().max():.2e} at {plan}"
            )


@pytest.mark.parametrize("variant", ["llama", "gpt2", "gemma2", "gpt-neox"])
@pytest.mark.parametrize("many", [2, 3, 5])
def test_the_number_of_threads_changes_no_bit(variant, many, threads):
    """A step that begins before another thread has ended the last one, or a share that is cut
    between the lanes of a vector."""
    model = from_transformers(build(variant), kernel="native")
    threads(1)
    alone = states_of(model, LayerPlan(0, 4))
    threads(many)
    for _ in range(5):
        together = states_of(model, LayerPlan(0, 4))
        assert all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))


@pytest.mark.parametrize("variant", ["llama", "cohere", "granite"])
def test_watching_changes_no_bit(variant):
    """Whoever looks on cuts the pass into single halves; were they computed otherwise, `cosine`
    would change what is written."""
    model = from_transformers(build(variant), kernel="native")
    cache, other = model.new_cache(1, 16), model.new_cache(1, 16)
    x, seen = model.embed(torch.arange(3, 12)), []
    plain = model.run(x, model.full_plan, cache, cache.layout([9]))
    watched = model.run(
        x, model.full_plan, other, other.layout([9]), observer=lambda *half: seen.append(half)
    )
    assert torch.equal(plain, watched) and torch.equal(cache.keys, other.keys)
    assert [half[:2] for half in seen] == list(model.full_plan.halves)
    assert torch.equal(seen[0][2], x) and torch.equal(seen[-1][3], plain)
    assert all(torch.equal(one[3], two[2]) for one, two in pairwise(seen))


def test_what_is_given_is_not_changed():
    """A pass that works in place: early exit carries the same states through the layers twice."""
    model = from_transformers(build("llama"), kernel="native")
    cache = model.new_cache(1, 16)
    x = model.embed(torch.arange(3, 12))
    kept = x.clone()
    model.run(x, model.full_plan, cache, cache.layout([9]))
    assert torch.equal(x, kept)


def test_a_model_with_an_adapter_runs_one_by_one_and_without_it_in_one_call():
    """Products with something added are none that the kernels know; a view must not keep the
    other's halves."""
    model = from_transformers(build("llama"), kernel="native")
    view = lora_view(tiny_lora(model), model)
    assert not view._passes.in_one_call and model._passes.in_one_call
    assert Passes(model.blocks).in_one_call
