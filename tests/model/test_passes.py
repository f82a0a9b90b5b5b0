"""Whole passes in one call to the kernels, against the same halves run one by one."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from variants import VARIANTS, build

from selfspec.model.block import Block
from selfspec.model.compute.cache import RowSpan
from selfspec.model.compute.cpu.fused import FusedHalves
from selfspec.model.compute.hidden_states import StateCollector
from selfspec.model.compute.linear import LowRank
from selfspec.model.compute.plan import LayerPlan
from selfspec.model.from_transformers import from_transformers
from selfspec.model.layered import LayeredModel
from selfspec.model.passes import Passes
from selfspec.testing import tiny_lora
from selfspec.trained.lora import lora_view

pytestmark = pytest.mark.zeros

PLANS = [
    LayerPlan(0, 4),
    LayerPlan(1, 3),
    LayerPlan.skipping(4, attention=[1], mlp=[1, 2]),
    LayerPlan.skipping(4, attention=[0, 3]),
]


BORROWING = [  # where layers 2 and 3 read the keys of 0 and 1
    LayerPlan(0, 4),
    LayerPlan(0, 3),
    LayerPlan.skipping(4, attention=[1, 3], mlp=[1, 2]),
    LayerPlan.skipping(4, attention=[2], mlp=[0, 3]),
]


def plans_of(model: LayeredModel) -> list[LayerPlan]:
    return BORROWING if model.shape.lenders else PLANS


def one_by_one(model: LayeredModel) -> LayeredModel:
    """The same model, each half run by its own operations."""
    other = model.view(blocks=model.blocks)
    other._passes._alone = dict.fromkeys(model.full_plan.halves, "a test")
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
    layers = [layer for layer in plan.attention_layers if layer not in model.shape.keyless]
    return torch.cat(out), cache.keys[layers, :, :, :at], cache.values[layers, :, :, :at]


def with_foreign(model: LayeredModel, *which: tuple[int, bool]) -> LayeredModel:
    """The same with some halves (layer, is_attention) that our kernels do not know: an adapter that
    adds nothing stands beside their last product."""

    def changed(layer: int, block: Block) -> Block:
        last = [block.linears[1 if attention else 3] for at, attention in which if at == layer]
        zeros = [model.ops.linear([torch.zeros(1, each.inputs)], [None]) for each in last]
        ups = [model.ops.linear([torch.zeros(each.outputs, 1)], [None]) for each in last]
        beside = {
            id(each): LowRank(each, d, u) for each, d, u in zip(last, zeros, ups, strict=True)
        }
        return block.with_linears(lambda linear: beside.get(id(linear), linear))

    return model.view(blocks=[changed(*each) for each in enumerate(model.blocks)])


@pytest.fixture
def calls(monkeypatch):
    """How many halves each call to the kernels runs."""
    sizes: list[int] = []
    run = FusedHalves.run

    def counting(self, x, plan, begin, end, *rest):
        sizes.append(end - begin)
        return run(self, x, plan, begin, end, *rest)

    monkeypatch.setattr(FusedHalves, "run", counting)
    return sizes


FOREIGN = [[(1, False)], [(1, True)], [(0, True), (3, False)], [(2, True), (2, False)]]


_MIXED = ["llama", "gemma2", "gpt2", "cohere", "gpt-neox", "granite", "gemma4-small"]


@pytest.mark.parametrize("variant", _MIXED)
def test_foreign_halves_in_between_change_no_bit(variant):
    """A call that goes on past a foreign half, or begins again with the wrong stream; an MLP beside
    its attention (cohere) that reads what attention has added to; a scaled residual (granite)."""
    model = from_transformers(build(variant), kernel="native", check=False)
    for foreign in FOREIGN:
        mixed = with_foreign(model, *foreign)
        for plan in plans_of(model)[:3]:
            ours, alone = states_of(mixed, plan), states_of(one_by_one(mixed), plan)
            assert all(torch.equal(one, other) for one, other in zip(ours, alone, strict=True)), (
                f"foreign {foreign}, {plan}"
            )


def test_one_foreign_half_leaves_all_others_together(calls):
    """One adapter that makes every pass slow; a call for each half; and in a parallel layer a call
    that runs over the begin of the layer, after which nobody has what the MLP reads."""
    plan = LayerPlan(0, 4)
    for variant, foreign, expected in [
        ("llama", [], [8]),
        ("llama", [(1, False)], [3, 4]),
        ("llama", [(1, True)], [2, 5]),
        ("llama", [(0, True), (3, False)], [6]),
        ("cohere", [(1, False)], [2, 1, 4]),
        ("cohere", [(1, True)], [2, 5]),
    ]:
        model = with_foreign(
            from_transformers(build(variant), kernel="native", check=False), *foreign
        )
        del calls[:]
        states_of(model, plan, sizes=(5,))
        assert calls == expected, f"{variant}, foreign {foreign}"


def test_looking_at_a_mixed_model_changes_no_bit():
    """States after layers, and whoever watches halves, with a foreign half in between."""
    model = with_foreign(from_transformers(build("llama"), kernel="native"), (1, False), (2, True))
    x, results = model.embed(torch.arange(3, 12)), []
    for observer in (None, lambda *half: None):
        cache, collector = model.new_cache(1, 16), StateCollector([0, 1, 2])
        layout = cache.layout([9])
        out = model.run(x, model.full_plan, cache, layout, observer, [collector])
        ((_, states),) = collector.take()
        results.append((out, states, cache.keys))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    shorter = LayerPlan(0, 2)
    cache = model.new_cache(1, 16)
    cut = model.run(x, shorter, cache, cache.layout([9]))
    assert torch.equal(cut, results[0][1][:, 1]), "the state after layer 1"


def test_what_runs_alone_is_named_with_its_reason():
    """Layers counted wrongly, a reason lost, every half listed one by one."""
    model = from_transformers(build("llama"), kernel="native", check=False)
    adapter = "(an adapter beside its weights)"
    assert model.alone == []
    for foreign, said in [
        ([(3, False)], f"MLP of layer 3 {adapter}"),
        (
            [(0, True), (1, True), (3, False)],
            f"attention of layers 0 to 1 and MLP of layer 3 {adapter}",
        ),
        ([(2, True), (2, False)], f"layer 2 {adapter}"),
        ([(0, False), (2, False), (3, False)], f"MLP of layers 0, 2 to 3 {adapter}"),
        (model.full_plan.halves, f"every half {adapter}"),
    ]:
        assert with_foreign(model, *foreign).alone == [said]
    plain = from_transformers(build("llama"), kernel="plain", check=False)
    assert plain.alone == ["every half (torch multiplies)"]
    scaled = with_foreign(
        from_transformers(build("granite"), kernel="native", check=False), (3, False)
    )
    assert scaled.alone[0] == f"MLP of layer 3 {adapter}"
    assert "layers 0 to 3 and MLP of layers 0 to 2 (its result is scaled" in scaled.alone[1]


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_one_call_computes_what_single_halves_compute(variant):
    """A norm, scale, window, rope or parallel residual that got lost, for whole layers and where
    halves are skipped. And a norm or product that the runner does not know any more, which would
    silently make every pass slow again."""
    model = from_transformers(build(variant), kernel="native", check=False)
    assert model.alone == [] or model.shape.streams > 1
    for plan in plans_of(model):
        for ours, expected in zip(
            states_of(model, plan), states_of(one_by_one(model), plan), strict=True
        ):
            assert torch.allclose(ours, expected, atol=2e-5, rtol=2e-5), (
                f"{(ours - expected).abs().max():.2e} at {plan}"
            )


@pytest.mark.parametrize("variant", ["llama", "gpt2", "gemma2", "gpt-neox", "gemma4-small"])
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


@pytest.mark.parametrize("variant", ["llama", "cohere", "granite", "gemma4-small"])
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
    assert torch.equal(seen[0][2], model.states(x))
    assert torch.equal(seen[-1][3], model.states(plain))
    assert all(torch.equal(one[3], two[2]) for one, two in pairwise(seen))


def test_what_is_given_is_not_changed():
    """A pass that works in place: early exit carries the same states through the layers twice."""
    model = from_transformers(build("llama"), kernel="native")
    cache = model.new_cache(1, 16)
    x = model.embed(torch.arange(3, 12))
    kept = x.clone()
    model.run(x, model.full_plan, cache, cache.layout([9]))
    assert torch.equal(x, kept)


def test_a_view_with_an_adapter_has_halves_alone_and_the_model_none():
    """Products with something added are none that the kernels know; a view must not keep the
    other's halves."""
    model = from_transformers(build("llama"), kernel="native")
    view = lora_view(tiny_lora(model), model)
    assert model.alone == Passes(model.blocks).alone == []
    assert view.alone == [
        "attention of layers 0, 2 to 3 and MLP of layers 0, 3 (an adapter beside its weights)"
    ]
