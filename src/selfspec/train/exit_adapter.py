"""Training an exit adapter: one or two blocks after layer E, so that the model's own norm and head
can read the answer there.

The first E layers of a draft are the model's own and exact, so the adapter sees in use what it sees
here, whatever was drafted before: one loss at every answered token, cross entropy to the whole
model's distribution there (see head_net.py), and no feeding back. The blocks begin as the model's
last layers. Ours; the idea is that of LayerSkip's exits without touching the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import OptionError
from ..model.families import Family, Shape
from ..trained.blocks import BlockSize
from .draft_head import STARTS, copy_layer, size_of
from .head_net import BlockNet, Drafted, Ends, Roots, losses_of, positions_of
from .parts import PartOptions, SmallPart, precision

MEASURED_DEPTHS = 4


@dataclass(frozen=True)
class AdapterRecipe:
    """What kind of adapter."""

    exit: int | None = None
    """How many of the model's first layers run before the adapter (E). By default a quarter of
    them."""
    blocks: int = 1
    """How many blocks the adapter has, each like one of the model's layers."""
    vocabulary: int = 16_384
    """How many tokens the part can say: those that are likeliest in the text it is trained on."""
    start: str = "last-layer"
    """First weights of what is trained: last-layer (a copy from the end of the model) or random."""
    kind = "exit-adapter"

    def collectors(self, shape: Shape) -> tuple[int, ...]:
        """The layers whose states are needed."""
        layer = max(1, shape.layers // 4) if self.exit is None else self.exit
        if (
            not 0 < layer < shape.layers
            or not 0 < self.blocks < shape.layers
            or self.vocabulary < 1
            or self.start not in STARTS
        ):
            raise OptionError(
                f"exit={layer}, blocks={self.blocks}, vocabulary={self.vocabulary}, "
                f"start={self.start!r}: this model has "
                f"{shape.layers} layers, so the exit is 1 to {shape.layers - 1}; blocks and "
                f"vocabulary are at least 1, "
                f"the start is {' or '.join(STARTS)}"
            )
        return (layer - 1,)

    def training(
        self,
        network: Any,
        family: Family,
        shape: Shape,
        vocabulary: Tensor,
        scale: float,
        options: PartOptions,
    ) -> AdapterTraining:
        return AdapterTraining(network, family, shape, self, vocabulary, scale, options)


class AdapterNet(BlockNet):
    """`enter` makes of a state what the blocks are used to, then the blocks."""

    def __init__(self, size: BlockSize, count: int, context: int) -> None:
        super().__init__(size, count, context)
        self.enter = nn.Linear(size.width, size.width, bias=False)

    def forward(self, states: Tensor, tokens: Tensor, roots: Roots) -> Tensor:
        """The adapted states of the roots, (roots, width)."""
        x: Tensor = self.enter(states)
        everything = everywhere(tokens)
        for index in range(len(self.blocks)):
            block, last = self.block(index), index == len(self.blocks) - 1
            at = roots if last else everything
            found = self.through(
                block, at.take(x), at, 1, [self.keys(block, x, positions_of(tokens))], tokens
            )
            x = found if last else at.spread(found, tokens)
        return x


class AdapterTraining(SmallPart):
    """An exit adapter under training."""

    kind = "exit-adapter"

    def __init__(
        self,
        network: Any,
        family: Family,
        shape: Shape,
        recipe: AdapterRecipe,
        vocabulary: Tensor,
        scale: float,
        options: PartOptions,
    ) -> None:
        self._options, self._device = options, vocabulary.device
        self._exit = recipe.collectors(shape)[0] + 1
        self.ends = Ends(network, family, shape, vocabulary)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(options.seed)
            self._net = AdapterNet(size_of(network, shape), recipe.blocks, shape.context)
        if recipe.start == "last-layer":
            for index in range(recipe.blocks):
                copy_layer(self._net.block(index), network, family, index - recipe.blocks)
        with torch.no_grad():
            self._net.enter.weight.copy_(scale * torch.eye(shape.width))
        self._net.to(self._device)

    @property
    def net(self) -> AdapterNet:
        return self._net

    def drafted(
        self, batch: dict[str, Tensor], generator: torch.Generator | None, measure: bool
    ) -> Drafted:
        batch = {name: values.to(self._device) for name, values in batch.items()}
        states = batch["states"][:, :, 0].float()
        candidates = None
        if generator:
            states = states + self._options.noise * (
                2 * torch.rand(states.shape, generator=generator) - 1
            ).to(self._device)
            candidates = (
                self.ends.candidates(batch, self._options.others, generator)
                if self._options.others
                else None
            )
        answered = batch["chances"].sum(-1) > 0
        if generator and self._options.share < 1:
            answered &= (torch.rand(answered.shape, generator=generator) < self._options.share).to(
                self._device
            )
        roots = Roots(*answered.nonzero(as_tuple=True))
        with precision(self._options, self._device):
            x = self.net(states, batch["tokens"].long(), roots)
            losses, counted, logits = losses_of(x, self.ends, batch, roots, 0, candidates)
        tried = right = torch.zeros(1, device=self._device)
        if measure:
            best = self.ends.vocabulary[logits.argmax(-1)]
            hits = roots.spread(best == roots.take(batch["tokens"], 1), batch["tokens"])
            tried, right = in_a_row(hits, answered)
        return Drafted(losses.sum()[None], counted.sum()[None], tried, right)

    def tensors(self) -> dict[str, Tensor]:
        found = {name: value.detach().cpu().half() for name, value in self.net.state_dict().items()}
        return {**found, "vocabulary": self.ends.vocabulary.cpu().int()}

    def settings(self) -> dict[str, Any]:
        return {
            "exit": self._exit,
            "blocks": len(self.net.blocks),
            "block": self.net.size.as_dict(),
        }


def in_a_row(hits: Tensor, answered: Tensor) -> tuple[Tensor, Tensor]:
    """By depth k: at how many places there is a k-th draft whose predecessors were right, and how
    many of those are right."""
    tried, right, alive = [], [], answered
    for depth in range(MEASURED_DEPTHS):
        rest = answered.shape[1] - depth
        here = alive[:, :rest] & answered[:, depth:]
        alive = here & hits[:, depth:]
        tried.append(here.sum())
        right.append(alive.sum())
    return torch.stack(tried), torch.stack(right)


def everywhere(tokens: Tensor) -> Roots:
    """All tokens as roots."""
    return Roots(*torch.ones_like(tokens, dtype=torch.bool).nonzero(as_tuple=True))
