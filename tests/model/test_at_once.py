"""A whole model in one call to the kernels, and attention whose keys and values threads share,
against the same piece by piece."""

from __future__ import annotations

import pytest
import torch
from test_passes import one_by_one
from variants import build

from selfspec.model.compute.cache import KVCache, RowSpan
from selfspec.model.compute.cpu.choosing import BROKEN, likeliest_or_broken
from selfspec.model.compute.cpu.operations import NativeOps
from selfspec.model.compute.hidden_states import StateCollector
from selfspec.model.compute.ops import Heads, Temperature
from selfspec.model.compute.windows import Chunks
from selfspec.model.from_transformers import from_transformers
from selfspec.model.layered import LayeredModel, Scored
from selfspec.model.recording import EagerSteps
from selfspec.testing import tiny_model

PROMPT = [token % 250 for token in range(3, 44)]
TREE = [-1, 0, 0, 1, 1, 2]


def layouts(cache: KVCache, first: int):
    """One token, a chain, a tree, and two rows of which one is a tree."""
    yield cache.layout_at([RowSpan(0, first, 1)])
    yield cache.layout_at([RowSpan(0, first, 5)])
    yield cache.layout_at([RowSpan(0, first, 6)], [TREE])
    yield cache.layout_at([RowSpan(1, first, 1), RowSpan(0, first, 6)], [[-1], TREE])


def begun(model: LayeredModel) -> KVCache:
    cache = model.new_cache(2, 64)
    model.prefill([PROMPT, PROMPT[::-1]], cache)
    return cache


def in_step(ours, theirs):
    """Tokens and a layout for each of two caches, which begin each time where the prompt ends."""
    for layout, other in zip(layouts(ours, len(PROMPT)), layouts(theirs, len(PROMPT)), strict=True):
        tokens = [(7 * token + 5) % 250 for token in range(len(layout))]
        for cache in (ours, theirs):
            for row in range(2):
                cache.rollback(row, len(PROMPT))
        yield tokens, layout, other


@pytest.mark.zeros
@pytest.mark.parametrize("many", [1, 2, 3])
@pytest.mark.parametrize("kind", ["float32", "int8", "int4", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_model_in_one_call_is_the_model_piece_by_piece(tied, kind, many, threads):
    """A row of another token's embedding, a norm that got lost, states that are not those before
    the head, tokens that are not the likeliest, a cache that does not know what it holds."""
    threads(many)
    model = from_transformers(tiny_model(tie_word_embeddings=tied), weights=kind)
    assert model.at_once is not None
    ours, theirs = begun(model), begun(model)
    for tokens, layout, other in in_step(ours, theirs):
        found = model.scored(tokens, ours, layout, 3)
        x = model.run(model.embed(torch.tensor(tokens)), model.full_plan, theirs, other)
        assert torch.equal(found.states, x)
        assert torch.equal(found.logits, model.head(x))
        assert found.best == likeliest_or_broken(found.logits, 3).tolist()
        assert (ours.lengths == theirs.lengths).all()
        assert torch.equal(ours.keys, theirs.keys) and torch.equal(ours.values, theirs.values)
    ours.rollback(0, len(PROMPT))
    assert model.scored([5], ours, ours.layout_at([RowSpan(0, len(PROMPT), 1)])).best is None


@pytest.mark.parametrize("many", [1, 2, 3])
@pytest.mark.parametrize("variant", ["llama", "gemma4-small", "cohere2"])
def test_states_on_the_way_are_those_of_pieces(variant, many, threads):
    """States of a layer too few or too many, of half a layer, or of some rows only; a collector
    given what another one asked for."""
    threads(many)
    model = from_transformers(build(variant))
    assert model.at_once is not None
    ours, theirs = begun(model), begun(model)
    last = model.layers - 1
    for tokens, layout, other in in_step(ours, theirs):
        found, expected = ([StateCollector([0, last]), StateCollector([1])] for _ in range(2))
        model.scored(tokens, ours, layout, 1, found)
        x = model.embed(torch.tensor(tokens))
        model.run(x, model.full_plan, theirs, other, collectors=expected)
        for mine, own in zip(found, expected, strict=True):
            ((place, states),), ((_, wanted),) = mine.take(), own.take()
            assert place is layout and torch.equal(states, wanted)


@pytest.mark.parametrize("many", [1, 2])
def test_broken_logits_and_unknown_tokens_are_seen(many, threads):
    """NaN taken for a token, and a token beyond the vocabulary, whose embedding is other memory."""
    threads(many)
    module = tiny_model(tie_word_embeddings=False, vocab_size=2000)
    with torch.no_grad():
        module.lm_head.weight[777] = torch.nan
        module.model.embed_tokens.weight[9] = torch.inf
    model = from_transformers(module, check=False)
    cache = model.new_cache(2, 64)
    found = model.scored([5, 9], cache, cache.layout_at([RowSpan(0, 0, 2)]), 2)
    assert [row[0] for row in found.best] == [BROKEN, BROKEN]
    for token in (2000, -1):
        with pytest.raises(IndexError, match=f"row {token} .* there are 2000"):
            model.scored([5, token], cache, cache.layout_at([RowSpan(0, 0, 2)]))


@pytest.mark.parametrize("variant", ["gemma2", "granite", "gemma4-small"])
@pytest.mark.parametrize("many", [1, 2])
def test_scales_and_caps_at_the_ends_are_in_the_one_call(variant, many, threads):
    """An embedding or logits that are not scaled, or twice; a cap that a thread's share misses.
    Numbers of tokens that only single halves are given."""
    threads(many)
    model = from_transformers(build(variant))
    assert model.at_once is not None
    ours, theirs = begun(model), begun(model)
    for tokens, layout, other in in_step(ours, theirs):
        found = model.scored(tokens, ours, layout, 3)
        assert torch.equal(found.logits, model.forward(torch.tensor(tokens), theirs, other))
        assert found.best == likeliest_or_broken(found.logits, 3).tolist()


@pytest.mark.parametrize("family", ["nanochat", "gpt2"])
def test_what_one_call_cannot_do_is_done_piece_by_piece(family):
    """A norm of embeddings, and learned positions: left out without a word."""
    model = from_transformers(tiny_model(family))
    assert model.at_once is None
    cache, other = model.new_cache(1, 64), model.new_cache(1, 64)
    found = model.scored(PROMPT, cache, cache.layout_at([RowSpan(0, 0, len(PROMPT))]), 2)
    assert isinstance(found, Scored) and found.best is None
    layout = other.layout_at([RowSpan(0, 0, len(PROMPT))])
    assert torch.equal(found.logits, model.forward(torch.tensor(PROMPT), other, layout))


def test_a_model_whose_halves_run_alone_is_none():
    """Halves that our kernels do not know, taken for those that they do."""
    model = from_transformers(tiny_model())
    assert one_by_one(model).at_once is None


@pytest.mark.parametrize("first", [0, 17, 64, 500, 1000, 2800])
@pytest.mark.parametrize(
    ("queries", "keys", "size"), [(9, 3, 64), (4, 1, 32), (8, 8, 48), (3, 3, 8)]
)
def test_threads_that_share_a_head_change_no_bit(queries, keys, size, first, threads):
    """Keys that nobody scores or two threads do, a query that is finished before all of its scores
    are there, columns of values that are summed twice or not at all, and of a long text a panel or
    block of values that is taken for the one behind it, which was only asked for."""
    generator = torch.Generator().manual_seed(first)
    ops, shape = NativeOps(), (1, 2, keys, size)
    cache = KVCache(shape, first + 24, torch.float32, torch.device("cpu"))
    for each in (cache.keys, cache.values):
        each.copy_(torch.randn(each.shape, generator=generator))
    sinks, slopes = torch.randn(2, queries, generator=generator).unbind()
    more = {"sinks": sinks, "slopes": slopes.abs() / 8, "clamp": 1.5}
    warm = Temperature(0.3, 7, 1)
    for window, options in (
        (None, {}),
        (40, {}),
        (Chunks(40), {}),
        (None, {**more, "temperature": warm}),
    ):
        heads = Heads(0, queries, keys, size, size**-0.5, window, **options)
        for layout in layouts(cache, first):
            qkv = torch.randn(len(layout), (queries + 2 * keys) * size, generator=generator)
            found = []
            for many in (1, 2, 3, 5):
                threads(many)
                found.append(ops.attention(qkv.clone(), heads, cache, layout))
            assert all(torch.equal(each, found[0]) for each in found[1:])
            for many in (2, 3, 5):  # some heads for each thread, and others that all share
                threads(many)
                alone = [
                    ops.attention(qkv[[token]].clone(), heads, cache, layout.select([token]))
                    for token in range(len(layout))
                ]
                assert torch.equal(torch.cat(alone), found[0])


def test_only_eager_steps_run_at_once():
    """A device that replays recordings given to kernels of the processor."""
    assert type(from_transformers(tiny_model()).steps) is EagerSteps
