"""Drafts that end where exit predictors doubt them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from selfspec import LLM, OptionError, SamplingParams
from selfspec.draft.registry import make_drafter
from selfspec.exits.part import Predictors
from selfspec.exits.rules import Counts, Predicted
from selfspec.exits.stop import StopRule
from selfspec.model.partial_head import partial_head
from selfspec.testing import near_identity_model, tiny_predictors, tiny_tokenizer

PROMPTS = [list(b"once upon a time, once upon"), [7, 9], list(b"aXb aXb aXb a")]
LAYERS, CALL = 8, {"max_new_tokens": 30, "eos": []}
# of each: its options, and the seed of predictors that are in two minds about the chance behind it
DRAFTERS: dict[str, tuple[dict[str, Any], int, float]] = {
    "early-exit": ({"layer": 5}, 1, 0.97),
    "layer-skip": ({"attention": (4, 5), "mlp": (5,)}, 0, 0.7),
    "cosine": ({"threshold": 0.5}, 0, 0.7),
    "kv-subset": ({"sink": 1, "recent": 2, "blocks": 1, "block_size": 2}, 0, 0.7),
}


def llm() -> LLM:
    return LLM.from_pretrained(near_identity_model(0.6, seed=2), tokenizer=tiny_tokenizer())


@pytest.mark.parametrize("depth, asked", [(5, 5), (8, 7), (6, 6)])
def test_it_says_what_the_predictor_says_of_the_likeliest_tokens(depth: int, asked: int) -> None:
    """A predictor of another layer, candidates that are not the likeliest, a threshold turned
    around. By hand: a first look with these candidates."""
    model = llm().model
    found = Predictors(tiny_predictors(model, candidates=4, seed=3), model)
    x = torch.randn(12, model.shape.width, generator=torch.Generator().manual_seed(1))
    logits, answers = model.head(x), set[bool]()
    named = logits.topk(4).indices.tolist()
    features = Predicted(model, found, 0.5).judge(named, Counts()).features(range(12), x)
    chances = found.score(asked, features).sigmoid().double()
    for share in (0.2, 0.5, 0.8):
        sure = float(chances.quantile(share))
        rule = StopRule(found, depth, sure)
        assert rule.layer == asked
        judge = Predicted(model, found, sure).judge(named, Counts())
        expected = judge.fires(asked, range(12), x)
        assert rule.goes_on(logits) == expected
        answers.update(expected)
    assert answers == {True, False}


def test_fewer_tokens_than_candidates() -> None:
    """A small vocabulary that breaks the rule, or places that are empty and count as tokens."""
    model = llm().model
    found = Predictors(tiny_predictors(model, candidates=6, seed=3), model)
    rule, part = StopRule(found, 5, 0.5), partial_head(model, 0, [3, 9, 40])
    x = torch.randn(5, model.shape.width, generator=torch.Generator().manual_seed(1))
    judge = Predicted(model, found, 0.5).judge(
        part.tokens[part(x).argsort(descending=True)].tolist(), Counts()
    )
    assert rule.goes_on(part(x)) == judge.fires(5, range(5), x)


@pytest.mark.parametrize("name", DRAFTERS)
def test_drafts_end_behind_a_token_that_is_doubted(name: str) -> None:
    """A rule that no draft asks, one that drops the doubted token (which would bias drawn text), or
    text that is not the model's."""
    here, (own, seed, middle) = llm(), DRAFTERS[name]
    part = tiny_predictors(here.model, candidates=4, seed=seed)

    def drafted(sure: float | None, **call: Any) -> tuple[list[list[int]], int, int]:
        more = {} if sure is None else {"sure": sure, "predictors": part}
        drafter = make_drafter(name, {**own, **more})
        how = {"control": "fixed", "control_options": {"tokens": 5}}
        found = here.generate(PROMPTS, draft=drafter, **how, **CALL, **call)
        stats = [result.stats for result in found]
        tokens = [result.tokens for result in found]
        return tokens, sum(each.drafted for each in stats), sum(each.rounds for each in stats)

    for sampling in (None, SamplingParams(temperature=0.9, seed=3)):
        plain = [r.tokens for r in here.generate(PROMPTS, draft=None, sampling=sampling, **CALL)]
        never = drafted(None, sampling=sampling)
        assert drafted(1e-9, sampling=sampling) == never
        text, guesses, rounds = drafted(1 - 1e-9, sampling=sampling)
        assert text == plain == never[0]
        assert 0 < guesses <= rounds, "more than the doubted token, or not even that"
        text, some, _ = drafted(middle, sampling=sampling)
        assert text == plain and guesses < some < never[1]


def test_what_cannot_stop_a_draft_is_refused() -> None:
    """Predictors without a chance, a chance that is none, a draft above all predictors."""
    here = llm()
    part = tiny_predictors(here.model, candidates=4, layers=[4, 6])
    for options, said in [
        ({"predictors": part}, r"add sure=0\.5"),
        ({"predictors": part, "sure": 1.0}, "sure=1.0 is no chance"),
        (
            {"predictors": part, "sure": 0.5, "layer": 3},
            "first predictor stands after 4.*--first 3",
        ),
    ]:
        with pytest.raises(OptionError, match=said):
            here.generate(PROMPTS[0], draft="early-exit", draft_options=options)
