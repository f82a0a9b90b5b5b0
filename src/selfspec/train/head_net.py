"""The draft head as it is trained: over several drafts in a row, each fed with its own outputs.

Every token t of the answers is a root from which K tokens are drafted at once. Draft 1 reads entry
[e(t+1); h(t)] and attends to the entries of all tokens up to t. Draft k reads [e(t+k); a(k-1)] and
also attends to the drafts before it *from the same root*, which is what it will see when it drafts
(EAGLE-3, arXiv 2503.01840, section 3.2, "training-time test"). Loss of draft k: cross entropy to
the model's own distribution p at token t + k, of which the likeliest tokens are known. What of p
lies outside the head's vocabulary is left out, so tokens that it cannot say weigh little instead of
teaching nonsense. Does not know data or optimizers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import TrainingError
from ..model.family import Shape
from ..model.weights import linear_weights, module, table
from ..trained.blocks import BlockSize, Rotary, small_block, unit
from .candidates import Candidates, candidates

Batch = dict[str, Tensor]  # what `States.batch` returns


class Ends:
    """What the head borrows from the frozen model: embeddings, last norm, some rows of the head."""

    def __init__(self, network: Any, family: Any, shape: Shape, vocabulary: Tensor) -> None:
        embedding = table(network, family.embedding)
        self._norm = module(network, family.final_norm)
        head = linear_weights(network, family.head)
        if not (isinstance(head.weight, Tensor) and isinstance(embedding, Tensor)):
            raise TrainingError(
                "the model's head is quantised, so its rows cannot be read; train on the original"
            )
        self._embedding = embedding.detach()
        self._rows = head.weight.detach()[vocabulary].clone()
        self._bias = None if head.bias is None else head.bias.detach()[vocabulary].clone()
        self._scales = shape.scales
        self.vocabulary = vocabulary
        self.index = torch.full((shape.vocabulary,), -1, device=vocabulary.device)
        self.index[vocabulary] = torch.arange(len(vocabulary), device=vocabulary.device)

    def candidates(
        self, batch: Batch, others: int, generator: torch.Generator
    ) -> Candidates | None:
        """The tokens likely somewhere in the batch, and `others` more; None if nearly all."""
        needed = self.index[batch["ids"][batch["chances"] > 0.001].long()].unique()
        needed = needed[needed >= 0]
        return candidates(needed, len(self.vocabulary), others, generator)

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings, RMS-normalised, which takes out any scale."""
        return unit(self._embedding[tokens].float())

    def logits(self, x: Tensor, some: Tensor | None = None) -> Tensor:
        """Of the part's own vocabulary, or of some tokens of it."""
        rows, bias, scales = self._rows, self._bias, self._scales
        if some is not None:
            rows, bias = rows[some], None if bias is None else bias[some]
        logits = F.linear(self._norm(x), rows, bias) * scales.logits
        cap = scales.logit_cap
        return cap * torch.tanh(logits / cap) if cap else logits


@dataclass(frozen=True)
class Roots:
    """Where drafts begin: row and token of each."""

    rows: Tensor
    tokens: Tensor

    @classmethod
    def at(cls, places: Tensor) -> Roots:
        """Those of a mask, (n, tokens)."""
        return cls(*places.nonzero(as_tuple=True))

    def take(self, x: Tensor, ahead: int = 0) -> Tensor:
        """x (n, tokens, ...) at the roots, or `ahead` tokens later (at the end: at the last)."""
        return x[self.rows, (self.tokens + ahead).clamp(max=x.shape[1] - 1)]

    def spread(self, values: Tensor, like: Tensor) -> Tensor:
        """Values of the roots, put where they belong; 0 elsewhere."""
        zeros = values.new_zeros(*like.shape[:2], *values.shape[1:])
        return zeros.index_put((self.rows, self.tokens), values)


@dataclass(frozen=True)
class Drafted:
    """What came of one draft from every root, by depth, (K,)."""

    losses: Tensor  # their sums
    counts: Tensor
    tried: Tensor  # drafts whose predecessors were right
    right: Tensor  # of those, the right ones


class BlockNet(nn.Module):
    """Some small blocks that can be trained. Subclasses say what they read."""

    def __init__(self, size: BlockSize, count: int, context: int) -> None:
        super().__init__()
        self.size = size
        self.blocks: Any = nn.ModuleList([small_block(size) for _ in range(count)])
        self._cosine: Tensor
        self._sine: Tensor
        cosine, sine = Rotary(size)(torch.empty(0), torch.arange(context)[None])
        self.register_buffer("_cosine", cosine[0], persistent=False)
        self.register_buffer("_sine", sine[0], persistent=False)

    def keys(self, block: Any, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(..., width) -> keys and values, (..., heads, size)."""
        x = block.input_layernorm(x)
        shape = (*x.shape[:-1], self.size.kv_heads, self.size.head_size)
        keys = self._turned(block.self_attn.k_proj(x).view(shape), positions)
        return keys, block.self_attn.v_proj(x).view(shape)

    def through(
        self,
        block: Any,
        x: Tensor,
        roots: Roots,
        depth: int,
        entries: list[tuple[Tensor, Tensor]],
        tokens: Tensor,
    ) -> Tensor:
        """One entry of every root, (roots, width), through the block."""
        shape = (len(x), self.size.heads, self.size.head_size)
        q = block.self_attn.q_proj(block.input_layernorm(x)).view(shape)
        q = roots.spread(self._turned(q, roots.tokens + depth - 1), tokens)
        x = x + block.self_attn.o_proj(roots.take(attend(q, entries)).flatten(1))
        y = block.post_attention_layernorm(x)
        out: Tensor = x + block.mlp.down_proj(F.silu(block.mlp.gate_proj(y)) * block.mlp.up_proj(y))
        return out

    def _turned(self, x: Tensor, positions: Tensor) -> Tensor:
        cosine, sine = (table[positions][..., None, :] for table in (self._cosine, self._sine))
        a, b = x.chunk(2, dim=-1)
        return (x * cosine + torch.cat([-b, a], dim=-1) * sine).to(x.dtype)


class HeadNet(BlockNet):
    """`enter` reads a token with the states, `again` the head's own output. Then one block."""

    def __init__(self, size: BlockSize, layers: int, context: int) -> None:
        super().__init__(size, 1, context)
        self.enter = nn.Linear((1 + layers) * size.width, size.width, bias=False)
        self.again = nn.Linear(size.width, size.width, bias=False)

    def forward(
        self,
        ends: Ends,
        batch: Batch,
        roots: Roots,
        ahead: int,
        candidates: Candidates | None = None,
        measure: bool = False,
    ) -> Drafted:
        """Draft `ahead` tokens from each root. With candidates the loss is taken over these."""
        tokens, states, block = batch["tokens"].long(), batch["states"], self.blocks[0]
        following = ends.embed(torch.cat([tokens[:, 1:], tokens[:, -1:]], dim=1))
        entered = self.enter(torch.cat([following, states.flatten(2)], dim=2))
        entries = [self.keys(block, entered, positions_of(tokens))]
        x, results, alive = roots.take(entered), [], None
        for depth in range(1, ahead + 1):
            if depth > 1:
                embedded, reading = roots.take(following, depth - 1), self.enter.weight
                embedded = F.linear(embedded, reading[:, : self.size.width])
                x = embedded + self.again(unit(x))
                k, v = self.keys(block, x, roots.tokens + depth - 1)
                entries.append((roots.spread(k, tokens), roots.spread(v, tokens)))
            x = self.through(block, x, roots, depth, entries, tokens)
            losses, counted, wide = losses_of(x, ends, batch, roots, depth, candidates)
            alive = counted if alive is None else alive & counted
            tried, hits = alive.sum(), torch.zeros_like(alive)
            if measure:
                right = ends.vocabulary[wide.argmax(-1)] == roots.take(batch["tokens"], depth + 1)
                hits = alive & right
                alive = hits
            results.append((losses.sum(), counted.sum(), tried, hits.sum()))
        return Drafted(*(torch.stack(values) for values in zip(*results, strict=True)))


def losses_of(
    x: Tensor, ends: Ends, batch: Batch, roots: Roots, depth: int, candidates: Candidates | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Of each root: the loss against p(t + depth), whether it counts, and the logits."""
    beyond = roots.tokens + depth >= batch["tokens"].shape[1]
    chances = roots.take(batch["chances"], depth).float().masked_fill(beyond[:, None], 0)
    counted = chances.sum(-1) > 0
    index = ends.index[roots.take(batch["ids"], depth).long()]
    known = index >= 0
    wide = ends.logits(x, None if candidates is None else candidates.some).float()
    normaliser = wide
    if candidates is not None:
        index = candidates.index[index]  # of -1, which is left out anyway, the last one's
        known &= index >= 0
        normaliser = wide + candidates.counted
    chances = chances * known
    expected = (chances * wide.gather(1, index.clamp(min=0))).sum(-1)
    return chances.sum(-1) * normaliser.logsumexp(-1) - expected, counted, wide


def attend(q: Tensor, entries: list[tuple[Tensor, Tensor]]) -> Tensor:
    """q (n, tokens, heads, size) of one depth on the entries: keys and values of depth 1, seen
    causally, then of each later depth, of which a root sees its own."""
    (keys, values), own = entries[0], entries[1:]
    rows, tokens, heads, size = q.shape
    if not own:
        q, keys, values = (x.transpose(1, 2) for x in (q, keys, values))
        out = F.scaled_dot_product_attention(q, keys, values, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2)
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


def positions_of(tokens: Tensor) -> Tensor:
    """(n, tokens): 0, 1, 2 ... in every row."""
    return torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)


def begins(batch: Batch) -> Tensor:
    """(n, tokens): whether a draft begins after a token, as the next one is answered."""
    answered = batch["chances"].sum(-1) > 0
    return torch.cat([answered[:, 1:], torch.zeros_like(answered[:, :1])], dim=1)
