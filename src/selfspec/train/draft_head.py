"""Training a draft head (EAGLE's, on states of several layers) on text that the model wrote itself.

Sources: see draft/draft_head.py and head_net.py. Ours: the block and the reading matrix begin as
the model's own last layer; the vocabulary is the tokens that the model found likeliest in its text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import OptionError
from ..model.compute.hidden_states import StateCollector
from ..model.families import Family, Shape
from ..model.layered import LayeredModel
from ..model.weights import module
from ..trained.blocks import BlockSize, SmallBlock
from .head_net import Drafted, Ends, HeadNet, roots_of
from .parts import PartOptions, SmallPart, precision

STARTS = ("last-layer", "random")


@dataclass(frozen=True)
class HeadRecipe:
    """What kind of head."""

    layers: tuple[int, ...] = ()
    """Layers whose states the head reads, counted from 0. By default one a quarter down, one in the
    middle and the last."""
    vocabulary: int = 16_384
    """How many tokens the part can say: those that are likeliest in the text it is trained on."""
    start: str = "last-layer"
    """First weights of what is trained: last-layer (a copy from the end of the model) or random."""

    kind = "draft-head"

    def collectors(self, shape: Shape) -> tuple[int, ...]:
        """The layers whose states are needed, for a model of that shape."""
        layers = self.layers or tuple(
            sorted({shape.layers // 4, shape.layers // 2, shape.layers - 1})
        )
        outside = [layer for layer in layers if not 0 <= layer < shape.layers]
        if outside or not self.vocabulary > 0 or self.start not in STARTS:
            raise OptionError(
                f"layers={layers}, vocabulary={self.vocabulary}, start={self.start!r}: this model "
                f"has layers 0 to "
                f"{shape.layers - 1}, the vocabulary has to be 1 or more, and the start "
                f"{' or '.join(STARTS)}"
            )
        return layers

    def training(
        self,
        network: Any,
        family: Family,
        shape: Shape,
        vocabulary: Tensor,
        scale: float,
        options: PartOptions,
    ) -> HeadTraining:
        return HeadTraining(network, family, shape, self, vocabulary, scale, options)


class HeadTraining(SmallPart):
    """A draft head under training."""

    kind = "draft-head"

    def __init__(
        self,
        network: Any,
        family: Family,
        shape: Shape,
        recipe: HeadRecipe,
        vocabulary: Tensor,
        scale: float,
        options: PartOptions,
    ) -> None:
        self._options, self._device = options, vocabulary.device
        self.layers = recipe.collectors(shape)
        self.ends = Ends(network, family, shape, vocabulary)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(options.seed)
            self._net = HeadNet(size_of(network, shape), len(self.layers), shape.context)
            if recipe.start == "last-layer":
                begin_as_last_layer(self._net, network, family, scale)
        self._net.to(self._device)

    @property
    def net(self) -> HeadNet:
        return self._net

    def drafted(
        self, batch: dict[str, Tensor], generator: torch.Generator | None, measure: bool
    ) -> Drafted:
        batch = {name: values.to(self._device) for name, values in batch.items()}
        batch["states"] = batch["states"].float()
        if generator and self._options.noise:
            shape = batch["states"].shape
            batch["states"] += self._options.noise * (
                2 * torch.rand(shape, generator=generator) - 1
            ).to(self._device)
        roots = roots_of(batch, self._options.share if generator else 1.0, generator)
        ahead = max(4, self._options.ahead) if measure else self._options.ahead
        candidates = None
        if generator and self._options.others:
            candidates = self.ends.candidates(batch, self._options.others, generator)
        with precision(self._options, self._device):
            found: Drafted = self.net(self.ends, batch, roots, ahead, candidates, measure)
        return found

    def tensors(self) -> dict[str, Tensor]:
        """What a part stores, in half precision."""
        found = {name: value.detach().cpu().half() for name, value in self.net.state_dict().items()}
        return {**found, "vocabulary": self.ends.vocabulary.cpu().int()}

    def settings(self) -> dict[str, Any]:
        return {"layers": list(self.layers), "block": self.net.size.as_dict()}


def size_of(network: Any, shape: Shape) -> BlockSize:
    """A block like the model's own layers."""
    inner = getattr(network.config, "intermediate_size", None) or 4 * shape.width
    rope = getattr(network.config, "rope_parameters", None) or {}
    theta = float(rope.get("rope_theta", 10_000.0)) if isinstance(rope, dict) else 10_000.0
    return BlockSize(shape.width, shape.heads, shape.kv_heads, shape.head_size, int(inner), theta)


@torch.no_grad()
def begin_as_last_layer(net: HeadNet, network: Any, family: Family, scale: float) -> None:
    """The block is the model's last layer, and `enter` hands it the last tap, as large as what that
    layer is used to; embeddings and other taps come in small."""
    copy_layer(net.block(0), network, family, -1)
    width = net.size.width
    net.enter.weight.mul_(0.3 * scale)
    net.enter.weight[:, -width:] += scale * torch.eye(width)
    net.again.weight.copy_(scale * torch.eye(width))


@torch.no_grad()
def copy_layer(block: SmallBlock, network: Any, family: Family, index: int) -> None:
    """Give a block the weights of one of the model's layers, as far as they have the same names and
    shapes."""
    theirs = dict(list(module(network, family.layers).children())[index].named_parameters())
    for name, parameter in block.named_parameters():
        if name in theirs and theirs[name].shape == parameter.shape:
            parameter.copy_(theirs[name])


@torch.inference_mode()
def stream_size(model: LayeredModel, tokens: Sequence[int]) -> float:
    """How large a number of the hidden states is, typically, that enter the last layer."""
    collectors, cache = StateCollector([max(0, model.layers - 2)]), model.new_cache(1, len(tokens))
    ids = torch.tensor(tokens, device=model.device)
    model.run(
        model.embed(ids),
        model.full_plan,
        cache,
        cache.layout([len(tokens)]),
        collectors=[collectors],
    )
    ((_, states),) = collectors.take()
    return float(states.float().pow(2).mean(-1).sqrt().median())


def likeliest(frequencies: Tensor, size: int) -> Tensor:
    """The ids of the most frequent tokens, in their order."""
    return frequencies.topk(min(size, len(frequencies))).indices.sort().values
