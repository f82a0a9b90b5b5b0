"""Training a draft-LoRA: small matrices beside the linears of a model that skips many halves, on
only while it drafts.

Draft & Verify drafts with the model less some halves, and what is left was never trained to do
without them. Here it is, without touching the model: y = W x + B A x (LoRA, Hu et al. 2021, arXiv
2106.09685) on what is not skipped, B = 0 at first. With rank 0 the draft gets weights W of its own
instead, as in the paper's Appendix F. The loss is that of an exit adapter. In use the draft has
keys and values of its own, as here. Does not know how a skip set is found.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import OptionError, UnsupportedModel
from ..model.family import Shape
from ..model.weights import module
from ..trained.lora import stored_name
from .exit_adapter import drafted_once
from .head_net import Batch, Drafted, Roots
from .parts import FrozenModel, PartOptions, SmallPart

# whose linears and halves have the names that are taken apart here
PROVEN = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True)
class LoraRecipe:
    """What is skipped, and how large the matrices are."""

    skip_attention: tuple[int, ...] = ()
    """Layers whose attention is skipped while drafting, counted from 0."""
    skip_mlp: tuple[int, ...] = ()
    """Layers whose MLP is skipped while drafting. Without either list a share of both is."""
    skip_share: float = 0.5
    """Share of the layers to skip if none are named, 0 to 1. The first and the last always run."""
    rank: int = 16
    """Rank of the matrices beside the linears that run. 0 trains the linears themselves: the draft
    then has weights of its own, hundreds of times as many."""
    vocabulary: int = 16_384
    """How many tokens the part can say: those that are likeliest in the text it is trained on."""
    kind = "draft-lora"

    def __post_init__(self) -> None:
        if self.rank < 0 or self.vocabulary < 1 or not 0 < self.skip_share < 1:
            raise OptionError(
                f"rank={self.rank}, vocabulary={self.vocabulary}, skip_share={self.skip_share}: "
                "the rank is 0 (whole weights) or more, the vocabulary at least 1, the share is "
                "between 0 and 1"
            )

    def skipped(self, shape: Shape) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Layers without attention, layers without MLP, for a model of that shape."""
        both = self.skip_attention, self.skip_mlp
        if not any(both):
            inner, count = shape.layers - 2, round(self.skip_share * shape.layers)
            chosen = range(min(count, inner))
            both = (tuple(1 + (2 * index + 1) * inner // (2 * count) for index in chosen),) * 2
        outside = [layer for layer in [*both[0], *both[1]] if not 0 <= layer < shape.layers]
        if outside or not any(both) or all(len(set(layers)) == shape.layers for layers in both):
            raise OptionError(
                f"attention of layers {both[0]} and MLPs of {both[1]} cannot be skipped in a model "
                f"of {shape.layers} layers: name some of 0 to {shape.layers - 1}, not all, or "
                f"raise skip_share={self.skip_share}"
            )
        return both

    def state_layers(self, shape: Shape) -> tuple[int, ...]:
        if shape.family not in PROVEN:
            raise UnsupportedModel(
                f"a draft-lora cannot be trained for a {shape.family} model, only for "
                f"{', '.join(PROVEN)}. Train a draft-head instead"
            )
        self.skipped(shape)
        return ()

    def training(self, model: FrozenModel, options: PartOptions) -> LoraTraining:
        return LoraTraining(model, self, options)


class Added(nn.Module):
    """A frozen linear with two small matrices beside it."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(rank, base.in_features) * base.in_features**-0.5)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.base(x) + F.linear(F.linear(x, self.a), self.b)
        return added


class Own(nn.Module):
    """A linear with weights of its own, which begin as the frozen one's."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(base.weight.detach().clone()), base.bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


def _trained(base: nn.Linear, rank: int) -> tuple[nn.Module, nn.ParameterDict]:
    """What stands in a linear's place, and what of it is trained."""
    if not rank:
        own = Own(base)
        return own, nn.ParameterDict({"weight": own.weight})
    added = Added(base, rank)
    return added, nn.ParameterDict({"a": added.a, "b": added.b})


class NoAttention(nn.Module):
    """A skipped attention adds nothing to the stream."""

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        return torch.zeros_like(hidden_states), None


class NoMlp(nn.Module):
    """A skipped MLP adds nothing to the stream."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)


class LoraTraining(SmallPart):
    """A draft-LoRA under training. It takes the network apart: pass a copy to keep it whole."""

    def build(self, model: FrozenModel, recipe: LoraRecipe) -> nn.ModuleDict:
        """Take the skipped halves out and put matrices beside the linears of the others. Returns
        the matrices, by layer and name."""
        self._skipped, self._rank = recipe.skipped(model.shape), recipe.rank
        self._body = model.network.model
        self._body.norm = nn.Identity()  # `ends` puts the stream through the model's own
        (attention, mlp), family = self._skipped, model.family
        matrices: dict[str, nn.Module] = {}
        for index, layer in enumerate(module(model.network, family.layers).children()):
            names = [] if index in attention else [*family.qkv, family.out]
            names += [] if index in mlp else [*family.gate_up, family.down]
            for name in names:
                owner, _, last = name.rpartition(".")
                linear, kept = _trained(attrgetter(name)(layer), self._rank)
                setattr(attrgetter(owner)(layer), last, linear)
                matrices[stored_name(index, name)] = kept
            if index in attention:
                layer.self_attn = NoAttention()
            if index in mlp:
                layer.mlp = NoMlp()
        return nn.ModuleDict(matrices)

    def drafted(self, batch: Batch, generator: torch.Generator | None, measure: bool) -> Drafted:
        batch = {name: values.to(self.device) for name, values in batch.items()}
        ids = batch["tokens"].long()

        def stream(roots: Roots) -> Tensor:
            return roots.take(self._body(input_ids=ids, use_cache=False).last_hidden_state)

        return drafted_once(self, batch, generator, measure, stream)

    def settings(self) -> dict[str, Any]:
        attention, mlp = self._skipped
        return {"attention": list(attention), "mlp": list(mlp), "rank": self._rank}
