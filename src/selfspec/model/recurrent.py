"""Recurrent halves of a model's layers, from its modules by the names that a family gives.

Four kinds are known: the short convolution of LFM2, the gated delta rule, Mamba-1 and Mamba-2. What
differs in how they store their projections is undone here, once. Does not know how a half is run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UnsupportedModel
from .compute.norms import Norm
from .compute.ops import Ops
from .compute.recurrence import Recurrence, RecurrentSize
from .compute.selective import Selective
from .family import Family, Shape
from .weights import LinearWeights, linear_weights, module, norm, product


@dataclass(frozen=True)
class RecurrentParts:
    """Linears of one input, which of their outputs stands at each place, what goes on behind them,
    and the linear after it."""

    into: Sequence[LinearWeights]
    order: Tensor | None
    how: Recurrence
    out: LinearWeights


def recurrent_parts(
    layer: nn.Module, index: int, family: Family, shape: Shape, ops: Ops
) -> RecurrentParts:
    """The recurrent half of a layer, `index` being which of them it is."""
    names = family.recurrent
    assert names is not None
    found: Any = module(layer, names.module)
    how, order = _KINDS[names.kind](found, index)
    into = [linear_weights(layer, f"{names.module}.{each}", shape.factors) for each in names.into]
    assert sum(each.outputs for each in into) == how.columns
    if how.size.selective:
        how = replace(how, selective=_selective(found, family, ops))
    out = linear_weights(layer, f"{names.module}.{names.out}", shape.factors)
    return RecurrentParts(into, torch.cat(order) if order else None, how, out)


def recurrent_size(layer: nn.Module, family: Family) -> RecurrentSize:
    """What its recurrent half keeps."""
    names = family.recurrent
    assert names is not None
    return _KINDS[names.kind](module(layer, names.module), 0)[0].size


def _selective(found: Any, family: Family, ops: Ops) -> Selective:
    """What stands between the convolution and the states of Mamba-1, which some norm."""
    into, steps = (product([linear_weights(found, f"{name}_proj")], ops) for name in ("x", "dt"))
    sizes = {"dt": steps.inputs, "b": found.ssm_state_size, "c": found.ssm_state_size}

    def normed(name: str) -> Norm | None:
        if not hasattr(found, f"{name}_layernorm"):
            return None
        made = norm(found, f"{name}_layernorm", family.norms, sizes[name])
        return replace(made, weight=made.weight[: sizes[name]])  # Falcon Mamba's are ones, too many

    return Selective(
        into=into, steps=steps, norm=normed("dt"), key_norm=normed("b"), query_norm=normed("c")
    )


# what is read of the module, and which output of its projections stands at each place of ours
_Read = tuple[Recurrence, list[Tensor]]


def _short(found: Any, index: int) -> _Read:
    """LFM2: B, C and x; C times the convolution of B x."""
    width, (weight, bias) = found.conv.weight.shape[0], _convolution(found.conv)
    size = RecurrentSize(width, weight.shape[0])
    b, c, x = torch.arange(3 * width).chunk(3)
    return Recurrence(index, size, weight, bias, twice=True), [x, b, c]


def _delta(found: Any, index: int) -> _Read:
    """The gated delta rule, its projections one after the other: q k v, gates, a, b."""
    weight, bias = _convolution(found.conv1d)
    heads, key, value = found.num_v_heads, found.head_k_dim, found.head_v_dim
    last = getattr(found, "norm", None) or found.o_norm
    how = Recurrence(
        index,
        RecurrentSize(weight.shape[1], weight.shape[0], heads, key, value),
        weight,
        bias,
        activated=_silu(found),
        finish="norm, then gate",
        key_heads=found.num_k_heads,
        delta=True,
        norm=_floats(last.weight),
        norm_size=value,
        eps=last.variance_epsilon,
        limits=(0.0, 2.0 if getattr(found, "allow_neg_eigval", False) else 1.0),
        **_steps(found),
    )
    return how, []


def _delta_by_head(found: Any, index: int) -> _Read:
    """The same where the projections lie by heads of keys: q, k, the v and gates of the states that
    share them; b and a of these."""
    how, _ = _delta(found, index)
    groups, key = how.key_heads, how.size.key
    values = how.outputs // groups
    both = torch.arange(groups * 2 * (key + values)).view(groups, -1)
    q, k, v, z = (each.flatten() for each in both.split([key, key, values, values], 1))
    b, a = (both.numel() + torch.arange(2 * how.size.heads).view(groups, 2, -1)).unbind(1)
    return how, [q, k, v, z, a.flatten(), b.flatten()]


def _mamba2(found: Any, index: int) -> _Read:
    """Mamba-2: gates, x B C, steps."""
    weight, bias = _convolution(found.conv1d)
    heads, value, state = found.num_heads, found.head_dim, found.ssm_state_size
    inner, channels = heads * value, weight.shape[1]
    how = Recurrence(
        index,
        RecurrentSize(channels, weight.shape[0], heads, state, value),
        weight,
        bias,
        activated=_silu(found),
        key_heads=found.n_groups,
        values_first=True,
        straight=_floats(found.D),
        **_gated_norm(getattr(found, "norm", None), inner),
        limits=(float(found.time_step_limit[0]), float(found.time_step_limit[1])),
        **_steps(found),
    )
    gate, rest, steps = torch.arange(inner + channels + heads).split([inner, channels, heads])
    return how, [rest, gate, steps]


def _mamba1(found: Any, index: int) -> _Read:
    """Mamba-1: x, gates; each channel has a state."""
    weight, bias = _convolution(found.conv1d)
    taps, channels = weight.shape
    how = Recurrence(
        index,
        RecurrentSize(channels, taps, channels, found.ssm_state_size, 1, selective=True),
        weight,
        bias,
        activated=_silu(found),
        finish="times SiLU of gate",
        key_heads=channels,
        decay=-_floats(found.A_log).exp(),
        straight=_floats(found.D),
    )
    return how, []


def _gated_norm(found: Any, inner: int) -> dict[str, Any]:
    """Of Mamba-2: the gate, then a norm of all or of groups, the other way round, or no norm."""
    weight = getattr(found, "weight", None)
    if weight is None:
        return {"finish": "times SiLU of gate"}
    groups = getattr(found, "n_groups", 1)
    return {
        "finish": "norm, then gate"
        if getattr(found, "norm_before_gate", False)
        else "gate, then norm",
        "norm": _floats(weight),
        "norm_size": getattr(found, "group_size", inner // groups),
        "eps": found.variance_epsilon,
    }


_KINDS = {
    "short convolution": _short,
    "delta rule": _delta,
    "delta rule, by heads": _delta_by_head,
    "mamba-1": _mamba1,
    "mamba-2": _mamba2,
}


def _silu(found: Any) -> bool:
    """True: nothing else stands behind a convolution before states."""
    if found.activation not in ("silu", "swish"):
        raise UnsupportedModel(
            f"activation {found.activation!r} behind a recurrent layer's convolution is not "
            "supported; known: silu"
        )
    return True


def _convolution(found: Any) -> tuple[Tensor, Tensor | None]:
    """(channels, 1, taps) -> (taps, channels), and the bias."""
    return _floats(found.weight[:, 0].T), None if found.bias is None else _floats(found.bias)


def _steps(found: Any) -> dict[str, Any]:
    return {"decay": -_floats(found.A_log).exp(), "shift": _floats(found.dt_bias)}


def _floats(weight: Tensor) -> Tensor:
    """A copy: a view of a weight would keep the whole file mapped."""
    return weight.detach().to(torch.float32, copy=True).contiguous()
