"""Layer dropout per sample on transformers' own decoder layers.

A layer runs on the rows of a batch that are not dropped there (LayerSkip, section 4.1.1). Only
`forward` of each layer object is replaced, and given back afterwards, so what is saved is an
ordinary model.

Which samples are dropped is a function of (seed, step, micro-batch). So there is no generator whose
state could be lost, every rank draws the same, and gradient checkpointing that runs a layer twice
drops the same rows twice. Knows no loss and no trainer.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UnsupportedModel

# arguments of a layer that have a row for each sample
BATCHED = ("attention_mask", "position_ids", "position_embeddings")
Forward = Callable[..., Any]


def counted_generator(*words: object) -> torch.Generator:
    """A generator that depends on these words and on nothing else."""
    digest = hashlib.blake2b("/".join(map(str, words)).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)


def draw_keep(rates: Sequence[float], rows: int, *, seed: int, step: int, micro: int) -> Tensor:
    """(layers, rows), True where a sample passes through. The same on every rank and device."""
    chances = torch.tensor(rates, dtype=torch.float64)[:, None]
    generator = counted_generator("layers", seed, step, micro)
    return torch.rand(len(rates), rows, dtype=torch.float64, generator=generator) >= chances


class LayerDropout:
    """Drops layers for samples, on the layers that it is installed on."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers = layers
        # of each layer: the rows that run; None is all of them
        self._kept: list[Tensor | None] = [None] * len(layers)
        self._rows = 0

    def set(self, keep: Tensor | None, device: torch.device | str = "cpu") -> None:
        """Drop by this (layers, rows) mask from now on; None drops nothing."""
        if keep is None:
            self._kept = [None] * len(self._layers)
            return
        assert keep.shape[0] == len(self._layers)
        self._rows = keep.shape[1]
        self._kept = [
            None if row.all() else row.nonzero()[:, 0].to(device, non_blocking=True) for row in keep
        ]

    @property
    def kept(self) -> list[Tensor | None]:
        """Of each layer the rows that run; None is all of them."""
        return self._kept

    @contextmanager
    def installed(self) -> Iterator[None]:
        """The layers obey within this block, and are as they were after it."""
        before = [vars(layer).get("forward") for layer in self._layers]
        for index, layer in enumerate(self._layers):
            layer.forward = self._wrapped(index, layer.forward)
        try:
            yield
        finally:
            for layer, forward in zip(self._layers, before, strict=True):
                vars(layer).pop("forward")
                if forward is not None:
                    layer.forward = forward

    def _wrapped(self, index: int, original: Forward) -> Forward:
        names = list(inspect.signature(original).parameters)

        def forward(hidden_states: Tensor, *more: Any, **named: Any) -> Tensor:
            # some families name nothing
            given = {**dict(zip(names[1:], more, strict=False)), **named}
            rows = self._kept[index]
            if rows is None:
                return one_tensor(original(hidden_states, **given))
            assert hidden_states.shape[0] == self._rows, "drawn for a batch of another size"
            if len(rows) == 0:
                return hidden_states
            some = one_tensor(original(hidden_states[rows], **_take(given, rows, self._rows)))
            return hidden_states.index_copy(0, rows, some)

        return forward


def _take(given: dict[str, Any], rows: Tensor, total: int) -> dict[str, Any]:
    """The arguments of these rows of a batch of `total`. One row for all samples stays."""

    def cut(name: str, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(cut(name, piece) for piece in value)
        if not isinstance(value, Tensor):
            raise UnsupportedModel(
                f"layer dropout cannot take samples out of a {name} of type "
                f"{type(value).__name__}; load the model with attn_implementation='sdpa' or 'eager'"
            )
        return value[rows] if value.shape[0] == total else value

    taken = dict(given)
    for name, value in given.items():
        if name in BATCHED and value is not None:
            taken[name] = cut(name, value)
        elif isinstance(value, Tensor) or (name == "past_key_values" and value is not None):
            raise UnsupportedModel(
                f"the model hands {name!r} to its layers, and layer dropout does not know whose "
                "rows are which; train with dropout=0, or without what makes it (a cache, packed "
                "flash attention)"
            )
    return taken


def one_tensor(output: Any) -> Tensor:
    """What a layer returned, if it is hidden states and nothing else."""
    if not isinstance(output, Tensor):
        raise UnsupportedModel(
            f"a layer of this model returns a {type(output).__name__} instead of hidden states, so "
            "neither exits nor layer dropout work; this family cannot be trained yet"
        )
    return output
