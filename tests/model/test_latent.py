"""Latent attention: in the one call of a pass, and by itself."""

from __future__ import annotations

import pytest
import torch
from test_passes import PLANS, one_by_one, states_of
from variants import build

from selfspec.model.compute.linear import LowRank, without_low_rank
from selfspec.model.cores import LatentAttention
from selfspec.model.from_transformers import from_transformers

# queries of few numbers and as they are; values shorter and longer than keys; experts and none
VARIANTS = ["deepseek_v2-greedy", "deepseek_v3", "deepseek_v3-yarn", "youtu"]


@pytest.mark.parametrize("kind", ["float32", "int8", "int4", "bfloat16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_latent_attention_within_the_call_is_that_by_itself(variant, kind, threads):
    """A product that begins before its rows are normed, heads that are filled up with what was
    there before, values that lie as far apart as keys."""
    model = from_transformers(build(variant), weights=kind, check=False)
    assert model.alone == [] and model.at_once is not None
    for plan in PLANS[:3]:
        alone = states_of(one_by_one(model), plan)
        for many in (1, 3):
            threads(many)
            ours = states_of(model, plan)
            assert all(torch.equal(a, b) for a, b in zip(ours, alone, strict=True)), plan


def test_an_adapter_beside_what_unfolds_is_seen_and_can_be_taken_away():
    """A product of four that is forgotten where products are changed."""
    model = from_transformers(build("youtu"), check=False)
    assert all(isinstance(block._attention, LatentAttention) for block in model.blocks)
    zeros = torch.zeros(1, 24)

    def beside(linear):
        if linear.inputs != zeros.shape[1]:
            return linear
        up = model.ops.linear([torch.ones(linear.outputs, 1)], [None])
        return LowRank(linear, model.ops.linear([zeros], [None]), up)

    view = model.view(blocks=[block.with_linears(beside) for block in model.blocks])
    assert view.alone == ["attention of layers 0 to 3 (an adapter beside its weights)"]
    assert view.without_adapters.alone == []
    assert all(without_low_rank(each) is each for each in view.without_adapters.linears)
    plan = model.full_plan
    ours, alone = states_of(model, plan), states_of(view, plan)
    assert all(torch.equal(a, b) for a, b in zip(ours, alone, strict=True))
