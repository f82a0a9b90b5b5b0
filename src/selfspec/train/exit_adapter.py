"""Training an exit adapter: one or two blocks after layer E, for the model's own norm and head.

The first E layers of a draft are the model's own and exact. So the adapter sees in use what it sees
here, and is not fed with its own outputs. There is one loss at every answered token: cross entropy
to the whole model's distribution (see head_net.py). The blocks begin as the model's last layers.
Ours. The idea is that of LayerSkip's exits, without touching the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import OptionError
from ..model.family import Shape
from ..trained.blocks import BlockSize
from .draft_head import STARTS, block_size, copy_layer
from .head_net import Batch, BlockNet, Drafted, Roots, losses_of, positions_of
from .parts import FrozenModel, PartOptions, SmallPart

MEASURED_DEPTHS = 4


@dataclass(frozen=True)
class AdapterRecipe:
    """How an adapter is built."""

    exit: int | None = None
    """How many first layers of the model run before the adapter (E). By default a quarter."""
    blocks: int = 1
    """How many blocks the adapter has, each like one of the model's layers."""
    vocabulary: int = 16_384
    """How many tokens the part can say: those that are likeliest in the text it is trained on."""
    start: str = "last-layer"
    """First weights of what is trained: last-layer (a copy from the end of the model) or random."""
    kind = "exit-adapter"

    def state_layers(self, shape: Shape) -> tuple[int, ...]:
        layer = max(1, shape.layers // 4) if self.exit is None else self.exit
        inside = 0 < layer < shape.layers and 0 < self.blocks < shape.layers
        if not inside or self.vocabulary < 1 or self.start not in STARTS:
            raise OptionError(
                f"exit={layer}, blocks={self.blocks}, vocabulary={self.vocabulary}, "
                f"start={self.start!r}: this model has {shape.layers} layers, so exit and blocks "
                f"are 1 to {shape.layers - 1}, a vocabulary is 1 or more, and the start is "
                f"{' or '.join(STARTS)}"
            )
        return (layer - 1,)

    def training(self, model: FrozenModel, options: PartOptions) -> AdapterTraining:
        return AdapterTraining(model, self, options)


class AdapterNet(BlockNet):
    """`enter` turns a state into what the blocks are used to. Then come the blocks."""

    def __init__(self, size: BlockSize, count: int, context: int) -> None:
        super().__init__(size, count, context)
        self.enter = nn.Linear(size.width, size.width, bias=False)

    def forward(self, states: Tensor, tokens: Tensor, roots: Roots) -> Tensor:
        """The adapted states of the roots, (roots, width)."""
        x: Tensor = self.enter(states)
        everywhere = Roots.at(torch.ones_like(tokens, dtype=torch.bool))
        for index, block in enumerate(self.blocks):
            last = index == len(self.blocks) - 1
            at = roots if last else everywhere
            keys = [self.keys(block, x, positions_of(tokens))]
            out = self.through(block, at.take(x), at, 1, keys, tokens)
            x = out if last else at.spread(out, tokens)
        return x


class AdapterTraining(SmallPart):
    """An exit adapter under training."""

    net: AdapterNet

    def build(self, model: FrozenModel, recipe: AdapterRecipe) -> AdapterNet:
        self._exit = recipe.state_layers(model.shape)[0] + 1
        net = AdapterNet(block_size(model), recipe.blocks, model.shape.context)
        if recipe.start == "last-layer":
            for index, block in enumerate(net.blocks):
                copy_layer(block, model, index - recipe.blocks)
        with torch.no_grad():
            net.enter.weight.copy_(model.scale * torch.eye(model.shape.width))
        return net

    def drafted(self, batch: Batch, generator: torch.Generator | None, measure: bool) -> Drafted:
        batch = {name: values.to(self.device) for name, values in batch.items()}
        states = batch["states"][:, :, 0].float()
        if generator:
            states = states + self.noise(states, generator)
        ids = batch["tokens"].long()
        return drafted_once(self, batch, generator, measure, lambda at: self.net(states, ids, at))

    def settings(self) -> dict[str, Any]:
        size = self.net.size.as_dict()
        return {"exit": self._exit, "blocks": len(self.net.blocks), "block": size}


def drafted_once(
    part: SmallPart,
    batch: Batch,
    generator: torch.Generator | None,
    measure: bool,
    states_at: Callable[[Roots], Tensor],
) -> Drafted:
    """One draft at every answered token, by a part that is not fed with its own outputs."""
    candidates = part.candidates(batch, generator)
    answered = batch["chances"].sum(-1) > 0
    roots = Roots.at(part.some(answered, generator))
    with part.precision():
        x = states_at(roots)
        losses, counted, logits = losses_of(x, part.ends, batch, roots, 0, candidates)
    tried = right = torch.zeros(1, device=part.device)
    if measure:
        best = part.ends.vocabulary[logits.argmax(-1)]
        hits = roots.spread(best == roots.take(batch["tokens"], 1), batch["tokens"])
        tried, right = in_a_row(hits, answered)
    return Drafted(losses.sum()[None], counted.sum()[None], tried, right)


def in_a_row(hits: Tensor, answered: Tensor) -> tuple[Tensor, Tensor]:
    """By depth k: how many k-th drafts had right predecessors, and how many of those are right."""
    tried, right, alive = [], [], answered
    for depth in range(MEASURED_DEPTHS):
        rest = answered.shape[1] - depth
        here = alive[:, :rest] & answered[:, depth:]
        alive = here & hits[:, depth:]
        tried.append(here.sum())
        right.append(alive.sum())
    return torch.stack(tried), torch.stack(right)
