"""Training a draft-LoRA: small matrices beside the linears of a model of which many halves are
skipped, on only while it drafts.

Draft & Verify drafts with the model less some halves; what is left was never trained to do without
them. Here it is, without touching the model: y = W x + B A x (LoRA, Hu et al. 2021, arXiv
2106.09685) on what is not skipped, B = 0 at first. One loss at every answered token, cross entropy
to the whole model's distribution there (head_net.py). In use the draft has keys and values of its
own, so it sees what it saw here. Does not know how a skip set is found.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import OptionError, UnsupportedModel
from ..model.families import Family, Shape
from ..model.weights import module
from ..trained.lora import stored_name
from .exit_adapter import in_a_row
from .head_net import Drafted, Ends, Roots, losses_of
from .parts import PartOptions, SmallPart, precision

# whose linears and halves have the names that are taken apart here
PROVEN = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
)


@dataclass(frozen=True)
class LoraRecipe:
    """What is skipped, and how large the matrices are."""

    skip_attention: tuple[int, ...] = ()
    """Layers whose attention is skipped while drafting, counted from 0."""
    skip_mlp: tuple[int, ...] = ()
    """Layers whose MLP is skipped while drafting, counted from 0. Without either list a share of
    both is skipped, evenly spread."""
    skip_share: float = 0.5
    """Share of the layers to skip if none are named, between 0 and 1. The first and the last always
    run."""
    rank: int = 16
    """Rank of the matrices beside the linears that run."""
    vocabulary: int = 16_384
    """How many tokens the part can say: those that are likeliest in the text it is trained on."""
    kind = "draft-lora"

    def __post_init__(self) -> None:
        if self.rank < 1 or self.vocabulary < 1 or not 0 < self.skip_share < 1:
            raise OptionError(
                f"rank={self.rank}, vocabulary={self.vocabulary}, skip_share={self.skip_share}: "
                f"rank and vocabulary are at least "
                "1, the share is between 0 and 1"
            )

    def skipped(self, shape: Shape) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Layers without attention, layers without MLP, for a model of that shape."""
        both = self.skip_attention, self.skip_mlp
        if not any(both):
            inner = shape.layers - 2
            count = round(self.skip_share * shape.layers)
            both = (
                tuple(
                    1 + (2 * index + 1) * inner // (2 * count) for index in range(min(count, inner))
                ),
            ) * 2
        outside = sorted(
            layer for layers in both for layer in layers if not 0 <= layer < shape.layers
        )
        if outside or not any(both) or all(len(set(layers)) == shape.layers for layers in both):
            raise OptionError(
                f"attention of layers {both[0]} and MLPs of {both[1]} cannot be skipped in a "
                f"model of {shape.layers} layers: "
                f"name some of 0 to {shape.layers - 1}, not all, or raise "
                f"skip_share={self.skip_share}"
            )
        return both

    def collectors(self, shape: Shape) -> tuple[int, ...]:
        """No states are needed; all is computed from the tokens."""
        if shape.family not in PROVEN:
            raise UnsupportedModel(
                f"a draft-lora cannot be trained for a {shape.family} model; families it is "
                f"tested on: {', '.join(PROVEN)}. "
                "Train a draft-head instead"
            )
        self.skipped(shape)
        return ()

    def training(
        self,
        network: Any,
        family: Family,
        shape: Shape,
        vocabulary: Tensor,
        scale: float,
        options: PartOptions,
    ) -> LoraTraining:
        return LoraTraining(network, family, shape, self, vocabulary, options)


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


class NoAttention(nn.Module):
    """A skipped half adds nothing to the stream."""

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        return torch.zeros_like(hidden_states), None


class NoMlp(nn.Module):
    """The same of an MLP."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)


class LoraTraining(SmallPart):
    """A draft-LoRA under training. Takes the network apart: whoever needs it whole passes a
    copy."""

    kind = "draft-lora"

    def __init__(
        self,
        network: Any,
        family: Family,
        shape: Shape,
        recipe: LoraRecipe,
        vocabulary: Tensor,
        options: PartOptions,
    ) -> None:
        self._options, self._device = options, vocabulary.device
        self._skipped, self._rank = recipe.skipped(shape), recipe.rank
        self.ends = Ends(network, family, shape, vocabulary)
        self._body = network.model
        self._body.norm = nn.Identity()  # `ends` reads the stream through the model's own
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(options.seed)
            self._net = self._prepared(module(network, family.layers), family).to(self._device)

    @property
    def net(self) -> nn.Module:
        return self._net

    def _prepared(self, layers: nn.Module, family: Family) -> nn.ModuleDict:
        """Take the skipped halves out and put matrices beside the linears of the others; those
        matrices, by layer and name."""
        attention, mlp = self._skipped
        found: dict[str, nn.Module] = {}
        for index, layer in enumerate(layers.children()):
            names = [] if index in attention else [*family.qkv, family.out]
            names += [] if index in mlp else [*family.gate_up, family.down]
            for name in names:
                owner, _, last = name.rpartition(".")
                added = Added(attrgetter(name)(layer), self._rank)
                setattr(attrgetter(owner)(layer), last, added)
                found[stored_name(index, name)] = nn.ParameterDict({"a": added.a, "b": added.b})
            if index in attention:
                layer.self_attn = NoAttention()
            if index in mlp:
                layer.mlp = NoMlp()
        return nn.ModuleDict(found)

    def drafted(
        self, batch: dict[str, Tensor], generator: torch.Generator | None, measure: bool
    ) -> Drafted:
        batch = {name: values.to(self._device) for name, values in batch.items()}
        candidates = None
        if generator and self._options.others:
            candidates = self.ends.candidates(batch, self._options.others, generator)
        answered = batch["chances"].sum(-1) > 0
        trained = answered
        if generator and self._options.share < 1:
            trained = answered & (
                torch.rand(answered.shape, generator=generator) < self._options.share
            ).to(self._device)
        roots = Roots(*trained.nonzero(as_tuple=True))
        with precision(self._options, self._device):
            x = self._body(input_ids=batch["tokens"].long(), use_cache=False).last_hidden_state
            losses, counted, logits = losses_of(
                roots.take(x), self.ends, batch, roots, 0, candidates
            )
        tried = right = torch.zeros(1, device=self._device)
        if measure:
            best = self.ends.vocabulary[logits.argmax(-1)]
            tried, right = in_a_row(
                roots.spread(best == roots.take(batch["tokens"], 1), batch["tokens"]), answered
            )
        return Drafted(losses.sum()[None], counted.sum()[None], tried, right)

    def tensors(self) -> dict[str, Tensor]:
        found = {
            name: value.detach().cpu().half() for name, value in self._net.state_dict().items()
        }
        return {**found, "vocabulary": self.ends.vocabulary.cpu().int()}

    def settings(self) -> dict[str, Any]:
        return {
            "attention": list(self._skipped[0]),
            "mlp": list(self._skipped[1]),
            "rank": self._rank,
        }
