"""The numbers of one model: its config, as the table's entry reads it. Knows no family by name."""

from __future__ import annotations

from typing import Any

from .family import Family, Shape
from .latent import latent_size


def shape_of(config: Any, family: Family, long: bool = False) -> Shape:
    """The numbers in the config. `long`: for texts beyond the length where frequencies change."""
    heads: int = config.num_attention_heads
    names = ("hidden_act", "hidden_activation", "activation_function", "mlp_hidden_act")
    activations = [getattr(config, name, None) for name in names]
    # up to the switch, since no text is read again, or everything by the frequencies of long texts
    context: int = config.max_position_embeddings
    if not long:
        context = min(context, switch_length(config) or context)
    return Shape(
        family=config.model_type,
        layers=config.num_hidden_layers,
        width=config.hidden_size,
        heads=heads,
        kv_heads=family.key_heads(config) or heads,
        head_size=latent_size(config) if family.latent else _head_size(config),
        vocabulary=config.vocab_size,
        context=context,
        activation=next(filter(None, activations), family.activation),
        windows=_windows(config),
        ropes=family.ropes(config),
        scales=family.scales(config),
        parallel=family.parallel and getattr(config, "use_parallel_residual", True),
        factors=family.factors(config),
        **(_by_kind(config, family) if family.recurrent else {}),
    )


def _head_size(config: Any) -> int:
    return int(getattr(config, "head_dim", 0) or config.hidden_size // config.num_attention_heads)


def _by_kind(config: Any, family: Family) -> dict[str, Any]:
    """Which layers are recurrent, which keep no keys, and which halves there are none of."""
    assert family.recurrent is not None
    attention = ("full_attention", "sliding_attention", "attention")
    mlps = [at for at, kind in enumerate(config.layer_types) if kind == "mlp"]
    others = [at for at, kind in enumerate(config.layer_types) if kind not in attention]
    recurrent = [at for at in others if at not in mlps]
    missing = {(at, at in mlps) for at in range(len(config.layer_types)) if family.single}
    return {
        "recurrent": tuple(recurrent),
        "keyless": () if family.recurrent.beside else tuple(others),
        "missing": frozenset(missing),
    }


def switch_length(config: Any) -> int | None:
    """The length beyond which all positions of a text rotate by other frequencies ("longrope").

    There transformers reads the whole text again. None: the model has one set of frequencies.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return None
    switch: int | None = rope["original_max_position_embeddings"]
    return switch if switch is None or switch < config.max_position_embeddings else None


def _windows(config: Any) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    if not getattr(config, "use_sliding_window", True):
        window = None
    usual = "sliding_attention" if window else "full_attention"
    kinds = getattr(config, "layer_types", None) or [usual] * config.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
