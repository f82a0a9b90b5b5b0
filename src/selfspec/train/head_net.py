"""The draft head as it is trained: over several drafts in a row, each fed with the head's own outputs.

Every token t of the answers is a root from which K tokens are drafted at once. Draft 1 reads entry [e(t+1); h(t)] and attends to the
entries of all tokens up to t; draft k reads [e(t+k); a(k-1)] and also attends to the drafts before it *from the same root*, which is
what it will see when it drafts (EAGLE-3, arXiv 2503.01840, section 3.2, "training-time test"). Loss of draft k: cross entropy to the
model's own distribution p at token t + k, of which the likeliest tokens are known; what of p lies outside the head's
vocabulary is left out, so tokens that it cannot say weigh little instead of teaching nonsense. Does not know data or optimizers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..model.families import Shape
from ..model.parts import module, part
from ..model.small import BlockSize, Rotary, SmallBlock, unit


class Ends:
    """What the head borrows from the frozen model: embeddings, last norm, some rows of the head."""

    def __init__(self, network: Any, family: Any, shape: Shape, vocabulary: Tensor) -> None:
        self._embedding = part(network, family.embedding).weight.detach()
        self._norm = module(network, family.final_norm)
        head = part(network, family.head)
        self._rows = head.weight.detach()[vocabulary].clone()
        self._bias = None if head.bias is None else head.bias.detach()[vocabulary].clone()
        self._scales = shape.scales
        self.vocabulary = vocabulary
        self.index = torch.full((shape.vocabulary,), -1, device=vocabulary.device)
        self.index[vocabulary] = torch.arange(len(vocabulary), device=vocabulary.device)

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings brought to length one a number, which takes out any scale."""
        return unit(self._embedding[tokens].float())

    def logits(self, x: Tensor) -> Tensor:
        """Of the head's own vocabulary."""
        found = F.linear(self._norm(x), self._rows, self._bias) * self._scales.logits
        return self._scales.logit_cap * torch.tanh(found / self._scales.logit_cap) if self._scales.logit_cap else found


@dataclass(frozen=True)
class Roots:
    """Where drafts begin: row and token of each."""

    rows: Tensor
    tokens: Tensor

    def take(self, x: Tensor, ahead: int = 0) -> Tensor:
        """x (n, tokens, ...) at the roots, or so many tokens later (at the end: at the last)."""
        return x[self.rows, (self.tokens + ahead).clamp(max=x.shape[1] - 1)]

    def spread(self, values: Tensor, like: Tensor) -> Tensor:
        """Values of the roots, put where they belong; 0 elsewhere."""
        return values.new_zeros(*like.shape[:2], *values.shape[1:]).index_put((self.rows, self.tokens), values)


@dataclass(frozen=True)
class Drafted:
    """What came of one draft from every root: summed losses by depth, how many there were, and how many drafts were right
    among those whose predecessors were."""

    losses: Tensor  # (K,)
    counts: Tensor
    tried: Tensor
    right: Tensor


class HeadNet(nn.Module):
    """The trainable weights: `enter` reads a token with the taps, `again` the head's own output, then one block."""

    def __init__(self, size: BlockSize, taps: int, context: int) -> None:
        super().__init__()
        self.size = size
        self.enter = nn.Linear((1 + taps) * size.width, size.width, bias=False)
        self.again = nn.Linear(size.width, size.width, bias=False)
        self.blocks = nn.ModuleList([SmallBlock(size)])
        cosine, sine = Rotary(size)(torch.empty(0), torch.arange(context)[None])
        self.register_buffer("_cosine", cosine[0], persistent=False)
        self.register_buffer("_sine", sine[0], persistent=False)

    def forward(self, ends: Ends, batch: dict[str, Tensor], roots: Roots, ahead: int, measure: bool = False) -> Drafted:
        """Draft `ahead` tokens from the roots of a batch."""
        tokens, states = batch["tokens"].long(), batch["states"]
        following = ends.embed(torch.cat([tokens[:, 1:], tokens[:, -1:]], dim=1))
        entered = self.enter(torch.cat([following, states.flatten(2)], dim=2))
        keys, values = self._keys(entered, torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape))
        known = [(keys, values)]
        x, results, alive = roots.take(entered), [], None
        for depth in range(1, ahead + 1):
            if depth > 1:
                embedded = roots.take(following, depth - 1)
                x = F.linear(embedded, self.enter.weight[:, : self.size.width]) + self.again(unit(x))
                k, v = self._keys(x, roots.tokens + depth - 1)
                known.append((roots.spread(k, tokens), roots.spread(v, tokens)))
            x = self._block(x, roots, depth, known, tokens)
            result, alive = self._score(ends.logits(x), ends, batch, roots, depth, alive, measure)
            results.append(result)
        return Drafted(*(torch.stack(each) for each in zip(*results, strict=True)))

    def _keys(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(..., width) -> keys and values, (..., heads, size)."""
        block = self.blocks[0]
        x = block.input_layernorm(x)
        shape = (*x.shape[:-1], self.size.kv_heads, self.size.head_size)
        return self._turned(block.self_attn.k_proj(x).view(shape), positions), block.self_attn.v_proj(x).view(shape)

    def _turned(self, x: Tensor, positions: Tensor) -> Tensor:
        cosine, sine = self._cosine[positions][..., None, :], self._sine[positions][..., None, :]
        a, b = x.chunk(2, dim=-1)
        return (x * cosine + torch.cat([-b, a], dim=-1) * sine).to(x.dtype)

    def _block(self, x: Tensor, roots: Roots, depth: int, known: list[tuple[Tensor, Tensor]], tokens: Tensor) -> Tensor:
        """One entry of every root through the block."""
        block = self.blocks[0]
        q = block.self_attn.q_proj(block.input_layernorm(x)).view(len(x), self.size.heads, self.size.head_size)
        q = roots.spread(self._turned(q, roots.tokens + depth - 1), tokens)
        x = x + block.self_attn.o_proj(roots.take(attend(q, known)).flatten(1))
        y = block.post_attention_layernorm(x)
        return x + block.mlp.down_proj(F.silu(block.mlp.gate_proj(y)) * block.mlp.up_proj(y))

    def _score(
        self, logits: Tensor, ends: Ends, batch: dict[str, Tensor], roots: Roots, depth: int, alive: Tensor | None, measure: bool
    ) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Tensor | None]:
        """Loss and, if asked for, hits of one depth. The target of depth k is what the model says at token t + k."""
        beyond = roots.tokens + depth >= batch["tokens"].shape[1]
        chances = roots.take(batch["chances"], depth).float().masked_fill(beyond[:, None], 0)
        counted = chances.sum(-1) > 0
        index = ends.index[roots.take(batch["ids"], depth).long()]
        chances = chances * (index >= 0)
        wide = logits.float()
        expected = (chances * wide.gather(1, index.clamp(min=0))).sum(-1)
        loss = (chances.sum(-1) * wide.logsumexp(-1) - expected).sum()
        tried = right = torch.zeros((), device=loss.device)
        if measure:
            alive = counted if alive is None else alive & counted
            hits = alive & (ends.vocabulary[wide.argmax(-1)] == roots.take(batch["tokens"], depth + 1))
            tried, right, alive = alive.sum(), hits.sum(), hits
        return (loss, counted.sum(), tried, right), alive


def attend(q: Tensor, known: list[tuple[Tensor, Tensor]]) -> Tensor:
    """q (n, tokens, heads, size) of one depth; keys and values of depth 1, seen causally, then of each later depth, of which a root
    sees its own."""
    (keys, values), own = known[0], known[1:]
    rows, tokens, heads, size = q.shape
    if not own:
        found = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, keys, values)), is_causal=True, enable_gqa=True)
        return found.transpose(1, 2)
    grouped = q.view(rows, tokens, keys.shape[2], -1, size)
    scores = torch.einsum("ntkgd,nskd->nkgts", grouped, keys)
    future = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).triu(1)
    scores = scores.masked_fill(future, -torch.inf)
    beside = [torch.einsum("ntkgd,ntkd->nkgt", grouped, k)[..., None] for k, _ in own]
    weights = (torch.cat([scores, *beside], dim=-1) * size**-0.5).softmax(-1).to(values.dtype)
    out = torch.einsum("nkgts,nskd->ntkgd", weights[..., :tokens], values)
    for index, (_, v) in enumerate(own):
        out = out + torch.einsum("nkgt,ntkd->ntkgd", weights[..., tokens + index], v)
    return out.reshape(rows, tokens, heads, size)


def roots_of(batch: dict[str, Tensor], share: float = 1.0, generator: torch.Generator | None = None) -> Roots:
    """Every token after which the model's choice is drafted for: those before an answered one; or a random share of them."""
    answered = batch["chances"].sum(-1) > 0
    begins = torch.cat([answered[:, 1:], torch.zeros_like(answered[:, :1])], dim=1)
    if share < 1:
        begins = begins & (torch.rand(begins.shape, generator=generator) < share).to(begins.device)
    rows, tokens = begins.nonzero(as_tuple=True)
    return Roots(rows, tokens)
