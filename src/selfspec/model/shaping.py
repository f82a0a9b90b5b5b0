"""The numbers of one model: its config, as the table's entry reads it. Knows no family by name."""

from __future__ import annotations

from typing import Any

from .compute.windows import Chunks, Window
from .family import Family, Lenders, Shape, Windows
from .latent import latent_size

ENDLESS = 1 << 20  # tokens, for a model whose config names no length
_CONTEXTS = ("max_position_embeddings", "n_positions", "max_seq_len", "model_max_length", "n_ctx")


def shape_of(config: Any, family: Family, long: bool = False) -> Shape:
    """The numbers in the config. `long`: for texts beyond the length where frequencies change."""
    heads: int = getattr(config, "num_attention_heads", 1)  # no layer may attend
    kinds = () if family.kinds is None else family.kinds(config)
    lenders = family.lenders(config)
    names = (
        "hidden_act",
        "hidden_activation",
        "activation_function",
        "mlp_hidden_act",
        "activation",
    )
    activations = [getattr(config, name, None) for name in names]
    # up to the switch, since no text is read again, or everything by the frequencies of long texts
    context = context_of(config)
    if not long:
        context = min(context, switch_length(config) or context)
    return Shape(
        family=config.model_type,
        layers=config.num_hidden_layers,
        width=config.hidden_size,
        heads=heads,
        kv_heads=max(kinds)[0] if kinds else family.key_heads(config) or heads,
        head_size=max(size for _, size in kinds) if kinds else _head_size(config, family),
        vocabulary=config.vocab_size,
        context=context,
        activation=family.activation or next(filter(None, activations), "none"),
        windows=family.windows(config) or _windows(config),
        ropes=family.ropes(config),
        scales=family.scales(config),
        parallel=family.parallel and getattr(config, "use_parallel_residual", True),
        factors=family.factors(config),
        slopes=family.slopes(config),
        temperatures=family.temperatures(config),
        kinds=kinds,
        lenders=lenders,
        **(_by_kind(config, family) if family.recurrent else _borrowing(lenders)),
        **_beside(config, family.streams(config)),
    )


def _head_size(config: Any, family: Family) -> int:
    if family.latent:
        return latent_size(config)
    size: int | None = getattr(config, "head_dim", None)
    return size or config.hidden_size // getattr(config, "num_attention_heads", 1)


def _borrowing(lenders: Lenders) -> dict[str, Any]:
    """Which layers keep no keys, since they read those of others."""
    return {"keyless": tuple(layer for layer, lender in enumerate(lenders) if lender != layer)}


def _beside(config: Any, streams: int) -> dict[str, Any]:
    """Several streams, and then layers of one half."""
    if streams == 1:
        return {}
    missing = frozenset((layer, False) for layer in range(config.num_hidden_layers))
    return {"streams": streams, "missing": missing}


def _by_kind(config: Any, family: Family) -> dict[str, Any]:
    """Which layers are recurrent, which keep no keys, and which halves there are none of."""
    assert family.recurrent is not None
    layers = range(config.num_hidden_layers)
    if family.recurrent.beside:
        return {"recurrent": tuple(layers)}
    # older versions of transformers have only the second name
    kinds = getattr(config, "layer_types", None) or config.layers_block_type
    attention = ("full_attention", "sliding_attention", "attention")
    mlps = [at for at, kind in enumerate(kinds) if kind in ("mlp", "moe")]
    others = [at for at, kind in enumerate(kinds) if kind not in attention]
    return {
        "recurrent": tuple(at for at in others if at not in mlps),
        "keyless": tuple(others),
        "missing": frozenset((at, at in mlps) for at in layers if family.single),
    }


def context_of(config: Any) -> int:
    """How long a text may be, by the config."""
    lengths = (getattr(config, name, None) for name in _CONTEXTS)
    return next((n for n in lengths if isinstance(n, int) and n > 0), ENDLESS)


def switch_length(config: Any) -> int | None:
    """The length beyond which all positions of a text rotate by other frequencies ("longrope").

    There transformers reads the whole text again. None: the model has one set of frequencies.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return None
    switch: int | None = rope["original_max_position_embeddings"]
    return switch if switch is None or switch < config.max_position_embeddings else None


def _windows(config: Any) -> Windows:
    window = getattr(config, "sliding_window", None)
    if not getattr(config, "use_sliding_window", True):
        window = None
    usual = "sliding_attention" if window else "full_attention"
    kinds = getattr(config, "layer_types", None) or [usual] * config.num_hidden_layers
    chunk: int | None = getattr(config, "attention_chunk_size", None)
    windows: dict[str, Window | None] = {
        "sliding_attention": window,
        "chunked_attention": None if chunk is None else Chunks(chunk),
    }
    return tuple(windows.get(kind) for kind in kinds)
