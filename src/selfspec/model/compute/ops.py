"""The operations of a decoder block behind one set of names, and torch's version of them.

Ours (cpu/operations.py; float32 on a CPU): a token's bits are the same whatever is computed beside
it, by construction. `TorchOps`: every device and dtype, and CPUs without a compiler. With
`row_stable=True` it uses the forms of the torch operations that were seen to be row-stable on Intel
processors; the adapter measures whether they are here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .cache import KVCache, RowSpan, TokenLayout, rounded
from .grouped import Blocks, Matrix
from .linear import Linear, MklLinear, PlainLinear
from .memo import Memo
from .mixture import Mixture
from .norms import Norm
from .recurrence import Recurrence, by_torch
from .recurrent_cache import Memory, RecurrentCache, Stretch
from .rope import RopeTable
from .windows import Window

Kernel = Literal["native", "mkl", "plain", "static", "modules", "floor"]
ACTIVATIONS = {
    "silu": 0,
    "swish": 0,
    "gelu_pytorch_tanh": 1,
    "gelu_new": 1,
    "gelu": 2,
    "relu": 3,
    "relu2": 4,
    "clamped_swiglu": 5,
    "xielu": 6,
}
STEEPNESS, LIMIT = 1.702, 7.0  # of clamped_swiglu
_TORCH_ACTIVATIONS = (
    *(F.silu, partial(F.gelu, approximate="tanh"), F.gelu, F.relu),
    lambda x: F.relu(x).square(),
)


@dataclass(frozen=True)
class Temperature:
    """Queries at position p are multiplied by 1 + rate * log(1 + floor((p + first) / every))."""

    rate: float = 0.0
    every: int = 1
    first: int = 0

    def at(self, positions: Tensor) -> Tensor:
        steps = (positions + self.first) // self.every
        return 1 + self.rate * torch.log1p(steps.float())


@dataclass(frozen=True)
class Heads(Memo):
    """What attention needs to know beside its projections."""

    layer: int
    queries: int
    keys: int
    size: int
    scale: float
    window: Window | None = None
    cap: float = 0.0  # soft cap on scores; 0 is none
    clamp: float = 0.0  # of queries, keys and values; 0 is none
    sinks: Tensor | None = None
    """Of each query head a score that takes its share of the weights and gives nothing."""
    slopes: Tensor | None = None
    """Of each query head, by which scores fall with a key's distance (ALiBi)."""
    coarse: bool = False
    """They are of a key's position, in bfloat16, and scaled like scores (Falcon)."""
    temperature: Temperature = Temperature()
    rope: RopeTable | None = None  # None: nothing is rotated
    query_norm: Norm | None = None  # of each head, or of all queries together
    key_norm: Norm | None = None
    value_norm: Norm | None = None
    norms_behind: bool = False  # they come behind the rotation
    borrowed: bool = False  # there are queries only; another layer has filed keys and values

    @property
    def plain(self) -> bool:
        """Whether scores go into a softmax as they are, which is all that SDPA knows."""
        return not self.cap and self.sinks is None and self.slopes is None


class Ops(ABC):
    """The operations; `kernel` says who computes."""

    kernel: Kernel
    rounding: float = 0.0
    """How far rounded weights may move a model's logits, as a share of their norm."""
    weights: str | None = None
    """How products are stored: a kind of our kernels', or None: as torch does, in its dtype."""
    few_bits = False
    """Whether matrices in few bits are read as they are, not left to their modules."""

    @abstractmethod
    def linear(self, weights: Sequence[Matrix], biases: Sequence[Tensor | None]) -> Linear:
        """Weights that read the same input, as one product."""

    def table(self, blocks: Blocks) -> Tensor | Linear:
        """An embedding in few bits, whose rows are read."""
        return blocks.float()

    @property
    def of_head(self) -> Ops:
        """What the model's head is multiplied by, which may be stored more exactly."""
        return self

    @property
    def of_router(self) -> Ops:
        """What chooses experts, which is not rounded."""
        return self

    @abstractmethod
    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        """The norm over the last dimension."""

    @abstractmethod
    def gated(self, both: Tensor, activation: str) -> Tensor:
        """act(first half) * second half. Of "clamped_swiglu": x * sigmoid(STEEPNESS * x) * (y + 1),
        where x is at most LIMIT, and y between -LIMIT and LIMIT."""

    @abstractmethod
    def activated(self, x: Tensor, activation: str, curve: Tensor | None = None) -> Tensor:
        """act(x); x is used up. The curve of "xielu" is (a, b, c, e): a * x**2 + c * x above zero,
        b * (exp(min(x, e)) - 1 - x) + c * x below."""

    @abstractmethod
    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        """cap * tanh(x / cap); x is used up."""

    @abstractmethod
    def attention(self, qkv: Tensor, heads: Heads, cache: KVCache, layout: TokenLayout) -> Tensor:
        """Norms, clamps, rotates, files keys and values, attends: (tokens, (queries + 2 keys) *
        size) -> (tokens, queries * size)."""

    def file_keys(self, qkv: Tensor, heads: Heads, cache: KVCache, layout: TokenLayout) -> None:
        """The same where nobody asks for what comes out; qkv is used up."""
        self.attention(qkv, heads, cache, layout)

    def times_sigmoid(self, x: Tensor, gate: Tensor) -> Tensor:
        """x * sigmoid(gate), the gate as wide or of one number a row; x is used up."""
        return x * gate.sigmoid()

    def mixed(
        self,
        x: Tensor,
        mixture: Mixture,
        residual: Tensor | None = None,
        scored: Tensor | None = None,
    ) -> Tensor:
        """What a token's experts give, plus the residual. `scored`: what the router reads."""
        logits = mixture.router(x if scored is None else scored).float()
        of_experts = logits[:, : mixture.count]
        if mixture.margin:
            scores = of_experts
        elif mixture.sigmoid:  # torch's own depends on where among all rows a number lies
            scores = self.times_sigmoid(torch.ones_like(of_experts), of_experts)
        else:
            scores = of_experts.softmax(-1)
        weights, chosen = mixture.choose(scores)
        if mixture.narrow is not None:
            narrow = mixture.narrow(x)
            x, rest = narrow[:, : mixture.width].contiguous(), narrow[:, mixture.width :]
        out = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            tokens, rank = (chosen == expert).nonzero(as_tuple=True)
            share = weights.to(x.dtype)[tokens, rank, None]
            read = x[tokens] * share if mixture.of_inputs else x[tokens]
            y = self._of_expert(read, mixture, expert)
            out[tokens] += y if mixture.of_inputs else y * share
        if mixture.shared:
            y = self._of_expert(x, mixture, mixture.count)
            weigher = logits[:, mixture.count :].to(x.dtype)
            out += self.times_sigmoid(y, weigher) if mixture.weighed else y
        if mixture.narrow is not None:
            return self.widened(out, rest, mixture, residual)
        return out if residual is None else residual + out

    def widened(self, y: Tensor, rest: Tensor, mixture: Mixture, residual: Tensor | None) -> Tensor:
        """What a mixture gives. y: its experts' sum. `rest`: what the shared one activates."""
        assert mixture.widen is not None
        activate = self.gated if mixture.gated else self.activated
        shared = activate(rest.contiguous(), mixture.activation)
        return mixture.widen(torch.cat([y, shared], 1), residual)

    def _of_expert(self, x: Tensor, mixture: Mixture, expert: int) -> Tensor:
        activate = self.gated if mixture.gated else self.activated
        y = activate(mixture.into[expert](x), mixture.activation)
        return mixture.out[expert](y)

    def recurrence(
        self, y: Tensor, how: Recurrence, cache: RecurrentCache, layout: TokenLayout
    ) -> Tensor:
        """What a recurrent half's second product reads: (tokens, columns) -> (tokens, outputs)."""
        found = []
        for span, piece in layout.pieces:
            for stretch in cache.stretches(how.index, span.row, span.first, span.count):
                own, memory = None if stretch.again else y[piece], cache.memories[how.index]
                made = self.go_on(own, how, memory, span.row, stretch)
                if made is not None:
                    found.append(made)
        return found[0] if len(found) == 1 else torch.cat(found)

    def go_on(
        self, y: Tensor | None, how: Recurrence, memory: Memory, row: int, stretch: Stretch
    ) -> Tensor | None:
        """Some tokens of one row. Without `y` only their state is wanted."""
        (old, state), before = memory.go_on(row, stretch), how.size.taps - 1
        if old is not state:
            state.copy_(old)
        if y is None:
            before += stretch.end - stretch.first
        kept = memory.before(row, stretch.end if y is None else stretch.first, before)
        entries, out = by_torch(how, y, kept, state if how.size.heads else None, self.norm)
        if y is None:
            return None
        memory.keep(row, stretch.first, entries)
        assert out is not None
        return out.to(y.dtype)


class TorchOps(Ops):
    """torch's own operations."""

    def __init__(self, kernel: Kernel = "plain", row_stable: bool = False) -> None:
        self.kernel = kernel
        self._row_stable = row_stable

    def linear(self, weights: Sequence[Matrix], biases: Sequence[Tensor | None]) -> Linear:
        return (MklLinear if self.kernel == "mkl" else PlainLinear)(weights, biases)

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        wide = x.float()
        if norm.centred:
            wide = wide - wide.mean(-1, keepdim=True)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.eps)
        out = norm.weight * wide.to(norm.weight.dtype)
        return (out if norm.bias is None else out + norm.bias).to(x.dtype)

    def gated(self, both: Tensor, activation: str) -> Tensor:
        gate, up = both.chunk(2, dim=-1)
        if activation == "clamped_swiglu":
            gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
            return (up + 1) * gate * torch.sigmoid(STEEPNESS * gate)
        return self.activated(gate, activation) * up

    def activated(self, x: Tensor, activation: str, curve: Tensor | None = None) -> Tensor:
        if curve is not None:
            above, below, straight, most = curve
            bent = (torch.expm1(torch.minimum(x, most)) - x) * below
            curved: Tensor = torch.where(x > 0, above * x * x, bent) + straight * x
            return curved.to(x.dtype)
        return _TORCH_ACTIVATIONS[ACTIVATIONS[activation]](x)

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        return cap * torch.tanh(x / cap)

    def attention(self, qkv: Tensor, heads: Heads, cache: KVCache, layout: TokenLayout) -> Tensor:
        kept = 0 if heads.borrowed else heads.keys  # of (tokens, heads, size)
        q, k, v = qkv.view(len(qkv), -1, heads.size).split([heads.queries, kept, kept], dim=1)
        q, k, v = self._normed(q, k, v, heads)
        if heads.rope:
            cosine = heads.rope.cosines[layout.positions][:, None]
            sine = heads.rope.sines[layout.positions][:, None]
            q, k = _rotated(q, cosine, sine), _rotated(k, cosine, sine)
        q, k = self._turned(q, k, heads, layout)
        if not heads.borrowed:
            for room, entries in zip(cache.of_layer(heads.layer), (k, v), strict=True):
                room[layout.rows, :, layout.slots] = entries
        rows = [self._attend_row(q, heads, cache, layout, *each) for each in layout.pieces]
        return torch.cat(rows).reshape(len(qkv), -1)

    def _normed(
        self, q: Tensor, k: Tensor, v: Tensor, heads: Heads
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What happens to queries, keys and values before anything is rotated."""
        v = self._norm_groups(v, heads.value_norm)
        if not heads.norms_behind:
            q, k = self._norm_groups(q, heads.query_norm), self._norm_groups(k, heads.key_norm)
        if not heads.clamp:
            return q, k, v
        low, high = -heads.clamp, heads.clamp
        return q.clamp(low, high), k.clamp(low, high), v.clamp(low, high)

    def _turned(
        self, q: Tensor, k: Tensor, heads: Heads, layout: TokenLayout
    ) -> tuple[Tensor, Tensor]:
        """What happens to queries and keys behind the rotation."""
        if heads.norms_behind:
            q, k = self._norm_groups(q, heads.query_norm), self._norm_groups(k, heads.key_norm)
        if heads.temperature.rate:
            q = q * heads.temperature.at(layout.positions)[:, None, None].to(q.dtype)
        return q, k

    def _norm_groups(self, x: Tensor, norm: Norm | None) -> Tensor:
        if norm is None or not x.numel():
            return x
        return self.norm(x.reshape(len(x), -1, norm.size), norm).view(x.shape)

    def _attend_row(
        self,
        q: Tensor,
        heads: Heads,
        cache: KVCache,
        layout: TokenLayout,
        span: RowSpan,
        piece: slice,
    ) -> Tensor:
        """One row's queries. Row-stable: each is a batch row over stride-0 keys, the groups are
        SDPA's queries, the key length is a multiple of the cache's chunk. Otherwise the row's
        queries are attended together."""
        length = min(rounded(span.first + span.count), cache.keys.shape[3])
        mask = layout.once(
            (piece.start, heads.window, length),
            lambda: visible_mask(layout, piece, heads.window, length),
        )
        k, v = (room[span.row, :, :length] for room in cache.of_layer(heads.layer))
        tokens, group = span.count, heads.queries // heads.keys
        queries = q[piece].view(tokens, heads.keys, group, heads.size)
        if self._row_stable and heads.plain:
            k, v = k.expand(tokens, -1, -1, -1), v.expand(tokens, -1, -1, -1)
            return F.scaled_dot_product_attention(
                queries, k, v, mask[:, None, None], scale=heads.scale
            )
        queries = queries.permute(1, 2, 0, 3).reshape(1, heads.keys, -1, heads.size)
        k, v, mask = k[None], v[None], mask.repeat(group, 1)
        if heads.plain:
            out = F.scaled_dot_product_attention(queries, k, v, mask, scale=heads.scale)
        else:
            hidden = torch.zeros_like(mask, dtype=torch.float32).masked_fill_(~mask, -torch.inf)
            scores = queries @ k.transpose(-1, -2) * heads.scale
            places = _places(layout, piece, length)[None, None]
            own = layout.positions[None, piece, None]
            out = self._weights(scores, heads, hidden, places, own).to(v.dtype) @ v
        return out.view(heads.keys, group, tokens, heads.size).permute(2, 0, 1, 3)

    def _weights(
        self, scores: Tensor, heads: Heads, mask: Tensor, places: Tensor, own: Tensor
    ) -> Tensor:
        """Scores, (rows, key heads, group * tokens, slots), as weights, with all that SDPA does not
        know. The mask is added. `places`: the position of each slot, (rows, 1, slots), and `own`
        that of each token, (rows, tokens, 1)."""
        if heads.cap:
            scores = self.soft_cap(scores, heads.cap)
        scores, by_head = scores.float(), (1, heads.keys, heads.queries // heads.keys, 1, 1)
        if heads.slopes is not None:
            slopes = heads.slopes.view(by_head)
            if heads.coarse:
                rough = slopes.bfloat16() * places.bfloat16()[:, None, None]
                biases = (rough.float() * heads.scale).expand(-1, -1, -1, own.shape[1], -1)
            else:
                biases = slopes * (places - own)[:, None, None]
            scores = scores + biases.flatten(2, 3)
        scores = scores + mask
        if heads.sinks is None:
            return scores.softmax(-1)
        tokens = scores.shape[2] // by_head[2]
        sinks = heads.sinks.view(by_head).expand(len(scores), -1, -1, tokens, -1).flatten(2, 3)
        return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]


def _places(layout: TokenLayout, piece: slice, length: int) -> Tensor:
    """The position of each of so many slots."""
    places = torch.arange(length, device=layout.positions.device)
    places[layout.slots[piece]] = layout.positions[piece]  # in a tree a slot is not its position
    return places


def _rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """The first `rotary` numbers of each head turned by the token's angles; half-split pairs."""
    half = cosine.shape[-1]
    a, b, rest = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :]
    turned = torch.cat([a * cosine - b * sine, b * cosine + a * sine], dim=-1).to(x.dtype)
    return torch.cat([turned, rest], dim=-1) if rest.shape[-1] else turned


def visible_mask(layout: TokenLayout, piece: slice, window: Window | None, capacity: int) -> Tensor:
    """(tokens, capacity) boolean: which slots each token of the piece may look at."""
    visible = layout.visible(window)
    slots = torch.arange(capacity, device=visible.starts.device)
    seen = (slots >= visible.starts[piece, None]) & (slots < visible.stops[piece, None])
    if visible.extras is not None and visible.first_extra is not None:
        bounds = visible.first_extra[piece.start : piece.stop + 1]
        tokens = torch.arange(len(bounds) - 1).repeat_interleave(bounds.diff())
        seen[
            tokens.to(seen.device), visible.extras[int(bounds[0]) : int(bounds[-1])].to(seen.device)
        ] = True
    return seen
