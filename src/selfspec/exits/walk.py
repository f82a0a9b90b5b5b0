"""Carry one token of each of some rows through the layers until its rule lets it leave.

All rows go together, so the weights are read once for those that are still on the way. Does not
know what becomes of tokens that left, nor of those that did not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..model.layered import LayeredModel
from .rules import Judge
from .stairs import Stairs


@dataclass(frozen=True)
class Left:
    """Where a token left, and what the head said there; None: no look let it leave."""

    layer: int
    logits: Tensor | None  # (1, vocabulary)


def walk(
    stairs: Stairs, rows: Sequence[int], x: Tensor, looks: Sequence[Sequence[int]], judge: Judge
) -> list[Left]:
    """Of each row: where its next token leaves. x: the tokens' embeddings, (rows, width). `looks`:
    after which layers each is looked at. One that no look lets leave stays where its last look
    was."""
    stairs.step_on(rows, x)
    left = [Left(0, None) for _ in rows]
    wanted = [set(each) if judge.may_look(text) else set[int]() for text, each in enumerate(looks)]
    live = [text for text, each in enumerate(wanted) if each]
    judge.counts.tokens += len(rows)
    at = 0
    for layer in sorted(set[int]().union(*wanted)):
        if not live:
            break
        states = stairs.climb([rows[text] for text in live], at, layer)
        at, goes_on = layer, list[int]()
        asked = [place for place, text in enumerate(live) if layer in wanted[text]]
        texts = [live[place] for place in asked]
        some = states if len(asked) == len(live) else states[asked]
        seen = judge.look(layer, texts, some) if asked else {}  # who asked for it may have left
        for text in live:
            gone = text in seen
            if gone or layer >= max(wanted[text]):
                left[text] = Left(layer, seen.get(text))
            if not gone and layer < max(wanted[text]):
                goes_on.append(text)
        live = goes_on
    return left


def finish(
    model: LayeredModel, stairs: Stairs, rows: Sequence[int], left: list[Left]
) -> list[Left]:
    """The same with those that did not leave carried through all layers, and the head's word."""
    by_layer: dict[int, list[int]] = {}
    for text, each in enumerate(left):
        if each.logits is None:
            by_layer.setdefault(each.layer, []).append(text)
    found, at = list(left), 0
    waiting: list[int] = []
    for layer in sorted({*by_layer, model.layers}):
        if waiting and layer > at:
            stairs.climb([rows[text] for text in waiting], at, layer)
        waiting, at = waiting + by_layer.get(layer, []), layer
    if waiting:
        waiting.sort()
        states = [stairs[rows[text]].states[-1] for text in waiting]
        logits = model.head(torch.cat(states))
        for text, row in zip(waiting, logits.split(1), strict=True):
            found[text] = Left(model.layers, row)
    return found
