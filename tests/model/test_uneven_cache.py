"""Keys and values of layers whose heads differ: each lies in its own way, and everything that moves
entries has to know it."""

from __future__ import annotations

import pytest
import torch
from test_conformance import TEXT, read

from selfspec import LLM
from selfspec.errors import OptionError
from selfspec.model.compute.cache import RowSpan
from selfspec.model.compute.uneven_cache import UnevenCache
from selfspec.model.from_transformers import from_transformers
from selfspec.testing import tiny_model

KINDS = ((2, 4), (1, 6), (3, 2))  # heads and their size


def filled(rows: int = 2, slots: int = 8) -> UnevenCache:
    """A cache whose entries are all different."""
    cache = UnevenCache(rows, KINDS, slots, torch.float32, torch.device("cpu"))
    for layer in range(len(KINDS)):
        for room in cache.of_layer(layer):
            held = room[:, :, :slots]
            held.copy_(torch.randn(held.shape, generator=torch.Generator().manual_seed(layer)))
    cache.assume(slots)
    return cache


def entries(cache: UnevenCache, row: int, slots: list[int]) -> list[torch.Tensor]:
    """Of all layers."""
    return [room[row][:, slots].clone() for layer in range(3) for room in cache.of_layer(layer)]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_layers_do_not_overlap():
    """A layer that writes over its neighbour's entries, or a head over the next one's."""
    cache = filled()
    before = entries(cache, 0, [0, 1, 2, 3, 4, 5, 6, 7])
    cache.of_layer(1)[0].fill_(7.0)
    after = entries(cache, 0, [0, 1, 2, 3, 4, 5, 6, 7])
    changed = [not torch.equal(a, b) for a, b in zip(before, after, strict=True)]
    assert changed == [False, False, True, False, False, False]


def test_growing_copying_and_keeping_move_every_layers_own_entries():
    """Entries moved as if all layers had heads of one size."""
    cache = filled()
    slots = [0, 1, 2, 3, 4, 5, 6, 7]
    before, beside = entries(cache, 0, slots), entries(cache, 1, slots)
    cache.reserve(700)
    assert cache.capacity >= 700
    assert same(entries(cache, 0, slots), before) and same(entries(cache, 1, slots), beside)
    cache.reserve_rows(4)
    cache.copy(0, 3, 6)
    assert same(entries(cache, 3, slots[:6]), entries(cache, 0, slots[:6]))
    assert cache.length(3) == 6
    cache.keep(0, 3, [0, 2, 4])
    assert same(entries(cache, 0, [3, 4, 5]), [each[:, [3, 5, 7]] for each in before])
    assert cache.length(0) == 6


@pytest.mark.parametrize("kernel", ["auto", "plain"])
def test_a_text_goes_on_where_the_cache_moved(kernel):
    """The kernels' own idea of where a layer's head begins, once there is room for more."""
    model = from_transformers(tiny_model("gemma4_text"), kernel=kernel)
    whole, _ = read(model, TEXT)
    cache = model.new_cache(1, 64)
    assert isinstance(cache, UnevenCache)
    first = model.forward(torch.tensor(TEXT[:40]), cache, cache.layout([40]))
    cache.reserve(600)
    cache.reserve_rows(2)
    cache.copy(0, 1, 40)
    spans = [RowSpan(1, 40, len(TEXT) - 40)]
    rest = model.forward(torch.tensor(TEXT[40:]), cache, cache.layout_at(spans))
    found, gap = torch.cat([first, rest]), 0.0 if kernel == "auto" else 1e-4
    assert torch.allclose(found, whole, atol=gap, rtol=0)


def test_a_draft_that_compares_keys_of_all_layers_is_refused():
    """Keys of one size read where they have several."""
    llm = LLM(from_transformers(tiny_model("gemma4_text")), None, "tiny")
    with pytest.raises(OptionError, match="heads of different sizes"):
        llm.generate(TEXT[:9], max_new_tokens=4, draft="kv-subset")
