"""A recurrent half of a layer as a value: a short convolution, and behind it a state that goes on
token by token (gated delta rule, Mamba-2), or nothing. And how torch computes it.

With u_t what enters, c_t = act(bias + sum_l w_l u_(t-taps+1+l)); c holds q, k and v of each head.

    S = decay_t S;  d = rate_t (v - S'k) with the delta rule, else rate_t v;  S += k d';  o = S'q

decay_t = exp(-exp(A) softplus(a_t + shift)); rate_t = sigmoid(b_t), perhaps doubled, with the delta
rule, else the softplus itself. selective.py has the equations of Mamba-1. A token's numbers come
from its own column and the one before it, in a fixed order, so its bits do not depend on how a text
is cut into calls. Knows neither layers nor what is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .memo import Memo
from .norms import Norm
from .selective import Selective, step_of, through_channels

Finish = Literal["times gate", "norm, then gate", "gate, then norm", "times SiLU of gate"]


@dataclass(frozen=True)
class RecurrentSize:
    """How much a recurrent layer keeps of a row."""

    channels: int
    """Of the convolution."""
    taps: int
    """Tokens that it sees, the own one included."""
    heads: int = 0
    """States; 0: there is a convolution only."""
    key: int = 0
    value: int = 0
    selective: bool = False
    """A head is a channel, with a step of its own."""

    @property
    def entry(self) -> int:
        """Numbers that are kept of what entered at one token: u, and each head's decay and rate, or
        its step and the key."""
        return self.channels + self.heads + (self.key if self.selective else self.heads)


@dataclass(frozen=True, eq=False)
class Recurrence(Memo):
    """One layer's. What the product before it gives are the columns u, then another factor of u if
    `twice`, the gate, a of each head, and b of each head with the delta rule."""

    index: int
    """Which of the recurrent layers it is."""
    size: RecurrentSize
    weight: Tensor
    """(taps, channels)"""
    bias: Tensor | None = None
    activated: bool = False
    """SiLU behind the convolution."""
    twice: bool = False
    finish: Finish = "times gate"
    key_heads: int = 0
    """Heads of q and k, each shared by as many states."""
    values_first: bool = False
    """c is v, k, q and not q, k, v."""
    delta: bool = False
    """The delta rule, with q and k of length one."""
    selective: Selective | None = None
    """The products of one that is (Mamba-1)."""
    decay: Tensor | None = None
    """-exp(A), (heads,), or with a number for each of a key, (heads, key)."""
    shift: Tensor | None = None
    straight: Tensor | None = None
    """So much of v is added to o, (heads,)."""
    norm: Tensor | None = None
    """The weight, as wide as what is normed together or as all that comes out."""
    norm_size: int = 0
    eps: float = 0.0
    limits: tuple[float, float] = (0.0, float("inf"))
    """Of the rate. With the delta rule the second is what its sigmoid is multiplied with."""

    @property
    def outputs(self) -> int:
        return self.size.heads * self.size.value or self.size.channels

    @property
    def columns(self) -> int:
        """What it reads of a token."""
        gates = 0 if self.size.selective else self.size.heads * (2 if self.delta else 1)
        return self.size.channels * (2 if self.twice else 1) + self.outputs + gates


def entries(how: Recurrence, y: Tensor) -> tuple[Tensor, Tensor]:
    """Of the columns of some tokens: what is kept of each, (tokens, entry), and their gates."""
    channels, heads = how.size.channels, how.size.heads
    u, rest = y[:, :channels].float(), y[:, channels:].float()
    if how.twice:
        u, rest = u * rest[:, :channels], rest[:, channels:]
    gate, rest = rest[:, : how.outputs], rest[:, how.outputs :]
    if not heads:
        return u, gate
    assert how.decay is not None and how.shift is not None
    step = F.softplus(rest[:, :heads] + how.shift)
    if how.delta:
        rate = how.limits[1] * rest[:, heads:].sigmoid()
    else:
        rate = step = step.clamp(*how.limits)
    return torch.cat([u, (how.decay * step).exp(), rate], 1), gate


def convolved(how: Recurrence, kept: Tensor, tokens: int) -> Tensor:
    """c of the last `tokens` of the entries, (tokens, channels)."""
    size = how.size
    c = kept.new_zeros(tokens, size.channels) if how.bias is None else how.bias.expand(tokens, -1)
    for tap in range(size.taps):
        c = c + how.weight[tap] * kept[tap : tap + tokens, : size.channels]
    return F.silu(c) if how.activated else c


def through_states(how: Recurrence, c: Tensor, kept: Tensor, state: Tensor) -> Tensor:
    """o of every token, (tokens, heads, value). `state`, (heads, key, value), goes on with them."""
    size = how.size
    counts = [how.key_heads * size.key, how.key_heads * size.key, size.heads * size.value]
    if how.values_first:
        v, k, q = c.split(counts[::-1], 1)
    else:
        q, k, v = c.split(counts, 1)
    q, k = (each.reshape(len(c), how.key_heads, size.key) for each in (q, k))
    v = v.reshape(len(c), size.heads, size.value)
    if how.delta:
        q, k = (each * (each.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for each in (q, k))
        q = q * size.key**-0.5
    q, k = (each.repeat_interleave(size.heads // how.key_heads, 1) for each in (q, k))
    decay, rate = kept[:, size.channels :].split(size.heads, 1)
    out = torch.empty_like(v)
    for token in range(len(c)):
        state *= decay[token, :, None, None]
        new = v[token]
        if how.delta:
            new = new - (state * k[token, :, :, None]).sum(1)
        state += k[token, :, :, None] * (rate[token, :, None] * new)[:, None]
        out[token] = (state * q[token, :, :, None]).sum(1)
    return out if how.straight is None else out + how.straight[:, None] * v


def finished(how: Recurrence, out: Tensor, gate: Tensor) -> Tensor:
    """What the product behind it reads, (tokens, outputs)."""
    if how.finish == "times gate":
        return out * gate
    if how.finish == "times SiLU of gate":
        return out * F.silu(gate)
    assert how.norm is not None
    if how.finish == "gate, then norm":
        out = out * F.silu(gate)
    groups = out.view(len(out), -1, how.norm_size)
    normed = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + how.eps)
    weighed = (normed * how.norm.view(-1, how.norm_size)).view(out.shape)
    return weighed * F.silu(gate) if how.finish == "norm, then gate" else weighed


def by_torch(
    how: Recurrence,
    y: Tensor | None,
    before: Tensor,
    state: Tensor | None,
    norm: Callable[[Tensor, Norm], Tensor],
) -> tuple[Tensor, Tensor | None]:
    """The entries of some tokens, and what they give. `before`: entries of those before them, one
    fewer than taps. Without `y` the last entries are the tokens' own, and nothing is given."""
    if how.selective is not None:
        assert state is not None
        return _choosing(how, how.selective, y, before, state, norm)
    if y is None:
        kept, gate = before, None
    else:
        new, gate = entries(how, y)
        kept = torch.cat([before, new])
    tokens = len(kept) - how.size.taps + 1
    own, c = kept[len(kept) - tokens :], convolved(how, kept, tokens)
    out = c if state is None else through_states(how, c, own, state).reshape(tokens, -1)
    return own, None if gate is None else finished(how, out, gate)


def _choosing(
    how: Recurrence,
    selective: Selective,
    y: Tensor | None,
    before: Tensor,
    state: Tensor,
    norm: Callable[[Tensor, Norm], Tensor],
) -> tuple[Tensor, Tensor | None]:
    """The same of one that is selective."""
    channels, decay, states = how.size.channels, how.decay, state.view(how.size.heads, -1)
    assert decay is not None and how.straight is not None
    if y is None:
        tokens = len(before) - how.size.taps + 1
        own, x = before[len(before) - tokens :], convolved(how, before, tokens)
        steps, keys = own[:, channels:].split([how.size.heads, how.size.key], 1)
        through_channels(states, decay, x, steps, keys, None)
        return own, None
    u = y[:, :channels].float()
    x = convolved(how, torch.cat([before[:, :channels], u]), len(u))
    raw, keys, queries = selective.chosen(x.to(y.dtype), norm)
    steps, keys = step_of(raw), keys.float()
    out = through_channels(states, decay, x, steps, keys, queries.float())
    assert out is not None
    entries = torch.cat([u, steps, keys], 1)
    return entries, finished(how, out + how.straight * x, y[:, channels:].float())
