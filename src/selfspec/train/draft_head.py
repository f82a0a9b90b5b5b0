"""Training a draft head (EAGLE's, on states of several layers) on text that the model wrote itself.

Sources: see draft/from_models/draft_head.py and head_net.py. Ours: the block and the reading matrix
begin as the model's last layer. The vocabulary is the tokens likeliest in the model's text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import OptionError
from ..model.compute.hidden_states import StateCollector
from ..model.family import Shape
from ..model.layered import LayeredModel
from ..model.weights import module
from ..trained.blocks import BlockSize
from .head_net import Batch, Drafted, HeadNet, Roots, begins
from .parts import FrozenModel, PartOptions, SmallPart

STARTS = ("last-layer", "random")


@dataclass(frozen=True)
class HeadRecipe:
    """How a head is built."""

    layers: tuple[int, ...] = ()
    """Layers whose states the head reads, from 0. By default at 1/4 and 1/2 of the depth, and the
    last."""
    vocabulary: int = 16_384
    """How many tokens the part can say: those that are likeliest in the text it is trained on."""
    start: str = "last-layer"
    """First weights of what is trained: last-layer (a copy from the end of the model) or random."""

    kind = "draft-head"

    def state_layers(self, shape: Shape) -> tuple[int, ...]:
        count = shape.layers
        layers = self.layers or tuple(sorted({count // 4, count // 2, count - 1}))
        inside = all(0 <= layer < count for layer in layers)
        if not inside or self.vocabulary < 1 or self.start not in STARTS:
            raise OptionError(
                f"layers={layers}, vocabulary={self.vocabulary}, start={self.start!r}: this model "
                f"has layers 0 to {count - 1}, a vocabulary is 1 or more, and the start is "
                f"{' or '.join(STARTS)}"
            )
        return layers

    def training(self, model: FrozenModel, options: PartOptions) -> HeadTraining:
        return HeadTraining(model, self, options)


class HeadTraining(SmallPart):
    """A draft head under training."""

    net: HeadNet

    def build(self, model: FrozenModel, recipe: HeadRecipe) -> HeadNet:
        self.layers = recipe.state_layers(model.shape)
        net = HeadNet(block_size(model), len(self.layers), model.shape.context)
        if recipe.start == "last-layer":
            _begin_as_last_layer(net, model)
        return net

    def drafted(self, batch: Batch, generator: torch.Generator | None, measure: bool) -> Drafted:
        batch = {name: values.to(self.device) for name, values in batch.items()}
        batch["states"] = batch["states"].float()
        if generator and self.options.noise:
            batch["states"] += self.noise(batch["states"], generator)
        roots = Roots.at(self.some(begins(batch), generator))
        ahead = max(4, self.options.ahead) if measure else self.options.ahead
        candidates = self.candidates(batch, generator)
        with self.precision():
            drafted: Drafted = self.net(self.ends, batch, roots, ahead, candidates, measure)
        return drafted

    def settings(self) -> dict[str, Any]:
        return {"layers": list(self.layers), "block": self.net.size.as_dict()}


def block_size(model: FrozenModel) -> BlockSize:
    """A block like the model's own layers."""
    config, shape = model.network.config, model.shape
    inner = getattr(config, "intermediate_size", None) or 4 * shape.width
    rope = getattr(config, "rope_parameters", None) or {}
    theta = float(rope.get("rope_theta", 10_000.0)) if isinstance(rope, dict) else 10_000.0
    return BlockSize(shape.width, shape.heads, shape.kv_heads, shape.head_size, int(inner), theta)


@torch.no_grad()
def _begin_as_last_layer(net: HeadNet, model: FrozenModel) -> None:
    """The block is the model's last layer. `enter` hands it the last states read, as large as that
    layer is used to. Embeddings and other states come in small."""
    copy_layer(net.blocks[0], model, -1)
    width = net.size.width
    net.enter.weight.mul_(0.3 * model.scale)
    net.enter.weight[:, -width:] += model.scale * torch.eye(width)
    net.again.weight.copy_(model.scale * torch.eye(width))


@torch.no_grad()
def copy_layer(block: nn.Module, model: FrozenModel, index: int) -> None:
    """Give a block the weights of one of the model's layers, where names and shapes agree."""
    layer = list(module(model.network, model.family.layers).children())[index]
    theirs = dict(layer.named_parameters())
    for name, parameter in block.named_parameters():
        if name in theirs and theirs[name].shape == parameter.shape:
            parameter.copy_(theirs[name])


@torch.inference_mode()
def stream_size(model: LayeredModel, tokens: Sequence[int]) -> float:
    """The typical size of a number in the hidden states that enter the last layer."""
    collector, cache = StateCollector([max(0, model.layers - 2)]), model.new_cache(1, len(tokens))
    x = model.embed(torch.tensor(tokens, device=model.device))
    layout = cache.layout([len(tokens)])
    model.run(x, model.full_plan, cache, layout, collectors=[collector])
    ((_, states),) = collector.take()
    return float(states.float().pow(2).mean(-1).sqrt().median())


def likeliest(frequencies: Tensor, size: int) -> Tensor:
    """The ids of the most frequent tokens, in their order."""
    return frequencies.topk(min(size, len(frequencies))).indices.sort().values
