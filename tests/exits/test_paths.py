"""Trees that leave the layers early, path by path: one decision a path, at the deepest of its
tokens, and numbers that are those of one token after the other."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from selfspec import LLM, OptionError, SamplingParams
from selfspec.core.tree import Tree
from selfspec.exits.part import Predictors
from selfspec.exits.paths import PathRow, fill_by_state, walk_paths
from selfspec.exits.rules import Counts, Predicted
from selfspec.lossy import LossyResult, SpecEE
from selfspec.model.compute.plan import LayerPlan
from selfspec.testing import near_identity_model, tiny_predictors, tiny_tokenizer

LAYERS, NEW = 8, 40
CALL: dict[str, Any] = {"max_new_tokens": NEW, "eos": []}
PROMPTS = [list(b"once upon a time, once upon"), [7], list(b"aXb aXb aXb a")]
#        0
#      /   \
#     1     3
#     |
#     2
TREE = Tree([60, 61, 62, 63], [-1, 0, 1, 0])
ELSE = 99  # a word that no guess is


@functools.cache
def llm() -> LLM:
    return LLM.from_pretrained(near_identity_model(0.6, seed=2), tokenizer=tiny_tokenizer())


def specee(**options: Any) -> SpecEE:
    part = tiny_predictors(llm().model, candidates=7, seed=3)
    how = {"part": part, "schedule": "all", "threshold": 0.4, "fill": "state", "tree": 6}
    return SpecEE(**{**how, **options})


class Scripted:
    """Fires for node i at layer `at[i]` and from there on, and says `words[i]`."""

    def __init__(self, at: Sequence[int], words: Sequence[int], denied: int = -1) -> None:
        self.at, self.words, self.denied = at, words, denied
        self.asked: list[tuple[int, list[int]]] = []
        self.checked: list[list[int]] = []

    def may_look(self, text: int) -> bool:
        return True

    def fires(self, layer: int, texts: Sequence[int], x: Tensor) -> list[bool]:
        self.asked.append((layer, list(texts)))
        return [layer >= self.at[text] for text in texts]

    def check(self, texts: Sequence[int], x: Tensor) -> Mapping[int, Tensor]:
        self.checked.append(list(texts))
        one_hot = torch.eye(llm().model.shape.vocabulary)
        if self.denied in texts and len(self.checked) == 1:
            texts = [text for text in texts if text != self.denied]
        return {text: one_hot[None, self.words[text]] for text in texts}


def walked(judge: Any, greedy: bool = True) -> PathRow:
    model, prompt = llm().model, PROMPTS[0]
    cache = model.new_cache(1)
    model.prefill([prompt], cache)
    looks = frozenset(range(1, LAYERS))
    row = PathRow(0, len(prompt), TREE, looks, 0, greedy)
    fill_by_state(model, cache, [row], walk_paths(model, cache, [row], judge))
    assert cache.lengths[0].tolist() == [len(prompt) + len(TREE)] * LAYERS
    return row


def test_a_path_leaves_where_its_deepest_token_may() -> None:
    """A path that leaves with its first token, one that takes its neighbour along, and a shared
    node that stops while a path through it goes on."""
    judge = Scripted([2, 4, 6, 3], [61, 62, ELSE, ELSE])
    assert walked(judge).layers == 6
    assert judge.checked == [[0, 3], [1, 2]], "the head was asked for less than a path"
    assert judge.asked[-1] == (6, [2]) and judge.asked[2] == (3, [1, 2, 3])


def test_who_is_not_followed_does_not_hold_up_the_others() -> None:
    """Waiting for a path that the words lead away from."""
    row = walked(Scripted([2, 99, 99, 3], [63, 62, ELSE, ELSE]))
    assert row.layers == 3 and {*row.said} == {0, 1, 2, 3}
    # a draw may lead elsewhere, so there all paths count
    assert walked(Scripted([2, 99, 99, 3], [63, 62, ELSE, ELSE]), False).layers == LAYERS
    assert walked(Scripted([2, 5, 5, 3], [63, 62, ELSE, ELSE]), False).layers == 5


def test_a_path_that_the_head_denies_goes_on() -> None:
    """A predictor that is believed without the head; a node that is never asked again."""
    judge = Scripted([2, 2, 2, 99], [61, 62, ELSE, ELSE], denied=1)
    assert walked(judge).layers == 3
    assert judge.asked[:2] == [(1, [0, 1, 2, 3]), (2, [0, 1, 2, 3])]
    assert judge.asked[2] == (3, [1, 3]), "what fired was asked again, or what was denied was not"


def test_features_in_one_product_are_those_of_a_plain_loop() -> None:
    """A node that is given another's candidates or another's last look, or sums that depend on who
    is beside it."""
    model = llm().model
    found = Predictors(tiny_predictors(model, candidates=4, seed=3), model)
    dice = torch.Generator().manual_seed(0)
    named = [torch.randperm(200, generator=dice)[:4].tolist() for _ in range(9)]
    rule = Predicted(model, found, 0.5)
    together = rule.judge(named, Counts())
    alone = [rule.judge([some], Counts()) for some in named]
    for layer in (2, 5, 6):
        x = torch.randn(9, model.shape.width, generator=dice)
        some = [0, 2, 3, 5, 8] if layer == 5 else list(range(9))
        ours = together.features(some, x[some])
        theirs = torch.cat([alone[at].features([0], x[at : at + 1]) for at in some])
        assert torch.equal(ours, theirs)
        scores = [found.score(layer, row[None]) for row in theirs]
        assert torch.equal(found.score(layer, ours), torch.cat(scores))
    assert bool((ours[:, 8:].abs().amax(1) > 0).all()), "nothing changed since the last look"


def test_without_exits_a_tree_is_what_the_model_says() -> None:
    """A node that sees its neighbour's branch, or a stretch of layers that runs twice."""
    model, prompt = llm().model, PROMPTS[0]
    caches = [model.new_cache(1), model.new_cache(1)]
    for cache in caches:
        model.prefill([prompt], cache)
    row = PathRow(0, len(prompt), TREE, frozenset({2, 5}), 0)
    walk_paths(model, caches[0], [row], Scripted([99] * 4, [0] * 4))  # type: ignore[arg-type]
    layout = caches[1].layout([len(TREE)], [TREE.parents])
    expected = model.forward(torch.tensor(TREE.tokens), caches[1], layout)
    assert torch.equal(torch.cat([row.said[node] for node in range(4)]), expected)


def test_skipped_layers_are_filled_from_the_state() -> None:
    """Layers that were skipped and not filled, or filled from another node's state."""
    model, prompt = llm().model, PROMPTS[0]
    cache, by_hand = model.new_cache(1), model.new_cache(1)
    for each in (cache, by_hand):
        model.prefill([prompt], each)
    row = PathRow(0, len(prompt), TREE, frozenset({3}), 0)
    judge: Any = Scripted([3] * 4, [61, 62, ELSE, ELSE])
    fill_by_state(model, cache, [row], walk_paths(model, cache, [row], judge))
    layout = by_hand.layout([len(TREE)], [TREE.parents])
    x = model.run(model.embed(torch.tensor(TREE.tokens)), LayerPlan(0, 3), by_hand, layout)
    for layer in range(3, LAYERS):
        plan = LayerPlan(layer, layer + 1, skipped_mlp=frozenset({layer}))
        model.run(x, plan, by_hand, layout)
    begin, end = len(prompt), len(prompt) + len(TREE)
    for ours, theirs in ((cache.keys, by_hand.keys), (cache.values, by_hand.values)):
        assert torch.equal(ours[..., begin:end, :], theirs[..., begin:end, :])


@pytest.mark.parametrize("source", ["recycle", "ngram", "hybrid"])
def test_a_text_without_exits_is_the_models(source: str) -> None:
    """A guess that is kept though the model says another word, a token that is read twice."""
    plain = [r.tokens for r in llm().generate(PROMPTS, draft=None, **CALL)]
    how = specee(threshold=1 - 1e-12, candidates=source)
    found = how.generate(llm(), PROMPTS, **CALL)
    assert [result.tokens for result in found] == plain
    assert {layer for result in found for layer in result.exits} == {LAYERS}
    assert sum(result.stats.accepted for result in found) > 0, "no guess was kept"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_exits_of_trees_are_flagged_and_rows_do_not_change_each_other(temperature: float) -> None:
    """A row that takes another along, a log of fewer tokens than were written, or an answer that
    could be taken for an exact one."""
    drawn = [
        SamplingParams(temperature=temperature, seed=row) if temperature else SamplingParams()
        for row in range(len(PROMPTS))
    ]
    found = specee().generate(llm(), PROMPTS, sampling=drawn, **CALL)
    for prompt, params, result in zip(PROMPTS, drawn, found, strict=True):
        assert isinstance(result, LossyResult) and result.lossy
        assert len(result.exits) == len(result.tokens) == NEW
        (alone,) = specee().generate(llm(), [prompt], sampling=[params], **CALL)
        assert (alone.tokens, list(alone.exits)) == (result.tokens, list(result.exits))
    # under sampling all paths have to leave, not only the one that is kept
    assert temperature or min(result.average_layers for result in found) < LAYERS
    assert any(result.stats.accepted for result in found)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"tree": -1}, "no number of guesses"), ({"fill": "caught-up"}, "use fill='state'")],
)
def test_trees_that_cannot_be_are_refused(options: dict[str, Any], words: str) -> None:
    """Holes that later tokens would read."""
    with pytest.raises(OptionError, match=words):
        specee(**options)
