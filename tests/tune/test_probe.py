"""What the probe says of a candidate is what drafting with it does."""

from __future__ import annotations

from typing import Any

import pytest

from selfspec.core.contract import Budget
from selfspec.core.sampling import Sampler, SamplingParams
from selfspec.draft.base import Target
from selfspec.draft.registry import make_drafter
from selfspec.llm import LLM
from selfspec.model.compute.plan import LayerPlan
from selfspec.model.copies import copy_in
from selfspec.model.from_transformers import from_transformers
from selfspec.testing import near_identity_model, tiny_model
from selfspec.tune.probe import Probe, Text

DEEPEST = 4
WAYS: list[tuple[str, dict[str, Any]]] = [
    ("early-exit", {"layer": 2}),
    ("layer-skip", {"attention": (3, 5), "mlp": (2,)}),
    ("quantised", {"weights": "int4", "first": "none"}),
]


def _view(model: Any, name: str, options: dict[str, Any]) -> tuple[Any, LayerPlan]:
    if name == "quantised":
        return copy_in(model, options["weights"]), model.full_plan
    if name == "early-exit":
        return model, LayerPlan(0, options["layer"])
    return model, LayerPlan.skipping(model.layers, options["attention"], options["mlp"])


@pytest.mark.parametrize(("name", "options"), WAYS, ids=[name for name, _ in WAYS])
def test_a_chain_is_probed_as_it_would_be_drafted(name: str, options: dict[str, Any]) -> None:
    """Entries of the wrong side of a chain's begin, shifted positions, chains that see others."""
    model = from_transformers(near_identity_model(0.7), check=False)
    ids = [5, *LLM(model, None, "tiny").generate([5], max_new_tokens=40, eos=[], draft=None).tokens]
    probe = Probe(model, [Text(ids, 1)], DEEPEST)
    found = probe.agreement(*_view(model, name, options), phases=range(DEEPEST))
    expected = []
    for phase in range(DEEPEST):
        for begin in range(1 + phase, len(ids) - DEEPEST, DEEPEST):
            cache = model.new_cache(1, 64)
            drafter = make_drafter(name, options)
            assert drafter is not None
            model.prefill([ids[:begin]], cache)
            cache.rollback(0, begin)
            session = drafter.start(Target(model, cache))
            session.admit(0, ids[: begin + 1], Sampler(SamplingParams(), 0))
            (draft,) = session.propose([0], [ids[: begin + 1]], Budget([DEEPEST]))
            right = 0
            while right < DEEPEST and draft.guesses[right] == ids[begin + 1 + right]:
                right += 1
            expected.append(right)
    assert found.kept.sum(1).tolist() == expected
    assert 0 < sum(expected) < DEEPEST * len(expected), "one that is always right proves nothing"


@pytest.mark.parametrize(("name", "options"), WAYS, ids=[name for name, _ in WAYS])
@pytest.mark.parametrize("tokens", [1, 3])
def test_walks_through_a_text_keep_what_decoding_keeps(
    name: str, options: dict[str, Any], tokens: int
) -> None:
    """Rounds that begin where real ones do not, drafts beyond a round's that are counted."""
    model = from_transformers(near_identity_model(0.6), check=False)
    llm, prompts = LLM(model, None, "tiny"), ([5, 9, 3], [50])
    texts = []
    for ids in prompts:
        new = llm.generate(ids, max_new_tokens=60, eos=[], draft=None).tokens
        texts.append(Text([*ids, *new], len(ids)))
    probe = Probe(model, texts, DEEPEST)
    found = probe.agreement(*_view(model, name, options), phases=probe.everywhere)
    said = found.rounds(tokens)
    how = {"control": "fixed", "control_options": {"tokens": tokens}}
    kept: list[int] = []
    for text in texts:
        own: list[int] = []
        stream = llm.stream(
            list(text.ids[: text.prompt]), max_new_tokens=60, eos=[], draft=name,
            draft_options=options, **how,
        )  # fmt: skip
        for piece in stream:
            own += [piece.accepted] if piece.rejected or piece.accepted else []
        places = 0  # the probe's chains end where a whole one would not fit any more
        for accepted in own:
            if places >= 60 - DEEPEST:
                break
            kept.append(accepted)
            places += accepted + 1
    assert said == kept
    assert found.rounds(tokens) != found.kept[:, :tokens].sum(1).tolist(), "all chains are walked"


def test_the_model_agrees_with_itself() -> None:
    """A probe that misreads its own texts, in several rows and chunks."""
    model = from_transformers(tiny_model("qwen3"), check=False)
    llm = LLM(model, None, "tiny")
    texts = []
    for first, prompt in ((5, 3), (50, 300)):
        asked = [first] * prompt
        new = llm.generate(asked, max_new_tokens=30, eos=[], draft=None).tokens
        texts.append(Text([*asked, *new], prompt))
    found = Probe(model, texts).agreement(model, model.full_plan)
    assert found.by_depth == [1.0] * 8
    assert found.expected(8) == 8
    assert found.acceptance(3) == 1


def test_acceptance_counts_chains_to_their_first_miss() -> None:
    """Right guesses behind a wrong one that are counted as kept."""
    import torch

    from selfspec.tune.probe import Agreement

    right = torch.tensor([[True, False, True], [True, True, False], [False, True, True]])
    found = Agreement(right, right.float(), 9)
    assert found.kept.tolist() == [[True, False, False], [True, True, False], [False] * 3]
    assert found.expected(3) == pytest.approx(1.0)
    assert found.acceptance(2) == pytest.approx(0.5)
    assert found.by_depth == pytest.approx([2 / 3, 1 / 2, 0])


def test_what_was_not_looked_at_is_kept_as_the_deepest_that_was() -> None:
    """Chains that end at the depth of the probe, or go on as if nothing were ever wrong."""
    import torch

    from selfspec.tune.probe import Agreement

    right = torch.tensor([[True, True, True]] * 3 + [[True, True, False], [False, True, True]])
    found = Agreement(right, right.float(), 15)
    assert found.expected(3) == pytest.approx(11 / 5)
    assert found.expected(5) == pytest.approx(11 / 5 + 3 / 5 * (3 / 4 + (3 / 4) ** 2))
    never = Agreement(torch.zeros(2, 3, dtype=torch.bool), torch.zeros(2, 3), 6)
    assert never.expected(9) == 0
