"""Entries of a tree's kept tokens move together: by our own function and by torch alike."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from selfspec.model.compute import moving
from selfspec.model.compute.cache import KVCache
from selfspec.model.compute.cpu.moving import moved_together
from selfspec.model.compute.uneven_cache import UnevenCache

CPU = torch.device("cpu")
FIRST, NODES = 9, 24

paths = st.lists(st.integers(1, NODES - 1), unique=True).map(lambda some: [0, *sorted(some)])


def filled(dtype: torch.dtype = torch.float32) -> KVCache:
    cache = KVCache((3, 2, 2, 4), FIRST + NODES, dtype, CPU)
    for number, room in enumerate(cache.room):
        room.copy_(torch.arange(room.numel()).view(room.shape) % 251 + number)
    cache.assume(FIRST + NODES)
    return cache


def expected(cache: KVCache, row: int, path: list[int]) -> list[torch.Tensor]:
    """Both rooms once the path was kept, the slots behind it aside."""
    slots = [*range(FIRST), *(FIRST + node for node in path)]
    rooms = [room.clone() for room in cache.room]
    for room, now in zip(cache.room, rooms, strict=True):
        now[:, row, :, : len(slots)] = room[:, row, :, slots]
    return rooms


@pytest.mark.parametrize("by", ["own", "torch"])
@given(path=paths, row=st.integers(0, 1))
def test_what_is_kept_lies_together_and_nothing_else_moves(by: str, path: list[int], row: int):
    """An entry that was written over before it was read; another row's, layer's or head's moved;
    keys without values."""
    cache = filled()
    wanted = expected(cache, row, path)
    with pytest.MonkeyPatch.context() as patch:
        if by == "torch":
            patch.setattr(moving, "_mover", None)
        cache.keep(row, FIRST, path)
    for room, now in zip(wanted, cache.room, strict=True):
        assert torch.equal(room, now)
    assert cache.length(row) == FIRST + len(path) and cache.length(1 - row) == FIRST + NODES


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_our_function_moves_numbers_of_any_size(dtype: torch.dtype):
    """Strides counted in numbers of four bytes."""
    cache = filled(dtype)
    wanted = expected(cache, 1, [0, 2, 5])
    if not moved_together(*cache.room, 1, FIRST, [FIRST, FIRST + 2, FIRST + 5]):
        pytest.skip("no compiler here")
    for room, now in zip(wanted, cache.room, strict=True):
        assert torch.equal(room, now)


def test_a_cache_whose_layers_differ_moves_each_its_own_way():
    """Strides of a widest layer used for a narrower one."""
    cache = UnevenCache(2, [(2, 4), (1, 6)], FIRST + NODES, torch.float32, CPU)
    for room in cache.room:
        room.copy_(torch.arange(room.numel()).view(room.shape))
    cache.assume(FIRST + NODES)
    before = [[room.clone() for room in cache.of_layer(layer)] for layer in (0, 1)]
    cache.keep(1, FIRST, [0, 3, 4])
    for layer, rooms in enumerate(before):
        for old, new in zip(rooms, cache.of_layer(layer), strict=True):
            assert torch.equal(
                new[1, :, FIRST : FIRST + 3], old[1, :, [FIRST, FIRST + 3, FIRST + 4]]
            )
            assert torch.equal(new[0], old[0]) and torch.equal(new[1, :, :FIRST], old[1, :, :FIRST])


def test_nothing_may_be_kept():
    """A draft that ended before it began."""
    cache = filled()
    cache.keep(0, FIRST, [])
    assert cache.length(0) == FIRST
