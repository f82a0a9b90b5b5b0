"""Samples and predictors: what is put down is what the model says, a run goes on where it stopped,
and what is fitted tells where the answer is there."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from selfspec import LLM, DataError, OptionError
from selfspec.draft.from_models.draft_head import DraftHead
from selfspec.exits.part import find_predictors
from selfspec.lossy import SpecEE
from selfspec.model.compute.plan import LayerPlan
from selfspec.testing import near_identity_model, tiny_head, tiny_tokenizer
from selfspec.train.exit_fitting import (
    FitOptions,
    by_layer,
    exit_shares,
    features,
    fit,
    oracle,
    right,
    split,
    summary,
    walked,
)
from selfspec.train.exit_samples import Collected, SampleOptions, collect, load_samples
from selfspec.train.fit_exits import fit_exits
from selfspec.train.own_text import Question
from sessions import begin

LAYERS = 8
TAKING = SampleOptions(samples=1200, batch=8, max_new_tokens=40)


@functools.cache
def llm() -> LLM:
    return LLM.from_pretrained(near_identity_model(0.8), tokenizer=tiny_tokenizer())


def questions(done: Collected, count: int = 60) -> Iterable[Question]:
    rng = random.Random(0)
    return [
        Question("x", [rng.randrange(3, 250) for _ in range(6)], "some", number)
        for number in range(count)
    ]


@pytest.fixture(scope="module")
def taken(tmp_path_factory: Any) -> Path:
    folder = tmp_path_factory.mktemp("samples")
    collect(llm(), questions, folder, TAKING)
    return folder


def test_samples_are_what_the_model_says(taken: Path) -> None:
    """Logits of another layer or token, a best token of the candidates that is none of all, an
    answer that is the token before. By hand: one prompt's answer, layer by layer."""
    samples, model = load_samples(taken), llm().model
    question = next(iter(questions(Collected())))
    mine = {name: each[samples["text"] == 0] for name, each in samples.items()}
    new = llm().generate(list(question.ids), max_new_tokens=40, draft=None).tokens
    assert len(mine["answer"]) == len(new) - 1
    text = [*question.ids, *new[:-1]]
    cache = model.new_cache(1)
    x, layout = model.embed(torch.tensor(text)), cache.layout([len(text)])
    same = []
    for layer in range(LAYERS):
        x = model.run(x, LayerPlan(layer, layer + 1), cache, layout)
        if layer < LAYERS - 1:
            whole = model.head(x[len(question.ids) :])
            same.append(whole.argmax(-1) == torch.tensor(new[1:]))
            logits = mine["logits"][:, layer]
            # the candidate that is the best token of all has its logit, and no other a higher one
            top, known = mine["top"][:, layer], mine["top"][:, layer] >= 0
            found = logits.gather(1, top.clamp(min=0).long()[:, None])[:, 0]
            assert torch.allclose(found[known], whole.amax(-1)[known], atol=1e-4)
            assert bool((logits.amax(-1)[~known] < whole.amax(-1)[~known]).all())
            best = whole.softmax(-1).topk(2).values
            expected = torch.stack([best[:, 0], best[:, 0] - best[:, 1]], -1)
            assert torch.allclose(mine["lead"][:, layer], expected, atol=1e-5)
    assert torch.equal(mine["same"], torch.stack(same, 1))
    assert 0 < float((samples["top"] >= 0).float().mean()) < 1
    assert 0.1 < float((samples["answer"] >= 0).float().mean()) < 1


def test_a_stopped_run_goes_on(tmp_path: Path) -> None:
    """Prompts answered twice, or samples of a batch that are lost."""
    calls: list[int] = []
    few = SampleOptions(samples=300, batch=4, max_new_tokens=20)
    first = collect(llm(), questions, tmp_path, few, max_seconds=0)
    assert first.stopped and first.samples == 0
    collect(llm(), questions, tmp_path, few, tell=lambda done: calls.append(done.samples))
    more = SampleOptions(samples=600, batch=4, max_new_tokens=20)
    second = collect(llm(), questions, tmp_path, more)
    assert second.found == calls[-1] >= 300 and second.samples >= 600
    whole = collect(llm(), questions, tmp_path / "at once", more)
    ours, theirs = load_samples(tmp_path), load_samples(tmp_path / "at once")
    assert whole.samples == second.samples
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"candidates": 3}, "candidates=4"), ({"source": "ngram"}, "source='recycle'")],
)
def test_other_samples_are_not_mixed(taken: Path, options: dict[str, Any], words: str) -> None:
    """Features of three candidates beside features of four."""
    with pytest.raises(DataError, match=words):
        collect(llm(), questions, taken, SampleOptions(samples=9999, **options))


def test_samples_of_another_model_and_broken_ones_are_explained(tmp_path: Path) -> None:
    """Predictors of two models at once; a file that a full disk cut off."""
    few = SampleOptions(samples=20, batch=4, max_new_tokens=10)
    collect(llm(), questions, tmp_path, few)
    other = LLM.from_pretrained(near_identity_model(0.8, seed=5), tokenizer=tiny_tokenizer())
    with pytest.raises(DataError, match="samples of another model"):
        collect(other, questions, tmp_path, few)
    (path,) = tmp_path.glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError, match="remove it, and they are taken again"):
        collect(llm(), questions, tmp_path, few)
    with pytest.raises(DataError, match="holds no samples"):
        load_samples(tmp_path / "nothing")


def some(same: list[list[int]], top: list[list[int]]) -> dict[str, torch.Tensor]:
    return {"same": torch.tensor(same).bool(), "top": torch.tensor(top)}


def test_the_oracle_is_the_earliest_layer_from_which_the_answer_stays() -> None:
    """An answer that is there once and goes away again, or one that is no candidate."""
    samples = some(
        [[1, 0, 1], [0, 1, 1], [1, 1, 1], [0, 0, 0], [1, 1, 0], [1, 1, 1]],
        [[0, 1, 0], [1, 0, 0], [2, 2, 2], [0, 0, 0], [0, 0, 0], [-1, -1, -1]],
    )
    assert oracle(samples, 4).tolist() == [3, 2, 1, 4, 4, 4]
    assert right(samples)[5].tolist() == [False] * 3


def test_change_goes_back_to_the_last_look() -> None:
    """A change since the layer before, where that was not looked at: predictors would learn
    features that they never see."""
    logits = torch.randn(5, 4, 3, generator=torch.Generator().manual_seed(0))
    gaps = torch.tensor([[1, 1, 2, 3]] * 4 + [[9, 9, 9, 9]])
    x, shares = features({"logits": logits}, gaps), logits.softmax(-1)
    assert x.shape == (4, 5, 9)
    assert torch.allclose(x[2, 0, 6:], shares[0, 2] - shares[0, 0], atol=1e-6)
    assert torch.allclose(x[3, 0, 6:], shares[0, 3] - shares[0, 0], atol=1e-6)
    assert torch.allclose(x[1, 0, 6:], shares[0, 1] - shares[0, 0], atol=1e-6)
    assert x[0, :, 6:].abs().max() == 0, "nothing was looked at before the first layer"
    assert x[:, 4, 6:].abs().max() == 0, "a first look"


def test_what_is_fitted_tells_where_the_answer_is(taken: Path) -> None:
    """Labels of another layer, features that are not those that predictors see, standardised
    numbers that are not folded back, and a network that learns nothing. The guess to beat is the
    commoner of the two answers."""
    parts = split(load_samples(taken), 0.2)
    assert not {*parts.fit["text"].tolist()} & {*parts.held_out["text"].tolist()}
    tensors = fit(parts.fit, FitOptions(hidden=64, epochs=25))
    rows = by_layer(tensors, parts.held_out, llm().info.layers)
    for name, least, most in (
        ("accuracy", 0.9, 1.0),
        ("recall", 0.4, 1.0),
        ("precision", 0.5, 1.0),
        ("reliability_error", 0.0, 0.15),
    ):
        seen = [row[name] for row in rows[1:] if row[name] is not None]
        assert least < sum(seen) / len(seen) <= most, (name, seen)
    # predictors of the layer before, which see other features: what is lost shows that they differ
    rolled = {name: each.roll(1, 0) for name, each in tensors.items()}
    wrong = summary(rolled, parts.held_out, LAYERS)
    found = summary(tensors, parts.held_out, LAYERS)
    assert found["agreement"] > 0.97
    assert found["saved_of_oracle"] > 0.6
    assert wrong["agreement"] < found["agreement"] or (
        wrong["saved_of_oracle"] < found["saved_of_oracle"]
    )
    assert found["oracle_layers"] < LAYERS - 0.2, "there was nothing to save"
    shares = exit_shares(tensors, parts.held_out, LAYERS)
    exits, _ = walked(tensors, parts.held_out, LAYERS)
    assert len(shares) == LAYERS - 1
    assert sum(shares) == pytest.approx(float((exits < LAYERS).float().mean()), abs=1e-5)


def test_a_part_is_written_and_used(tmp_path: Path) -> None:
    """Tensors in an order or of a shape that running does not expect: what held-out text promised
    would not come true. Lossy decoding agrees with the model about as often as promised."""
    report = fit_exits(
        llm(), questions, tmp_path, TAKING, FitOptions(hidden=64, epochs=25, held_out=0.2),
        with_curve=True,
    )  # fmt: skip
    assert report.done and report.samples >= 1200 and len(report.layers) == LAYERS - 1
    assert [row["samples"] for row in report.curve][-1] > report.curve[0]["samples"]
    found = find_predictors(tmp_path, llm().model)
    assert (found.count, found.source, found.layers) == (4, "recycle", tuple(range(1, LAYERS)))
    prompts = [list(question.ids) for question in list(questions(Collected(), 80))[60:]]
    call: dict[str, Any] = {"max_new_tokens": 30, "eos": []}
    results = SpecEE(tmp_path, schedule="all").generate(llm(), prompts, **call)
    model, agreed, of = llm().model, 0, 0
    for prompt, result in zip(prompts, results, strict=True):
        text = torch.tensor([*prompt, *result.tokens[:-1]])
        cache = model.new_cache(1)
        said = model.forward(text, cache, cache.layout([len(text)])).argmax(-1)
        agreed += int((said[len(prompt) - 1 :] == torch.tensor(result.tokens)).sum())
        of += len(result.tokens)
    assert agreed / of > 0.95
    average = sum(result.average_layers for result in results) / len(results)
    assert average < LAYERS - 0.1
    assert not fit_exits(llm(), questions, tmp_path / "b", TAKING, max_seconds=0).done


def test_too_few_samples_are_explained(tmp_path: Path) -> None:
    """A network fitted to nothing, with an accuracy of NaN."""
    with pytest.raises(DataError, match="at least 64 are needed"):
        fit_exits(
            llm(), lambda done: questions(done, 4), tmp_path,
            SampleOptions(samples=100, batch=4, max_new_tokens=10),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (SampleOptions, {"candidates": 0}),
        (SampleOptions, {"samples": 0}),
        (SampleOptions, {"max_new_tokens": 1}),
        (FitOptions, {"hidden": 0}),
        (FitOptions, {"epochs": 0}),
        (FitOptions, {"held_out": 1.0}),
        (FitOptions, {"learning_rate": 0.0}),
    ],
)
def test_options_that_fit_nothing_are_refused(kind: Any, options: dict[str, Any]) -> None:
    """Values that end in an empty tensor."""
    with pytest.raises(OptionError):
        kind(**options)


def test_adainfer_is_fitted_where_scikit_learn_is(taken: Path) -> None:
    """A separating line turned around, or an import error without a remedy."""
    from selfspec.train.exit_fitting import fit_svms

    samples = load_samples(taken)
    try:
        import sklearn  # noqa: F401
    except ImportError:
        with pytest.raises(OptionError, match=r"pip install 'selfspec\[exits\]'"):
            fit_svms(samples)
        return
    svms = fit_svms(samples)
    weights, bias = svms["svm.weight"], svms["svm.bias"]
    for place in (3, 5, 6):
        says = (samples["lead"][:, place] * weights[place]).sum(-1) + bias[place] >= 0
        accuracy = float((says == samples["same"][:, place]).float().mean())
        common = float(samples["same"][:, place].float().mean())
        assert accuracy >= max(common, 1 - common) - 0.02


def test_a_head_names_what_is_fitted(tmp_path: Path) -> None:
    """Candidates of a head that reads states of other tokens, or none: those behind the same text
    are what it drafts, read in one pass. By hand: the head's first draft behind each token."""
    part = tiny_head(llm().model, seed=5, layers=(1, 7))
    part.save(tmp_path / "head")
    taking = replace(TAKING, source="draft-head", head=str(tmp_path / "head"), samples=60)
    fitting = FitOptions(hidden=16, epochs=2, held_out=0.34)
    fit_exits(llm(), questions, tmp_path / "exits", taking, fitting)
    samples = load_samples(tmp_path / "exits" / "samples")
    asked = [each for _, each in zip(range(TAKING.batch), questions(Collected()), strict=False)]
    for number, question in enumerate(asked):
        new = llm().generate(list(question.ids), max_new_tokens=40, draft=None).tokens
        answers = samples["answer"][samples["text"] == number].tolist()
        assert len(answers) == len(new) - 1
        text = [*question.ids, *new]
        for at, answer in enumerate(answers[:6], len(question.ids) + 1):
            session = begin(DraftHead(part), llm().model, [text[:at]])
            llm().model.prefill(
                [text[: at - 1]], session.target.cache, collectors=session.collectors
            )
            ((*named,),) = session.named([0], [text[:at]], TAKING.candidates)
            assert answer == (named.index(text[at]) if text[at] in named else -1)
    found = find_predictors(tmp_path / "exits", llm().model)
    assert found.source == "draft-head"
    result = SpecEE(tmp_path / "exits", head=part).generate(llm(), [5, 6, 7], max_new_tokens=8)
    assert result.lossy
    with pytest.raises(OptionError, match="read no head"):
        fit_exits(llm(), questions, tmp_path / "no", replace(taking, source="ngram"), fitting)
