"""What an architecture is, as values: one entry of the table (families.py), and the numbers of one
model. Knows no family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from .compute.norms import NormKind
from .compute.recurrence import RecurrentSize

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


# the rotary table of each layer: "" where there is only one, None where nothing is rotated
Ropes = tuple[str | None, ...]


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


@dataclass(frozen=True, eq=False)
class Factor:
    """What a linear's input is multiplied with, and its outputs, all of them or one by one."""

    inputs: float = 1.0
    outputs: float | Tensor = 1.0


@dataclass(frozen=True)
class Family:
    """One architecture. The defaults are Llama's. Names are relative to the model or to a layer."""

    layers: str = "model.layers"
    embedding: str = "model.embed_tokens"
    embedding_norm: str | None = None
    """A norm of the embeddings."""
    positions: str | None = None
    """Learned embeddings of positions, which are added to those of the tokens."""
    first_position: int = 0
    """Which of them is the first token's."""
    rotary: str | None = "model.rotary_emb"
    final_norm: str = "model.norm"
    head: str = "lm_head"
    norms: NormKind = _RMS
    attention: str = "self_attn"
    attention_norm: str | None = "input_layernorm"
    """None: the half reads the residual stream as it is. The same holds for `mlp_norm`."""
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    by_head: bool = False
    """The fused projection is ordered by heads: query, key and value of one, then of the next."""
    out: str = "self_attn.o_proj"
    query_norm: str | None = None
    """Used in the layers that have it."""
    key_norm: str | None = None
    interleaved: bool = False
    """Rotary pairs are neighbours, not the two halves of a head."""
    backwards: bool = False
    """Rotary pairs turn the other way round."""
    attention_after: str | None = None
    """A norm of what the half adds to the residual stream. `mlp_after` is the MLP's."""
    mlp_norm: str | None = "post_attention_layernorm"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    """One name for a fused projection, and for an MLP without a gate."""
    gated: bool = True
    down: str = "mlp.down_proj"
    mlp_after: str | None = None
    activation: str = "none"
    """The MLP's, where the config names none."""
    experts: str | None = None
    """A mixture of experts, in the layers that have it."""
    experts_beside: bool = False
    """The MLP is there as well, and what both give is added."""
    expert_scores: str = "softmax"
    """What chooses and weighs them, or "sigmoid"."""
    experts_normalised: bool = True
    """Whether chosen experts' weights are divided by their sum, where the router does not say."""
    least_weight: float = 0.0
    """What is added to that sum."""
    latent: bool = False
    """Latent attention: heads are unfolded from a few numbers of each token."""
    recurrent: RecurrentNames | None = None
    """In place of attention, in the layers that have it."""
    single: bool = False
    """A layer is one half: what is recurrent, an attention or an MLP."""
    gated_attention: bool = False
    """Each head's query comes with a gate, whose sigmoid multiplies what the head gives."""
    parallel: bool = False
    """Both halves read the layer's input. Otherwise the MLP also reads what attention added."""
    unless: Callable[[Any], object] = lambda config: False
    """Which configs make it another architecture, which is left to its modules."""
    key_heads: Callable[[Any], int | None] = lambda config: getattr(
        config, "num_key_value_heads", None
    )
    """Heads of keys and of values. None: as many as of queries."""
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
    windows: tuple[int | None, ...]  # sliding window of each layer
    ropes: Ropes
    scales: Scales
    parallel: bool
    recurrent: tuple[int, ...] = ()
    """The layers that are recurrent, and how much one of them keeps."""
    recurrent_size: RecurrentSize | None = None
    keyless: tuple[int, ...] = ()
    """The layers that keep no keys and values."""
    missing: frozenset[tuple[int, bool]] = frozenset()
    """Halves that the model does not have: layer, and whether it would be the attention."""
    factors: Mapping[str, Factor] = field(default_factory=dict)

    @property
    def chains_only(self) -> bool:
        """Whether drafts are chains, since recurrent layers go on from one token to the next."""
        return bool(self.recurrent)

    def first_layers(self, count: int) -> Shape:
        """The shape of the first `count` layers alone."""
        return replace(
            self,
            layers=count,
            windows=self.windows[:count],
            ropes=self.ropes[:count],
            recurrent=tuple(layer for layer in self.recurrent if layer < count),
            keyless=tuple(layer for layer in self.keyless if layer < count),
            missing=frozenset(half for half in self.missing if half[0] < count),
        )
