"""What an architecture is, as values: one entry of the table (families.py), and the numbers of one
model. Knows no family.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from .compute.norms import NormKind

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
    experts: str | None = None
    """A mixture of experts, in the layers that have it."""
    parallel: bool = False
    """Both halves read the layer's input. Otherwise the MLP also reads what attention added."""
    unless: Callable[[Any], object] = lambda config: False
    """Which configs make it another architecture, which is left to its modules."""
    key_heads: Callable[[Any], int | None] = lambda config: getattr(
        config, "num_key_value_heads", None
    )
    """Heads of keys and of values. None: as many as of queries."""
    scales: Callable[[Any], Scales] = lambda config: Scales()
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

    def first_layers(self, count: int) -> Shape:
        """The shape of the first `count` layers alone."""
        return replace(self, layers=count, windows=self.windows[:count], ropes=self.ropes[:count])
