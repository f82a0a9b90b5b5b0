"""Tokens that stand at different layers: the states and entries are the whole model's bits, and no
layer is run twice for a token. The reference is one pass of everything on another cache."""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from selfspec.exits.rules import Counts, Judge
from selfspec.exits.stairs import Stairs
from selfspec.exits.walk import finish, walk
from selfspec.model.compute.cache import KVCache
from selfspec.model.compute.plan import LayerPlan
from selfspec.model.from_transformers import from_transformers
from selfspec.model.layered import LayeredModel
from selfspec.testing import tiny_model

LAYERS = 6
FAMILIES: dict[str, dict[str, Any]] = {"llama": {}, "mistral": {"sliding_window": 5}, "gpt2": {}}
PROMPTS = {0: [3, 4, 5, 6], 2: [9, 1], 1: [30, 31, 32]}


@functools.cache
def model_of(family: str) -> LayeredModel:
    changes = {"num_hidden_layers": LAYERS, **FAMILIES[family]}
    return from_transformers(tiny_model(family, seed=4, **changes), check=False)


class Leaves(Judge):
    """Lets each text leave where a script says."""

    def __init__(self, model: LayeredModel, where: Sequence[int]) -> None:
        super().__init__(model, Counts())
        self._where = where
        self.seen: list[tuple[int, list[int]]] = []

    def _look(self, layer: int, texts: Sequence[int], x: torch.Tensor) -> Mapping[int, Any]:
        self.seen.append((layer, list(texts)))
        gone = [at for at, text in enumerate(texts) if self._where[text] == layer]
        return {texts[at]: self._head(x[at : at + 1]) for at in gone}


def begun(model: LayeredModel) -> KVCache:
    cache = model.new_cache(3, 64)
    model.prefill([PROMPTS[row] for row in range(3)], cache)
    return cache


def whole(model: LayeredModel, written: Mapping[int, Sequence[int]]) -> tuple[KVCache, list[Any]]:
    """One pass of everything: its cache, and of each row its tokens' states after each layer."""
    cache = begun(model)
    found: list[Any] = []
    for row in range(3):
        counts = [len(written[row]) if each == row else 0 for each in range(3)]
        layout = cache.layout(counts)
        x, after = model.embed(torch.tensor(written[row])), []
        for layer in range(LAYERS):
            x = model.run(x, LayerPlan(layer, layer + 1), cache, layout)
            after.append(x)
        found.append(after)
    return cache, found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(4))
def test_stairs_are_the_whole_models_bits(family: str, seed: int) -> None:
    """A token that goes deeper before those before it: its attention reads entries that are not
    there. A token caught up with another's state, run twice, or left behind. Lucky if all leave at
    one layer, so that they differ is looked at."""
    model, rng, rows = model_of(family), random.Random(seed), [1, 0, 2]
    cache = begun(model)
    before = cache.computed.copy()
    stairs = Stairs(model, cache)
    for row in rows:
        stairs.begin(row, len(PROMPTS[row]))
    written: dict[int, list[int]] = {row: [] for row in rows}
    last: list[Any] = []
    for _ in range(7):
        on = sorted(rng.sample(rows, rng.randint(1, 3)))
        tokens = [rng.randrange(250) for _ in on]
        for row, token in zip(on, tokens, strict=True):
            written[row].append(token)
        where = [rng.randint(1, LAYERS) for _ in on]
        looks = [sorted({*rng.sample(range(1, LAYERS), 2), at} - {LAYERS}) for at in where]
        judge = Leaves(model, where)
        last = walk(stairs, on, model.embed(torch.tensor(tokens)), looks, judge)
        for left, at in zip(last, where, strict=True):
            assert (left.logits is not None) == (at < LAYERS)
    depths = {layer for row in rows for layer in stairs[row].layers}
    assert len(depths) > 1, "all stand at one layer, so nothing is shown"
    fresh, after = whole(model, written)
    for row in rows:
        stair = stairs[row]
        assert stair.layers == sorted(stair.layers, reverse=True), "a later token is deeper"
        for at, (layer, state) in enumerate(zip(stair.layers, stair.states, strict=True)):
            assert torch.equal(state[0], after[row][layer - 1][at]), f"row {row}, token {at}"
        for layer in range(LAYERS):
            ran = sum(each > layer for each in stair.layers)
            known = len(PROMPTS[row]) + ran
            assert cache.lengths[row, layer] == known, "the cache's length is not what was run"
            assert cache.computed[row, layer] - before[row, layer] == ran, "run twice"
            assert torch.equal(cache.keys[layer, row, :, :known], fresh.keys[layer, row, :, :known])


def test_those_that_no_look_lets_leave_are_carried_on() -> None:
    """A token that waits where its last look was, and is forgotten or carried on with a neighbour's
    state."""
    model, rows = model_of("llama"), [0, 1, 2]
    stairs = Stairs(model, begun(model))
    for row in rows:
        stairs.begin(row, len(PROMPTS[row]))
    x = model.embed(torch.tensor([7, 8, 9]))
    left = walk(stairs, rows, x, [[1, 2], [3], []], Leaves(model, [0, 3, 0]))
    assert [(each.layer, each.logits is None) for each in left] == [
        (2, True),
        (3, False),
        (0, True),
    ]
    done = finish(model, stairs, rows, left)
    assert [each.layer for each in done] == [LAYERS, 3, LAYERS]
    _, after = whole(model, {0: [7], 1: [8], 2: [9]})
    for row, depth in ((0, LAYERS), (1, 3), (2, LAYERS)):
        expected = model.head(after[row][depth - 1])
        assert torch.equal(done[row].logits, expected), f"row {row}"


def test_a_text_is_looked_at_only_where_it_wants() -> None:
    """A schedule that is another text's."""
    model = model_of("llama")
    stairs = Stairs(model, begun(model))
    for row in (0, 2):
        stairs.begin(row, len(PROMPTS[row]))
    judge = Leaves(model, [4, 9])
    walk(stairs, [0, 2], model.embed(torch.tensor([7, 8])), [[2, 4, 5], [3, 4]], judge)
    assert judge.seen == [(2, [0]), (3, [1]), (4, [0, 1])]


def test_what_is_done_is_let_go() -> None:
    """A text that goes on for ever, with every token's state kept."""
    model = model_of("llama")
    stairs = Stairs(model, begun(model))
    stairs.begin(0, len(PROMPTS[0]))
    for where in (2, 1, 1):
        walk(stairs, [0], model.embed(torch.tensor([7])), [[1, 2]], Leaves(model, [where]))
    stairs.climb([0], 1, 2)
    stairs.climb([0], 2, LAYERS)
    stairs[0].forget_done(LAYERS)
    assert stairs[0].layers == [] and stairs[0].first == len(PROMPTS[0]) + 3
