"""Lossy decoding whose tokens leave at different layers: flagged, with the model's own text where
nobody leaves, and with keys and values that are what `fill` says."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from selfspec import LLM, OptionError, SamplingParams
from selfspec.lossy import AdaInfer, Confidence, LossyResult, SpecEE
from selfspec.lossy.session import _Leaving
from selfspec.model.compute.cache import KVCache
from selfspec.model.compute.plan import LayerPlan
from selfspec.testing import near_identity_model, tiny_predictors, tiny_tokenizer

PROMPTS = [list(b"once upon a time, once upon"), [7], list(b"aXb aXb aXb a")]
LAYERS, NEW = 8, 40
CALL: dict[str, Any] = {"max_new_tokens": NEW, "eos": []}
FILLS = ["caught-up", "state", "holes"]


@functools.cache
def llm() -> LLM:
    return LLM.from_pretrained(near_identity_model(0.6, seed=2), tokenizer=tiny_tokenizer())


def specee(**options: Any) -> SpecEE:
    part = tiny_predictors(llm().model, candidates=7, seed=3)
    return SpecEE(**{"part": part, "schedule": "all", "threshold": 0.4, **options})


@functools.cache
def plain() -> list[list[int]]:
    return [r.tokens for r in llm().generate(PROMPTS, draft=None, **CALL)]


@pytest.mark.parametrize("fill", FILLS)
def test_a_text_without_exits_is_the_models(fill: Any) -> None:
    """A last norm that is applied twice, entries in a wrong slot, a token that is read twice: all
    would show where nothing leaves early."""
    found = specee(threshold=1 - 1e-12, fill=fill).generate(llm(), PROMPTS, **CALL)
    for result, expected in zip(found, plain(), strict=True):
        assert result.tokens == expected
        assert list(result.exits) == [LAYERS] * NEW and result.average_layers == LAYERS


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("schedule", ["all", "both"])
def test_exits_are_flagged_and_change_the_text(fill: Any, schedule: Any) -> None:
    """A lossy answer that could be taken for an exact one, or layers that are run all the same."""
    found = specee(fill=fill, schedule=schedule).generate(llm(), PROMPTS, **CALL)
    assert all(isinstance(result, LossyResult) and result.lossy is True for result in found)
    assert all(len(result.exits) == len(result.tokens) == NEW for result in found)
    assert all(result.exits[0] == LAYERS for result in found), "the prompt is read whole"
    assert min(result.average_layers for result in found) < LAYERS - 1
    assert any(r.tokens != expected for r, expected in zip(found, plain(), strict=True))
    looking = found[0].looking
    early = sum(layer < LAYERS for result in found for layer in result.exits)
    assert looking.left == early and looking.looks > looking.fired >= looking.left > 0
    assert looking.tokens == len(PROMPTS) * (NEW - 1)
    assert looking.rule_seconds > 0 and looking.head_seconds > 0


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("rule", ["specee", "confidence", "adainfer"])
def test_rows_do_not_change_each_other(fill: Any, rule: str) -> None:
    """A neighbour that goes deeper and takes a row with it, a hole of another row, a row's log
    under another's name."""
    part = tiny_predictors(llm().model, candidates=7, seed=3)
    how: Any = {
        "specee": specee(fill=fill),
        "confidence": Confidence(0.05, fill=fill),
        "adainfer": AdaInfer(part, fill=fill),
    }[rule]
    together = how.generate(llm(), PROMPTS, **CALL)
    assert any(set(result.exits) != {LAYERS} for result in together), "nobody left"
    for prompt, result in zip(PROMPTS, together, strict=True):
        alone = how.generate(llm(), prompt, **CALL)
        assert (alone.tokens, list(alone.exits)) == (result.tokens, list(result.exits))


def test_caught_up_entries_are_the_models_own(monkeypatch: Any) -> None:
    """Keys and values that a later token attends to, and that are not what the model computes from
    these tokens."""
    caches: list[KVCache] = []
    start = _Leaving.__init__

    def watched(self: Any, target: Any, options: Any) -> None:
        caches.append(target.cache)
        start(self, target, options)

    monkeypatch.setattr(_Leaving, "__init__", watched)
    result = specee().generate(llm(), PROMPTS[0], **CALL)
    text, cache, model = [*PROMPTS[0], *result.tokens[:-1]], caches[0], llm().model
    fresh = model.new_cache(1)
    model.prefill([text], fresh)
    lengths = cache.lengths[0].tolist()
    assert lengths == sorted(lengths, reverse=True) and lengths[0] == len(text)
    assert lengths[-1] < len(text), "nothing is behind, so nothing is shown"
    for layer, known in enumerate(lengths):
        ours, theirs = cache.keys[layer, 0, :, :known], fresh.keys[layer, 0, :, :known]
        assert torch.equal(ours, theirs), f"layer {layer}"


def written_over(poison: float, fill: str, monkeypatch: Any) -> list[list[int]]:
    """The texts where caches begin full of a value."""

    def room(shape: Any, slots: int, dtype: Any, device: Any, unread: bool) -> Any:
        layers, rows, heads, size = shape
        full = functools.partial(torch.full, (layers, rows, heads, slots, size), poison)
        return full(dtype=dtype, device=device), full(dtype=dtype, device=device)

    monkeypatch.setattr("selfspec.model.compute.cache.room_for", room)
    return [result.tokens for result in specee(fill=fill).generate(llm(), PROMPTS, **CALL)]


def test_the_state_fills_what_was_skipped(monkeypatch: Any) -> None:
    """Layers that were skipped and not filled: their entries are what lay there before."""
    texts = [written_over(poison, "state", monkeypatch) for poison in (0.0, 9.0)]
    assert texts[0] == texts[1]


def test_holes_are_never_read(monkeypatch: Any) -> None:
    """What lies in a hole is another row's, or another text's: it must not matter. That holes are
    there is seen by the text, which is not that of filled ones."""
    texts = [written_over(poison, "holes", monkeypatch) for poison in (0.0, 9.0)]
    assert texts[0] == texts[1]
    filled = [r.tokens for r in specee(fill="state").generate(llm(), PROMPTS, **CALL)]
    assert filled != texts[0]


def test_confidence_leaves_at_the_first_sure_layer() -> None:
    """A threshold turned around, or another layer than the first. By hand: the first token after
    the prompt's, layer by layer."""
    prompt, least = PROMPTS[0], 0.05
    found = Confidence(least).generate(llm(), prompt, max_new_tokens=3, eos=[])
    model, text = llm().model, [*prompt, found.tokens[0]]
    cache = model.new_cache(1)
    x, layout = model.embed(torch.tensor(text)), cache.layout([len(text)])
    expected = LAYERS
    for layer in range(1, LAYERS):
        x = model.run(x, LayerPlan(layer - 1, layer), cache, layout)
        if float(model.head(x[-1:]).softmax(-1).max()) >= least:
            expected = layer
            break
    assert found.exits[1] == expected and expected < LAYERS


def test_sampling_stops_and_logprobs_are_those_of_generate() -> None:
    """A loop of its own that forgets seeds, limits or stops."""
    sampled = {**CALL, "sampling": SamplingParams(temperature=0.8, top_k=40, seed=7)}
    first = specee().generate(llm(), PROMPTS, **sampled)
    again = specee().generate(llm(), PROMPTS, **sampled)
    assert [r.tokens for r in first] == [r.tokens for r in again]
    whole = specee(threshold=1 - 1e-12).generate(llm(), PROMPTS, logprobs=1, **sampled)
    own = llm().generate(PROMPTS, draft=None, logprobs=1, **sampled)
    assert [r.tokens for r in whole] == [r.tokens for r in own]
    assert [r.logprobs for r in whole] == [r.logprobs for r in own]
    eos = first[0].tokens[6]
    stopped = specee().generate(llm(), PROMPTS[0], **{**sampled, "eos": [eos]})
    assert stopped.finish_reason == "eos" and len(stopped.exits) == len(stopped.tokens) <= 7
    one = specee().generate(llm(), PROMPTS[0], **{**CALL, "max_new_tokens": 1})
    assert list(one.exits) == [LAYERS] and one.average_layers == LAYERS


def test_the_whole_model_stays_whole() -> None:
    """Anything that a lossy call leaves behind."""
    specee().generate(llm(), PROMPTS, **CALL)
    assert [r.tokens for r in llm().generate(PROMPTS, draft=None, **CALL)] == plain()


@pytest.mark.parametrize("option", ["draft", "draft_options", "control", "control_options"])
def test_a_promise_of_exactness_beside_it_is_refused(option: str) -> None:
    """A drafter that is verified, and an exit that never is: the call would promise both."""
    with pytest.raises(OptionError, match=r"both cannot be had.*draft='dynamic-exit'"):
        specee().generate(llm(), PROMPTS, **{option: "ngram"})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SpecEE(fill="nothing"), "use caught-up, state, holes"),  # type: ignore[arg-type]
        (lambda: SpecEE(last=0), "leave nothing to go by"),
        (lambda: Confidence(0.5, layers=(8,)), "layer.*8 is not inside"),
        (lambda: Confidence(0.5, layers=(0, 2)), "layer.*0 is not inside"),
        (lambda: Confidence(1.5), "no chance"),
        (lambda: specee(layers=(9,)), "no predictor after layer 9"),
        (lambda: specee(candidates="draft-model"), "names no choice"),
    ],
)
def test_what_cannot_work_is_explained(make: Any, words: str) -> None:
    """An index error in the middle of a text, or an option that does nothing."""
    with pytest.raises(OptionError, match=words):
        make().generate(llm(), PROMPTS, **CALL)
