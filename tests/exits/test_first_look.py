"""Candidates that a token's first look names: whose they are, that drafts by them change no text,
and that predictors can be fitted with them."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from selfspec import LLM, OptionError, SamplingParams
from selfspec.exits.features import CandidateRows
from selfspec.exits.first_look import SOURCE, FirstLookRows, rows_of
from selfspec.exits.part import find_predictors
from selfspec.exits.rules import Counts, Predicted
from selfspec.lossy import SpecEE
from selfspec.model.partial_head import head_over
from selfspec.testing import near_identity_model, tiny_predictors, tiny_tokenizer
from selfspec.train.exit_fitting import FitOptions
from selfspec.train.exit_samples import SampleOptions
from selfspec.train.fit_exits import fit_exits
from selfspec.train.own_text import Question
from selfspec.trained.files import load_part

POOL = tuple(range(60, 200))
PROMPTS = [list(b"once upon a time"), list(b"aXb aXb"), list(b"the lazy dog")]
CALL: dict[str, Any] = {"max_new_tokens": 24, "eos": []}


@functools.cache
def llm() -> LLM:
    return LLM.from_pretrained(near_identity_model(0.6, seed=2), tokenizer=tiny_tokenizer())


def part(tmp_path: Path, tokens: tuple[int, ...] = POOL) -> Path:
    layers = range(3, llm().model.layers)
    tiny_predictors(
        llm().model, candidates=4, seed=3, source=SOURCE, layers=layers, tokens=tokens
    ).save(tmp_path)
    return tmp_path


def test_the_first_look_names_the_pools_likeliest() -> None:
    """Candidates of a neighbour, of a later look, from outside the pool, or logits in another order
    than the candidates."""
    model = llm().model
    pools = [head_over(model, torch.tensor(ids)) for ids in (POOL, range(5, 50))]
    first, second = torch.randn(2, 2, model.shape.width, generator=torch.Generator().manual_seed(1))
    rows = rows_of(model, pools, 4)
    assert isinstance(rows, FirstLookRows) and all(rows.known)
    own = [(1, 4), (0, 4)]  # text 1 is looked at first
    for at, (text, _) in enumerate(own):
        rows.logits([text], first[at : at + 1])
    whole = model.head(first).float()
    for at, (text, count) in enumerate(own):
        ids = pools[text].tokens
        wanted = ids[whole[at, ids].topk(count).indices].tolist()
        assert rows.tokens[text].tolist() == wanted
        assert rows.names(text, wanted[0]) and not rows.names(text, -1)
    before = rows.tokens.clone()
    logits = rows.logits([0, 1], second)
    assert torch.equal(before, rows.tokens), "named again"
    same = CandidateRows(model, before.tolist(), 4).logits([0, 1], second)
    assert torch.allclose(logits, same, atol=1e-5)
    assert torch.allclose(logits, model.head(second).float().gather(1, before), atol=1e-3)


def test_a_draft_asks_the_pool_and_nobody_else() -> None:
    """The whole head asked for a draft, which the model verifies anyway; or a token from outside
    the pool said by it."""
    model = llm().model
    found = find_predictors(tiny_predictors(model, source=SOURCE, layers=[3], tokens=POOL), model)
    x, pool = torch.randn(1, model.shape.width), [head_over(model, torch.tensor(POOL))]
    for drafts in (True, False):
        judge = Predicted(model, found, 0.5).judge(pool, Counts(), drafts)
        judge.features([0], x)
        said = judge.check([0], x)
        if drafts:
            assert set(said) == {0}, "the pool's best is a candidate"
            outside = sorted({*range(model.shape.vocabulary)} - {*POOL})
            assert said[0].shape == (1, model.shape.vocabulary)
            assert bool((said[0][0, outside] == -torch.inf).all())
        else:
            assert all(bool(row[0].isfinite().all()) for row in said.values())


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_by_first_looks_change_no_text(tmp_path: Path, temperature: float) -> None:
    """A guess of the pool that is not verified, rows whose pools are swapped, a draft that keeps
    nothing."""
    how = {**CALL, "sampling": SamplingParams(temperature=temperature)}
    if temperature:
        how["sampling"] = SamplingParams(temperature=temperature, seed=5)
    plain = llm().generate(PROMPTS, draft=None, **how)
    options = {"part": part(tmp_path)}
    found = llm().generate(PROMPTS, draft="dynamic-exit", draft_options=options, **how)
    assert [r.tokens for r in found] == [r.tokens for r in plain]
    assert sum(r.stats.accepted for r in found) > 0
    alone = llm().generate(PROMPTS[1], draft="dynamic-exit", draft_options=options, **how)
    assert alone.tokens == llm().generate(PROMPTS[1], draft=None, **how).tokens


def test_trees_are_guessed_from_the_text_beside_first_looks(tmp_path: Path) -> None:
    """Trees of nothing but roots, a guesser that is not told what was kept, nodes that share one
    text's candidates, rows that change each other."""
    folder = part(tmp_path)
    plain = [r.tokens for r in llm().generate(PROMPTS, draft=None, **CALL)]
    never = SpecEE(folder, threshold=1 - 1e-12, schedule="all", fill="state", tree=6)
    found = never.generate(llm(), PROMPTS, **CALL)
    assert [result.tokens for result in found] == plain
    assert sum(result.stats.accepted for result in found) > 0, "no guess was kept"
    longer = {**CALL, "max_new_tokens": 80}
    alike = [
        how.generate(llm(), PROMPTS, **longer)[2].stats.accepted
        for how in (never, replace(never, candidates="hybrid"))
    ]
    assert alike[0] == alike[1], "the guesser knows less than where it names candidates"
    often = SpecEE(folder, threshold=0.4, schedule="all", fill="state", tree=6)
    found = often.generate(llm(), PROMPTS, **CALL)
    assert min(result.average_layers for result in found) < llm().model.layers
    for prompt, result in zip(PROMPTS, found, strict=True):
        alone = often.generate(llm(), prompt, **CALL)
        assert (alone.tokens, list(alone.exits)) == (result.tokens, list(result.exits))


def test_what_cannot_be_named_is_refused(tmp_path: Path) -> None:
    """A pool that predictors lack, a pool smaller than the candidates, tokens that nobody reads."""
    model = llm().model
    lacking = tiny_predictors(model, source=SOURCE)
    with pytest.raises(OptionError, match="came without the tokens"):
        SpecEE(lacking).generate(llm(), PROMPTS[0], **CALL)
    with pytest.raises(OptionError, match="0 tokens: first-look needs some"):
        SampleOptions(source=SOURCE)
    with pytest.raises(OptionError, match="nobody else takes any"):
        SampleOptions(pool=(1, 2, 3, 4))
    with pytest.raises(OptionError, match="cannot be chosen from 3 tokens"):
        SampleOptions(source=SOURCE, pool=(1, 2, 3))


def test_predictors_are_fitted_from_a_layer_on(tmp_path: Path) -> None:
    """Layers counted from the first in place of where looks begin, a pool that is not kept, or
    samples of other first layers mixed in."""
    asked = [Question("", ids, "known", number) for number, ids in enumerate(PROMPTS * 4)]
    asked = [Question("", [*q.ids, 65 + q.number], "known", q.number) for q in asked]
    taking = SampleOptions(
        source=SOURCE, pool=POOL, first=3, samples=300, batch=4, max_new_tokens=30
    )
    options = FitOptions(hidden=16, epochs=4, held_out=0.34)
    report = fit_exits(llm(), lambda _: asked, tmp_path, taking, options)
    layers = llm().model.layers
    assert [row["layer"] for row in report.layers] == list(range(3, layers))
    assert 3 <= report.summary["oracle_layers"] <= layers
    found = find_predictors(tmp_path, llm().model)
    assert found.layers == tuple(range(3, layers)) and len(found.exits) == layers - 3
    assert found.pool is not None and tuple(found.pool.tokens.tolist()) == POOL
    assert load_part(tmp_path).settings["source"] == SOURCE
    result = SpecEE(tmp_path, schedule="all").generate(llm(), PROMPTS[0], **CALL)
    assert result.lossy and min(result.exits) >= 3
    with pytest.raises(Exception, match="first=3"):
        fit_exits(
            llm(), lambda _: asked, tmp_path,
            SampleOptions(source=SOURCE, pool=POOL, first=4), options,
        )  # fmt: skip
    with pytest.raises(OptionError, match="leaves no exit"):
        fit_exits(llm(), lambda _: asked, tmp_path / "none", SampleOptions(first=layers), options)
