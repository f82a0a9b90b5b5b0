"""Keys that are kept turned for passes of several tokens: whatever happens to a cache, these passes
say what a fresh reading of the same text says, bit for bit."""

from __future__ import annotations

import random

import pytest
import torch
from test_conformance import read
from variants import build

from selfspec.model.compute.cache import KVCache, RowSpan
from selfspec.model.compute.cpu.fused import MOST_TURNED_FOR
from selfspec.model.compute.plan import LayerPlan
from selfspec.model.from_transformers import from_transformers
from selfspec.model.layered import LayeredModel

TREE = [-1, 0, 0, 1, 2, 4, 4]
PATH = (0, 2, 4, 6)  # of its nodes, from the root on
ROWS = 2


CHANGES = {
    "llama-many-groups": {},
    "llama-no-groups": {},
    # each token sees others, so only the queries of many heads are looked at together
    "mistral": {
        "sliding_window": 50,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 16,
    },
    "gemma4-small": {},
}


@pytest.fixture(scope="module", params=CHANGES)
def model(request) -> LayeredModel:
    """Heads of 64, 80 and fewer numbers, windows, and layers that read others' keys."""
    return from_transformers(build(request.param, **CHANGES[request.param]))


class Rows:
    """Texts and a cache of them, which is asked for logits in passes of a few tokens."""

    def __init__(self, model: LayeredModel, seed: int) -> None:
        self.model, self.chance = model, random.Random(seed)
        self.cache = model.new_cache(ROWS, 512)
        self.texts: list[list[int]] = [[] for _ in range(ROWS)]
        for row in range(ROWS):
            for count in (30, 10, 30):  # panels are made before a window moves on
                self.more(row, count)

    def some(self, count: int) -> list[int]:
        return [self.chance.randrange(3, 250) for _ in range(count)]

    def more(self, row: int, count: int) -> None:
        """Goes on with so many tokens, as one chain."""
        new, first = self.some(count), len(self.texts[row])
        layout = self.cache.layout_at([RowSpan(row, first, count)])
        logits = self.model.forward(torch.tensor(new), self.cache, layout)
        self.texts[row] += new
        fresh, _ = read(self.model, self.texts[row])
        assert torch.equal(logits, fresh[first:])

    def tree(self, row: int) -> None:
        """Goes on with a tree, of which one path is kept."""
        new, first = self.some(len(TREE)), len(self.texts[row])
        layout = self.cache.layout_at([RowSpan(row, first, len(TREE))], [TREE])
        logits = self.model.forward(torch.tensor(new), self.cache, layout)
        behind = self.cache.layout_at([RowSpan(row, first + len(TREE), 20)])  # as drafters do
        self.model.forward(torch.tensor(self.some(20)), self.cache, behind)
        self.cache.keep(row, first, PATH)
        self.texts[row] += [new[node] for node in PATH]
        fresh, _ = read(self.model, self.texts[row])
        assert torch.equal(logits[list(PATH)], fresh[first:])

    def back(self, row: int) -> None:
        length = self.chance.randrange(20, len(self.texts[row]))
        self.cache.rollback(row, length)
        del self.texts[row][length:]

    def copy(self, row: int) -> None:
        length = self.chance.randrange(20, len(self.texts[row]))
        self.cache.copy(row, 1 - row, length)
        self.cache.rollback(1 - row, length)
        self.texts[1 - row] = self.texts[row][:length]

    def written_by_others(self, row: int) -> None:
        """Somebody takes the tensors and writes another text's entries there."""
        text = self.some(len(self.texts[row]))
        _, other = read(self.model, text)
        for layer in range(len(other.lengths[0])):
            if layer < len(self.cache.keys):
                rooms = self.cache.of_layer(layer), other.of_layer(layer)
                for ours, theirs in zip(*rooms, strict=True):
                    ours[row, :, : len(text)] = theirs[0, :, : len(text)]
        self.texts[row] = text

    def grow(self, row: int) -> None:
        self.cache.reserve(self.cache.capacity + 1)


@pytest.mark.parametrize("seed", range(6))
def test_a_pass_says_what_a_fresh_reading_says(model, seed):
    """Turned keys of a text that was taken back, moved, copied over or written by others."""
    rows = Rows(model, seed)
    acts = [rows.tree, rows.back, rows.copy, rows.back, rows.tree, rows.written_by_others]
    for _ in range(25):
        row = rows.chance.randrange(ROWS)
        if rows.chance.random() < 0.5 or len(rows.texts[row]) < 40:
            rows.more(row, rows.chance.choice([1, 2, 5, 9, 40]))
        elif rows.chance.random() < 0.05:
            rows.grow(row)
        else:
            rows.chance.choice(acts)(row)


def test_what_a_tree_leaves_is_turned_anew(model):
    """Entries that were moved together over some that a drafter's later tokens made panels of."""
    for length in range(56, 66):
        rows = Rows(model, seed=length)
        rows.more(0, length - 40)
        rows.tree(0)
        rows.more(0, 6)


def known(cache: KVCache) -> int:
    """How many keys of the first row are turned, in the layer with the fewest."""
    return 0 if cache.turned is None else int(cache.turned[1][:, 0].min())


def test_whole_panels_behind_a_pass_of_a_few_tokens_are_kept():
    """Keys that are turned anew in each pass, or never, or beside a prompt or a single token."""
    model = from_transformers(build("llama-many-groups"))
    cache, text = model.new_cache(1, 512), [7] * 300

    def go_on(count: int) -> None:
        piece = torch.tensor(text[:count])
        model.forward(piece, cache, cache.layout([count]))

    go_on(MOST_TURNED_FOR + 66)
    go_on(1)
    assert cache.turned is None
    go_on(5)
    first = known(cache)
    assert MOST_TURNED_FOR + 32 < first <= MOST_TURNED_FOR + 67
    go_on(40)
    go_on(5)
    assert first + 32 <= known(cache) <= MOST_TURNED_FOR + 66 + 46
    cache.rollback(0, 40)
    go_on(1)
    assert known(cache) <= 40


def test_panels_of_layers_that_did_not_run_are_as_they_were(model):
    """A pass of some layers that counts for all of them."""
    cache = model.new_cache(1, 512)
    text = [token % 240 + 3 for token in range(0, 700, 7)]
    model.forward(torch.tensor(text), cache, cache.layout([len(text)]))
    plan, spans = LayerPlan(0, 2), [RowSpan(0, 33, 9)]
    model.run(model.embed(torch.tensor(text[50:59])), plan, cache, cache.layout_at(spans))
    cache.rollback(0, 33)
    new = torch.tensor([9, 8, 7, 6, 5, 4])
    logits = model.forward(new, cache, cache.layout([6]))
    fresh, _ = read(model, text[:33] + new.tolist())
    assert torch.equal(logits, fresh[33:])
