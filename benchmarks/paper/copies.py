"""Copies of a model with other matrices, embeddings and head left alone: in fewer bits, or with
half of the weights zero. Does not know who drafts for whom, nor the papers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.paper.masks import CRITERIA, Mask
from selfspec.errors import OptionError, nearest
from selfspec.model.compute.cpu.kinds import KINDS
from selfspec.model.compute.linear import Linear
from selfspec.model.layered import LayeredModel

WINDOW = 512  # tokens of the calibration text that are read together
Norms = dict[int, Tensor]  # of each product's inputs, by its place in the pass


class Watched(Linear):
    """A product that adds up the squares of its inputs."""

    alone = "its inputs are watched"

    def __init__(self, inner: Linear) -> None:
        self._inner, self.squares = inner, torch.zeros(inner.inputs, dtype=torch.float64)
        self.outputs, self.inputs, self.bias = inner.outputs, inner.inputs, inner.bias

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        self.squares += x.double().square().sum(0)
        return self._inner(x, residual)


def input_norms(model: LayeredModel, ids: Sequence[int]) -> Norms:
    """The norm of each input of every product over a text, as Wanda wants it."""
    watched: list[Watched] = []

    def watch(linear: Linear) -> Linear:
        watched.append(Watched(linear))
        return watched[-1]

    view = model.view(blocks=[block.with_linears(watch) for block in model.blocks])
    for begin in range(0, len(ids), WINDOW):
        piece = list(ids[begin : begin + WINDOW])
        view.prefill([piece], view.new_cache(1, len(piece)))
    return {place: each.squares.sqrt().float() for place, each in enumerate(watched)}


def is_mask(name: str) -> bool:
    """Whether a copy's name is a mask's, for which there is no kernel."""
    return name.partition(" ")[0] in CRITERIA


def copy_of(model: LayeredModel, name: str, norms: Norms | None = None) -> LayeredModel:
    """The model with its layers' products in another kind ("int8") or masked ("wanda 2:4")."""
    if not is_mask(name) and name not in KINDS:
        raise OptionError(f"there is no copy {name!r}; {nearest(name, KINDS)}")
    mask = Mask.parse(name) if is_mask(name) else None
    kind: Any = KINDS["float32" if mask else name]
    place = iter(range(len(model.linears)))

    def change(linear: Linear) -> Linear:
        at = next(place)
        if not linear.readable or linear.alone:
            raise OptionError(
                f"the product at place {at} cannot be copied: {linear.alone or 'not readable'}; "
                "take a model that our kernels run (selfspec info)"
            )
        weight = linear.rows(torch.arange(linear.outputs))
        if mask is not None:
            weight = mask(weight, None if norms is None else norms[at])
        return kind([weight], [linear.bias])  # type: ignore[no-any-return]

    return model.view(blocks=[block.with_linears(change) for block in model.blocks])
