"""Trained successors: counted as the definition says, looked up as they were counted, and of use to
token recycling."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from selfspec import LLM, OptionError
from selfspec.draft.from_text.recycle import TokenRecycling
from selfspec.testing import tiny_llm, tiny_model, tiny_tokenizer
from selfspec.train.own_text import OwnText, Question, write
from selfspec.train.part_run import train_successors
from selfspec.train.successors import LEAST, PRIOR, CountOptions, Seen, count
from selfspec.trained import files as extras
from selfspec.trained.files import TrainedPart, load_part, shipped_part
from selfspec.trained.successors import SUCCESSORS, Successors

VOCABULARY = 9


def seen(places: int, seed: int) -> Seen:
    """Some places with three likely tokens each; one chance in ten is 0, as where fewer were
    kept."""
    draw = np.random.default_rng(seed)
    tokens = np.stack([draw.permutation(VOCABULARY)[:3] for _ in range(places)])
    chances = draw.dirichlet((1.0, 1.0, 1.0), places) * (draw.random((places, 3)) > 0.1)
    context = (draw.integers(0, VOCABULARY, places) for _ in range(3))
    return Seen(*context, tokens, chances)


def as_part(tensors: dict[str, torch.Tensor]) -> TrainedPart:
    return TrainedPart(SUCCESSORS, {}, {"vocabulary": VOCABULARY}, tensors)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_counts_are_mean_probabilities(size: int) -> None:
    """Weights of one context added to another, sums instead of means, a context met once as sure as
    one met often."""
    places, options = seen(200, seed=size), CountOptions(pairs=1000, after_token=4, after_pair=2)
    kept = options.after_token if size == 1 else options.after_pair
    found = Successors(as_part(count(places, VOCABULARY, options)))
    sums: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    times: Counter[tuple[int, ...]] = Counter()
    contexts = zip(places.earlier, places.before, places.last, strict=True)
    for ends, tokens, chances in zip(contexts, places.tokens, places.chances, strict=True):
        context = tuple(map(int, ends))[-size:]
        times[context] += 1
        for token, chance in zip(tokens, chances, strict=True):
            sums[context][int(token)] += chance
    for context, total in sums.items():
        means = [
            (token, share / (times[context] + PRIOR)) for token, share in total.most_common(kept)
        ]
        expected = [(token, share) for token, share in means if share >= LEAST]
        assert [token for token, _ in found.after(context)] == [token for token, _ in expected]
        assert [share for _, share in found.after(context)] == pytest.approx(
            [share for _, share in expected], rel=1e-3
        )
    every = product(range(VOCABULARY), repeat=size)
    assert all(found.after(context) == () for context in every if context not in sums)


def test_chances_in_bfloat16_are_read() -> None:
    """A part that another tool wrote in half the size: numpy has no bfloat16."""
    chances = np.tile([0.5, 0.25], (2, 1))
    places = Seen(np.full(2, 7), np.full(2, 5), np.array([1, 2]), np.tile([4, 6], (2, 1)), chances)
    part = as_part(count(places, VOCABULARY, CountOptions()))
    halves = {
        name: tensor.bfloat16() if name.endswith("chances") else tensor
        for name, tensor in part.tensors.items()
    }
    for context in ((1,), (5, 2), (7, 5, 2)):
        found = Successors(replace(part, tensors=halves)).after(context)
        assert dict(found) == pytest.approx(dict(Successors(part).after(context)), rel=1e-2)
        assert len(found) == 2


def test_the_pairs_met_most_often_are_kept() -> None:
    """A limit that keeps the first pairs by number."""
    last = np.array([1, 2, 2, 3, 3, 3])
    places = Seen(
        np.full(6, 7), np.full(6, 5), last, np.tile([4, 6], (6, 1)), np.tile([0.6, 0.3], (6, 1))
    )
    found = Successors(as_part(count(places, VOCABULARY, CountOptions(pairs=2, triples=1))))
    assert [bool(found.after((5, token))) for token in (1, 2, 3)] == [False, True, True]
    assert [bool(found.after((7, 5, token))) for token in (1, 2, 3)] == [False, False, True]
    assert all(found.after((token,)) for token in (1, 2, 3)), "single tokens are all kept"


@pytest.fixture(scope="module")
def base() -> LLM:
    return tiny_llm(seed=4)


@pytest.fixture(scope="module")
def folder(base: LLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A part made as a user makes it: the model's own text, then the counting."""
    place = tmp_path_factory.mktemp("successors")
    tiny_model(seed=4).save_pretrained(place / "model")
    tiny_tokenizer().save_pretrained(place / "model")
    questions = [
        Question(str(number), [1, number, 2 * number], str(number)) for number in range(3, 40)
    ]
    write(base, questions, place / "own.jsonl", OwnText(max_new_tokens=40))
    report = train_successors(
        str(place / "model"), [place / "own.jsonl"], place / "part", held_out=0.2
    )
    assert report.done and len(report.acceptance) == 4 and 0 < report.acceptance[0] < 1
    return place / "part"


def test_recycling_with_trained_successors(base: LLM, folder: Path) -> None:
    """A part that is not looked up, or one that changes the text. A random model has no habits, so
    the prompts are known ones."""
    prompts = [[1, number, 2 * number] for number in range(3, 13)]
    fixed = {"control": "fixed", "control_options": {"tokens": 4}}
    plain = [
        base.generate(prompt, max_new_tokens=24, eos=[], draft=None).tokens for prompt in prompts
    ]
    gained = {}
    for part in ("none", str(folder)):
        results = [
            base.generate(
                prompt,
                max_new_tokens=24,
                eos=[],
                draft="recycle",
                draft_options={"part": part},
                **fixed,
            )
            for prompt in prompts
        ]
        assert [result.tokens for result in results] == plain
        gained[part] = sum(result.stats.accepted for result in results)
    assert gained[str(folder)] > 2 * gained["none"]


def test_a_part_belongs_to_its_model(folder: Path) -> None:
    """Another model's successors, which would be exact and useless; a part of another kind."""
    with pytest.raises(OptionError, match="trained on another model"):
        tiny_llm(seed=5).generate(
            [1, 2, 3], max_new_tokens=4, draft=TokenRecycling(part=str(folder))
        )
    part = load_part(folder)
    other = TrainedPart("draft-head", part.base, part.settings, part.tensors)
    with pytest.raises(OptionError, match="of kind 'draft-head'"):
        tiny_llm(seed=4).generate([1, 2, 3], max_new_tokens=4, draft=TokenRecycling(part=other))
    with pytest.raises(OptionError, match="is no part"):
        tiny_llm(seed=4).generate(
            [1, 2, 3], max_new_tokens=4, draft="recycle", draft_options={"part": "nowhere"}
        )


def test_the_part_that_comes_with_the_package_needs_no_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part that is shipped and never used; one that is looked for, at the price of a pass, in
    every request."""
    passes = []
    monkeypatch.setattr(extras, "SHIPPED", folder.parent)
    monkeypatch.setattr(
        extras, "signature", lambda model, real=extras.signature: passes.append(1) or real(model)
    )
    one, other = tiny_llm(seed=4), tiny_llm(seed=5)
    options = {
        "draft": "recycle",
        "control": "fixed",
        "control_options": {"tokens": 4},
        "max_new_tokens": 24,
        "eos": [],
    }
    named = one.generate([1, 3, 6], draft_options={"part": str(folder)}, **options).stats.accepted
    unnamed = [one.generate([1, 3, 6], **options).stats.accepted for _ in range(3)]
    without = one.generate([1, 3, 6], draft_options={"part": "none"}, **options).stats.accepted
    assert unnamed == [named] * 3 and named > without
    looked = len(passes)
    assert one.generate([1, 3, 6], **options).tokens and len(passes) == looked
    assert shipped_part(SUCCESSORS, other.model) is None


def test_states_of_another_part_are_used_again(folder: Path, base: LLM, tmp_path: Path) -> None:
    """Hours of reading done twice because the states were kept for a draft head."""
    place = folder.parent
    report = train_successors(
        str(place / "model"), [place / "own.jsonl"], tmp_path / "part", states=folder / "states"
    )
    assert report.done and load_part(tmp_path / "part").tensors["pairs.keys"].equal(
        load_part(folder).tensors["pairs.keys"]
    )


@pytest.mark.parametrize("name", ["pairs", "triples", "after_token", "after_pair"])
def test_bad_options(name: str) -> None:
    """A table of nothing, that drafts nothing and says nothing."""
    with pytest.raises(OptionError, match=f"{name}=0"):
        CountOptions(**{name: 0})
