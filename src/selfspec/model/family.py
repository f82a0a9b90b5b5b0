"""What an architecture is, as values: one entry of the table (families.py), and the numbers of one
model. Knows no family.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from ..errors import OptionError
from .compute.norms import NormKind
from .compute.ops import Temperature
from .compute.plan import LayerPlan
from .compute.recurrence import RecurrentSize
from .compute.uneven_cache import Kinds
from .compute.windows import Window

_RMS = NormKind()


@dataclass(frozen=True)
class Scales:
    """Factors and soft caps from a config. A soft cap is cap * tanh(x / cap), and 0 is none."""

    embedding: float = 1.0
    residual: float = 1.0
    """Of what each half adds to the residual stream."""
    logits: float = 1.0
    score_cap: float = 0.0
    """Of attention scores."""
    logit_cap: float = 0.0
    clamp: float = 0.0
    """Of queries, keys and values, behind their norms. 0 is none."""


# the rotary table of each layer: "" where there is only one, None where nothing is rotated
Ropes = tuple[str | None, ...]
Windows = tuple[Window | None, ...]  # of each layer
Slopes = tuple[float, ...]  # of each query head, or none
Temperatures = tuple[Temperature, ...]  # of each layer, or none
Lenders = tuple[int, ...]  # of each layer, or none


@dataclass(frozen=True)
class RecurrentNames:
    """Where a layer's recurrent half is, which other layers do not have."""

    kind: str
    """One of recurrent.py's."""
    module: str
    into: tuple[str, ...] = ("in_proj",)
    out: str = "out_proj"
    beside: bool = False
    """Each layer has an attention as well, which reads the same input."""


@dataclass(frozen=True)
class OfTokenNames:
    """Where the parts are by which every layer reads its tokens once more: a table of numbers for
    each token and layer, and what a layer makes of its share behind its MLP."""

    table: str = "model.embed_tokens_per_layer"
    projection: str = "model.per_layer_model_projection"
    norm: str = "model.per_layer_projection_norm"
    gate: str = "per_layer_input_gate"
    out: str = "per_layer_projection"
    after: str = "post_per_layer_input_norm"


@dataclass(frozen=True)
class BesideMlpNames:
    """The norms of a mixture that stands beside an MLP and reads the stream itself."""

    mlp_after: str = "post_feedforward_layernorm_1"
    router: str = "router.norm"
    experts: str = "pre_feedforward_layernorm_2"
    after: str = "post_feedforward_layernorm_2"


@dataclass(frozen=True, eq=False)
class Factor:
    """What a linear's input is multiplied with, and its outputs, all of them or one by one."""

    inputs: float = 1.0
    outputs: float | Tensor = 1.0


@dataclass(frozen=True)
class BeforeHead:
    """What stands between the last norm and the head: a product, an activation and a norm."""

    product: str
    activation: str
    norm: str


@dataclass(frozen=True)
class Family:
    """One architecture. The defaults are Llama's. Names are relative to the model or to a layer."""

    layers: str = "model.layers"
    embedding: str = "model.embed_tokens"
    embedding_norm: str | None = None
    """A norm of the embeddings."""
    positions: str | None = None
    """Embeddings of positions, learned or a table, which are added to those of the tokens."""
    first_position: int = 0
    """Which of them is the first token's."""
    rotary: str | None = "model.rotary_emb"
    """A module, or a table of sines, then cosines, by position. "{}" stands for a layer's kind,
    where each has a module of its own."""
    final_norm: str = "model.norm"
    head: str = "lm_head"
    before_head: BeforeHead | None = None
    norms: NormKind = _RMS
    attention: str = "self_attn"
    attention_norm: str | None = "input_layernorm"
    """None: the half reads the residual stream as it is. The same holds for `mlp_norm`."""
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    by_head: bool = False
    """The fused projection is ordered by heads: the queries of one key, that key and its value,
    then those of the next."""
    blocks: int = 1
    """The fused projection is ordered by so many blocks: the queries, values and keys of some
    heads, then those of the next."""
    out: str = "self_attn.o_proj"
    query_norm: str | None = None
    """Used in the layers that have it."""
    key_norm: str | None = None
    value_norm: str | None = None
    norms_behind: bool = False
    """They come behind the rotation."""
    unscaled: bool = False
    """Scores are what queries and keys give."""
    interleaved: bool = False
    """Rotary pairs are neighbours, not the two halves of a head."""
    backwards: bool = False
    """Rotary pairs turn the other way round."""
    attention_inner: str | None = None
    """A norm of what its last product reads. `mlp_inner` is the MLP's."""
    attention_after: str | None = None
    """A norm of what the half adds to the residual stream. `mlp_after` is the MLP's."""
    mlp_norm: str | None = "post_attention_layernorm"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    """One name for a fused projection, and for an MLP without a gate."""
    gated: bool = True
    down: str = "mlp.down_proj"
    mlp_inner: str | None = None
    mlp_after: str | None = None
    activation: str = ""
    """The MLP's, where the config names none or another one."""
    experts: str | None = None
    """A mixture of experts, in the layers that have it."""
    router: str | None = None
    """What chooses among them, where it is not a part of the mixture."""
    experts_beside: bool = False
    """The MLP is there as well, and what both give is added."""
    experts_normed: BesideMlpNames | None = None
    """The same, and MLP, router and experts have norms of their own."""
    experts_transposed: bool = False
    """The weights of experts lie by their inputs."""
    experts_interleaved: bool = False
    """A gate and its number of the other half are neighbours."""
    expert_scores: str = "softmax"
    """What chooses and weighs them, or "sigmoid", or "sigmoid of inputs", which weighs what they
    read, or "softmax of the chosen", or "near the best", which are shares among scores that are
    near."""
    experts_normalised: bool = True
    """Whether chosen experts' weights are divided by their sum, where the router does not say."""
    least_weight: float = 0.0
    """What is added to that sum."""
    latent: bool = False
    """Latent attention: heads are unfolded from a few numbers of each token."""
    recurrent: RecurrentNames | None = None
    """In place of attention, in the layers that have it."""
    where_recurrent: Mapping[str, Any] = field(default_factory=dict)
    """Fields that differ in the layers that are recurrent."""
    single: bool = False
    """A layer is one half: what is recurrent, an attention or an MLP."""
    windows: Callable[[Any], Windows | None] = lambda config: None
    """Where a config tells them in another way than most."""
    sinks: str | None = None
    """Of each query head a score that takes its share of attention and gives nothing."""
    slopes: Callable[[Any], Slopes] = lambda config: ()
    """By which each query head's scores fall with a key's distance (ALiBi)."""
    coarse_slopes: bool = False
    """They are of a key's position, in bfloat16, and scaled like scores."""
    temperatures: Callable[[Any], Temperatures] = lambda config: ()
    """By which each layer's queries grow with their position."""
    gated_attention: bool = False
    """Each head's query comes with a gate, whose sigmoid multiplies what the head gives. Gates may
    have a projection of their own, the last of `qkv`."""
    parallel: bool = False
    """Both halves read the layer's input. Otherwise the MLP also reads what attention added."""
    as_configured: Callable[[Any], Mapping[str, Any]] = lambda config: {}
    """Fields that depend on a config."""
    unless: Callable[[Any], object] = lambda config: False
    """Which configs make it another architecture, which is left to its modules."""
    key_heads: Callable[[Any], int | None] = lambda config: getattr(
        config, "num_key_value_heads", None
    )
    """Heads of keys and of values. None: as many as of queries."""
    kinds: Callable[[Any], Kinds] | None = None
    """Of each layer the heads of keys and their size, where layers differ."""
    lenders: Callable[[Any], Lenders] = lambda config: ()
    """Of each layer the one whose keys and values it reads, where some have none of their own."""
    of_token: OfTokenNames | None = None
    """Each layer reads its tokens once more."""
    streams: Callable[[Any], int] = lambda config: 1
    """How many stand beside each other (AltUp). Then a layer is one half (altup.py)."""
    stream: str | None = None
    """A number of each layer that multiplies the residual stream behind it."""
    scales: Callable[[Any], Scales] = lambda config: Scales()
    factors: Callable[[Any], Mapping[str, Factor]] = lambda config: {}
    """Of linears, by their names within a layer."""
    ropes: Callable[[Any], Ropes] = lambda config: ("",) * config.num_hidden_layers


@dataclass(frozen=True)
class Shape:
    """The numbers of an architecture that running it needs."""

    family: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    context: int
    activation: str
    windows: Windows
    ropes: Ropes
    scales: Scales
    parallel: bool
    recurrent: tuple[int, ...] = ()
    """The layers that are recurrent, and how much one of them keeps."""
    recurrent_size: RecurrentSize | None = None
    keyless: tuple[int, ...] = ()
    """The layers that keep no keys and values."""
    kinds: Kinds = ()
    """Of each layer the heads of keys and their size, where layers differ."""
    lenders: Lenders = ()
    """Of each layer the one whose keys and values it reads, where some have none of their own."""
    streams: int = 1
    """How many of this width stand beside each other."""
    missing: frozenset[tuple[int, bool]] = frozenset()
    """Halves that the model does not have: layer, and whether it would be the attention."""
    factors: Mapping[str, Factor] = field(default_factory=dict)
    slopes: Slopes = ()
    temperatures: Temperatures = ()

    @property
    def chains_only(self) -> bool:
        """Whether drafts are chains, since recurrent layers go on from one token to the next."""
        return bool(self.recurrent)

    @cached_property
    def borrowers(self) -> Mapping[int, tuple[int, ...]]:
        """Of each layer whose keys others read, these others."""
        found = dict[int, tuple[int, ...]]()
        for layer, lender in enumerate(self.lenders):
            if lender != layer:
                found[lender] = (*found.get(lender, ()), layer)
        return found

    def free_to_skip(self, attention: Iterable[int]) -> tuple[int, ...]:
        """Those of some layers whose attention may be left out: whose keys no other layer that
        runs would read."""
        chosen = tuple(attention)
        return tuple(layer for layer in chosen if set(self.borrowers.get(layer, ())) <= set(chosen))

    def check_plan(self, plan: LayerPlan) -> None:
        """Raise unless the plan fits a model of this shape."""
        plan.check(self.layers)
        for lender, others in self.borrowers.items():
            if lender not in plan.skipped_attention:
                continue
            if left := [layer for layer in others if layer in plan.attention_layers]:
                raise OptionError(
                    f"layer {lender}'s attention is left out, and {_layers(left)} would read the "
                    "keys and values that it makes; leave theirs out too, or keep it"
                )

    def of_layer(self, layer: int) -> Shape:
        """The shape with the heads of one layer."""
        if not self.kinds:
            return self
        heads, size = self.kinds[layer]
        return replace(self, kv_heads=heads, head_size=size)

    def first_layers(self, count: int) -> Shape:
        """The shape of the first `count` layers alone."""
        return replace(
            self,
            layers=count,
            windows=self.windows[:count],
            ropes=self.ropes[:count],
            temperatures=self.temperatures[:count],
            recurrent=tuple(layer for layer in self.recurrent if layer < count),
            keyless=tuple(layer for layer in self.keyless if layer < count),
            kinds=self.kinds[:count],
            lenders=self.lenders[:count],
            missing=frozenset(half for half in self.missing if half[0] < count),
        )


def _layers(some: Sequence[int]) -> str:
    """Layers by their numbers, in words."""
    names = ", ".join(map(str, some))
    return f"layer{'s' * (len(some) > 1)} {names}"
