"""The verifying pass: every node of every tree through the layers that its draft did not run.

Drafts that ran the first layers as the whole model does leave their states behind. Each token goes
on from its own layer, so a pass is a few stretches of layers, each run by the tokens that have come
so far. Does not know what drafts are kept.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from ..core.contract import Draft
from ..model.compute.cache import KVCache, TokenLayout
from ..model.compute.hidden_states import StateCollector
from ..model.compute.plan import LayerPlan
from ..model.layered import LayeredModel, Scored
from ..model.stretch import run_stretch


def verified(
    model: LayeredModel,
    cache: KVCache,
    layout: TokenLayout,
    drafts: Sequence[Draft],
    collectors: Sequence[StateCollector],
    ranks: int,
) -> Scored:
    """What the model makes of all nodes, one row after the other. `ranks`: so many of the likeliest
    tokens will be asked for."""
    tokens = [token for draft in drafts for token in draft.tree.tokens]
    done: list[int] = []  # of each token: how many layers its draft ran for good
    for draft in drafts:
        known = list(draft.exits.layers) if draft.exits is not None else []
        done += known + [0] * (len(draft.tree) - len(known))
    if not any(done):
        return model.scored(tokens, cache, layout, ranks, collectors)
    new = [index for index, layer in enumerate(done) if layer == 0]
    x = torch.empty(len(tokens), model.carried, dtype=model.dtype, device=model.device)
    x[[index for index, layer in enumerate(done) if layer]] = torch.cat(
        [draft.exits.states for draft in drafts if draft.exits is not None]
    )
    if new:
        x[new] = model.embed(torch.tensor([tokens[index] for index in new], device=model.device))
    left = {
        layer: torch.empty_like(model.states(x)) for each in collectors for layer in each.layers
    }
    told = _handed_on(model, drafts, left)
    start = 0
    for stop in sorted({*done, model.layers} - {0}):
        here = [index for index, layer in enumerate(done) if layer <= start]
        ran: Mapping[int, Tensor] = {}
        if len(here) == len(tokens):
            x, ran = run_stretch(model, x, LayerPlan(start, stop), cache, layout, left)
        elif here:
            part, plan = layout.select(here), LayerPlan(start, stop)
            x[here], ran = run_stretch(model, x[here], plan, cache, part, left)
        for layer, states in ran.items():
            left[layer][here] = states
        start = stop
    _share(left, layout, done, told, collectors)
    return Scored(model.states(x), _logits(model, drafts, x))


def _logits(model: LayeredModel, drafts: Sequence[Draft], hidden: Tensor) -> Tensor:
    """The head's logits of all nodes, unless a drafter had them of every one."""
    said = [
        draft.exits.logits
        for draft in drafts
        if draft.exits is not None and list(draft.exits.layers) == [model.layers] * len(draft.tree)
    ]
    known = [logits for logits in said if logits is not None]
    return torch.cat(known) if len(known) == len(drafts) else model.head(hidden)


def _handed_on(
    model: LayeredModel, drafts: Sequence[Draft], left: Mapping[int, Tensor]
) -> list[Collection[int]]:
    """Put the states that drafts have where they belong: of the layers at which their tokens stand,
    and of earlier ones. Says of each token which earlier ones these are."""
    told: list[Collection[int]] = []
    for draft in drafts:
        below: Mapping[int, Tensor] = {}
        if draft.exits is not None:
            below = draft.exits.below
            for layer, states in below.items():
                if layer in left:
                    left[layer][len(told) : len(told) + len(states)] = states
            for layer, of_all in left.items():
                here = [at for at, ran in enumerate(draft.exits.layers) if ran == layer + 1]
                of_all[[len(told) + at for at in here]] = model.states(draft.exits.states)[here]
        told += [below] * len(draft.tree)
    return told


def _share(
    left: Mapping[int, Tensor],
    layout: TokenLayout,
    done: Sequence[int],
    told: Sequence[Collection[int]],
    collectors: Sequence[StateCollector],
) -> None:
    """Give every collector the rows whose tokens all have the states that it asks for: a row's
    draft may stand in for the first layers, which its neighbours ran."""
    rows = layout.rows.tolist()
    for collector in collectors:
        lacking = {
            row
            for row, stands, known in zip(rows, done, told, strict=True)
            if any(stands > layer + 1 and layer not in known for layer in collector.layers)
        }
        known = [index for index, row in enumerate(rows) if row not in lacking]
        if known:
            part = layout.select(known) if lacking else layout
            for layer in collector.layers:
                collector.put(layer, part, left[layer][known])
