"""Mixtures of experts: in the one call of a pass, by themselves, and by torch."""

from __future__ import annotations

import pytest
import torch
from test_passes import PLANS, one_by_one, states_of
from variants import RECURRENT, SHORT, VARIANTS, build

from selfspec.model.compute.cpu.operations import NativeOps
from selfspec.model.compute.mixture import Mixture
from selfspec.model.compute.ops import TorchOps
from selfspec.model.cores import Experts, MlpAndExperts
from selfspec.model.families import FAMILIES
from selfspec.model.from_transformers import from_transformers

KINDS = ("float32", "int8", "int4", "bfloat16")
WITHOUT = ("granite-hybrid", "granite-hybrid-rotating", "nemotron-h")
WITH_EXPERTS = [
    variant
    for variant, (family, _) in {**VARIANTS, **SHORT, **RECURRENT}.items()
    if FAMILIES[family].experts and variant not in WITHOUT
] + ["gemma4-experts"]  # its config says so, not the table
WIDTH, COUNT = 40, 8


def a_mixture(ops, seed=0, shared=True, weighed=True, narrow=0, **options) -> Mixture:
    """`narrow`: how many numbers experts read, if not all."""
    generator = torch.Generator().manual_seed(seed)

    def product(outputs: int, inputs: int):
        return ops.linear([torch.randn(outputs, inputs, generator=generator) / 4], [None])

    sizes = [24] * COUNT + [56] * shared  # the shared one is wider
    read, gates = narrow or WIDTH, 1 + options.get("gated", True)
    return Mixture(
        router=product(COUNT + (shared and weighed), WIDTH),
        into=[product(gates * size, read) for size in sizes],
        out=[product(read, size) for size in sizes],
        shared=shared,
        narrow=product(narrow + gates * 48, WIDTH) if narrow else None,
        widen=product(WIDTH, narrow + 48) if narrow else None,
        **{"chosen": 3, **options},
    )


FAVOUR = torch.tensor([0.1, -0.2, 0.0, 0.2, -0.1, 0.1, -0.1, 0.2])
HOW = {
    "softmax": {},
    "as they are": {"normalised": False, "shared": False},
    "sigmoids, a favour, a scale": {
        "sigmoid": True, "favour": FAVOUR, "least": 1e-6, "scale": 1.7, "weighed": False,
    },
    "groups": {
        "sigmoid": True, "favour": FAVOUR, "groups": 4, "kept": 2, "best": 2, "least": 1e-20,
    },
    "the best of a group": {"groups": 4, "kept": 2, "normalised": False, "activation": "gelu"},
    "all of them": {"chosen": COUNT},
    "shares among the near": {"margin": 0.8, "chosen": 2, "shared": False},
    "no gates": {"gated": False, "activation": "relu2"},
    "narrow": {"narrow": 20, "shared": False},
    "narrow, no gates, a favour": {
        "narrow": 20, "shared": False, "gated": False, "activation": "relu2", "sigmoid": True,
        "favour": FAVOUR, "scale": 1.7,
    },
    "shares of their own": {"shares": FAVOUR + 1, "scale": 1.3},
}  # fmt: skip


@pytest.mark.parametrize("variant", WITH_EXPERTS)
def test_nothing_runs_alone(variant):
    """Experts that make a call end at every layer, and models that are no one call."""
    model = from_transformers(build(variant), check=False)
    assert any(isinstance(block._mlp, Experts | MlpAndExperts) for block in model.blocks)
    assert model.alone == [] and model.at_once is not None


@pytest.mark.zeros
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "variant", ["mixtral", "qwen2_moe", "flex_olmo", "mellum", "gemma4-experts"]
)
def test_experts_within_the_call_are_experts_by_themselves(variant, kind, threads):
    """A stream that was changed before all experts read it, rows of another expert's product, a
    shared expert that got lost, in passes of one token and of many."""
    model = from_transformers(build(variant), weights=kind, check=False)
    for plan in PLANS:
        alone = states_of(one_by_one(model), plan)
        for many in (1, 3):
            threads(many)
            ours = states_of(model, plan)
            assert all(torch.equal(a, b) for a, b in zip(ours, alone, strict=True)), plan


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", HOW)
def test_a_token_is_alone_with_its_experts(how, kind, threads):
    """Bits that depend on which other tokens have an expert, on how many rows there are, or on how
    many threads share them."""
    ops = NativeOps(kind)
    mixture = a_mixture(ops, **HOW[how])
    x = torch.randn(70, WIDTH, generator=torch.Generator().manual_seed(1))
    together = ops.mixed(x, mixture, x)
    chosen = mixture.choose(mixture.router(x)[:, :COUNT])[1].sort().values
    assert len(chosen.unique(dim=0)) > 1 or how == "all of them"
    for many in (1, 2, 5):
        threads(many)
        assert torch.equal(ops.mixed(x, mixture, x), together)
        for some in (slice(0, 1), slice(5, 12), slice(30, 70)):
            assert torch.equal(ops.mixed(x[some], mixture, x[some]), together[some])
        shuffled = torch.randperm(len(x), generator=torch.Generator().manual_seed(many))
        assert torch.equal(ops.mixed(x[shuffled], mixture, x[shuffled]), together[shuffled])


@pytest.mark.parametrize("how", HOW)
def test_experts_are_those_that_torch_chooses(how):
    """A group that is open and should not be, a favour that weighs, weights that sum to something
    else, a shared expert that is not weighed."""
    ops = NativeOps()
    mixture = a_mixture(ops, **HOW[how])
    x = torch.randn(50, WIDTH, generator=torch.Generator().manual_seed(2))
    chosen = mixture.choose(mixture.router(x)[:, :COUNT].sigmoid())[1]
    assert len(chosen.unique()) == COUNT, "some expert is never chosen, so nothing is said of it"
    by_torch = TorchOps.mixed(TorchOps(), x, mixture, x)
    assert torch.allclose(ops.mixed(x, mixture, x), by_torch, atol=1e-4, rtol=1e-4)


def test_a_share_is_among_scores_that_are_near():
    """The second of two chosen by its share of all, or beside the first one."""
    mixture = a_mixture(NativeOps(), **HOW["shares among the near"])
    weights, chosen = mixture.choose(torch.tensor([[2.0, 1.9, 0.1, 0.0, -1.0, -9.0, 1.8, -2.0]]))
    assert chosen.tolist() == [[0, 1]]
    near = torch.tensor([2.0, 1.9, 1.8])
    shares = [near.softmax(0)[0], near[1:].softmax(0)[0]]
    assert torch.allclose(weights[0], torch.stack(shares))


@pytest.mark.parametrize("kind", ["int8", "int4", "bfloat16"])
def test_what_chooses_experts_is_not_rounded(kind):
    """Other experts in few bits, for a few bytes that were saved."""
    model = build("nemotron-h-narrow")
    exact, rounded = (from_transformers(model, weights=w, check=False) for w in ("float32", kind))
    mixtures = [each.blocks[1]._mlp.mixture for each in (exact, rounded)]
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(*(mixture.router(x) for mixture in mixtures))
    assert not torch.equal(*(mixture.narrow(x) for mixture in mixtures))
    copied = mixtures[0].changed(lambda linear: None)
    assert copied.router is mixtures[0].router and copied.narrow is None


@pytest.mark.parametrize("what", [{"favour": None}, {"kept": 4}, {"best": 1}, {"least": 1.0}])
def test_each_part_of_the_choice_matters(what):
    """Scores on which a favour, groups or what is added to a sum change nothing."""
    ops = NativeOps()
    x = torch.randn(50, WIDTH, generator=torch.Generator().manual_seed(2))
    with_it, without = (
        ops.mixed(x, a_mixture(ops, **{**HOW["groups"], **change})) for change in ({}, what)
    )
    assert (with_it - without).abs().max() > 0.01


def test_scores_that_are_no_numbers_choose_some_expert():
    """NaN compared with: places beyond the last expert, where other memory is."""
    ops = NativeOps()
    mixture = a_mixture(ops)
    x = torch.ones(3, WIDTH)
    x[1] = torch.nan
    out = ops.mixed(x, mixture)
    assert out[1].isnan().all() and not out[[0, 2]].isnan().any()


def test_layers_may_have_mixtures_of_other_sizes():
    """Room for one layer's experts that another layer's are too many or too wide for: an old row
    taken for a new one, or memory of somebody else."""
    sizes = [(5, 8), (2, 96), (6, 40), (1, 200)]  # experts a token, and their width
    mixed = [
        from_transformers(
            build("qwen3-moe", num_experts_per_tok=many, moe_intermediate_size=wide,
                  mlp_only_layers=[]),
            check=False,
        ).blocks[layer]
        for layer, (many, wide) in enumerate(sizes)
    ]  # fmt: skip
    model = from_transformers(build("qwen3-moe"), check=False).view(blocks=mixed)
    ours, alone = (states_of(each, PLANS[0]) for each in (model, one_by_one(model)))
    assert all(torch.equal(a, b) for a, b in zip(ours, alone, strict=True))
