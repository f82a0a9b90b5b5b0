"""Small decoder blocks for trained parts: Llama's block, with the numbers that the part names.

`small_block` makes the weights, which `train/` trains. Its class is Mistral's of transformers: the
same block, but its heads may have any size. `Stack` runs such blocks with the operations of the
model room, on a cache of their own. All bases have the same block, whatever theirs looks like.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..model.block import Block, own_block
from ..model.compute.cache import KVCache, TokenLayout
from ..model.compute.call import Call
from ..model.compute.cpu.fused import Entry
from ..model.compute.cpu.linear import PackedLinear
from ..model.compute.linear import Linear
from ..model.compute.norms import Norm
from ..model.compute.ops import Ops
from ..model.compute.plan import LayerPlan
from ..model.compute.rope import RopeTable
from ..model.families import FAMILIES
from ..model.family import Scales, Shape
from ..model.layered import LayeredModel
from ..model.operations import for_guesses
from ..model.passes import Passes, WholePass

EPS = 1e-5


@dataclass(frozen=True)
class BlockSize:
    """The numbers of a small block."""

    width: int
    heads: int
    kv_heads: int
    head_size: int
    inner: int
    theta: float = 10_000.0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Rotary(nn.Module):
    """Angles by position, as transformers' rotary modules give them: cosine and sine, (1,
    positions, head size)."""

    def __init__(self, size: BlockSize) -> None:
        super().__init__()
        self._powers = torch.arange(0, size.head_size, 2, dtype=torch.float64) / size.head_size
        self._theta = size.theta

    def forward(self, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        frequencies = (self._theta**-self._powers).to(positions.device)
        angles = positions[..., None].double() * frequencies
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def small_block(size: BlockSize) -> Any:
    """The weights of one block. How they are run is `Stack`'s business, or the trainer's."""
    # takes a second, and only those who have a part need it
    from transformers import MistralConfig
    from transformers.models.mistral.modeling_mistral import MistralDecoderLayer

    config = MistralConfig(
        hidden_size=size.width,
        intermediate_size=size.inner,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_size,
        rms_norm_eps=EPS,
    )
    return MistralDecoderLayer(config, 0)


class Guessed(NamedTuple):
    """What follows some tokens: what comes out for them, (tokens, width), its logits, and where the
    best logit of each is."""

    states: Tensor
    logits: Tensor
    best: Sequence[int]


Guessing = Callable[[Sequence[int], Tensor, KVCache, TokenLayout], Guessed]
"""(tokens, what came out before each, cache, layout) -> what follows."""


class Stack:
    """Some blocks, one after the other, ready to run."""

    def __init__(
        self, size: BlockSize, tensors: Mapping[str, Tensor], count: int, model: LayeredModel
    ) -> None:
        """`tensors`: a part's, those of the blocks named blocks.0..., and so on."""
        shape = Shape(
            family="llama",
            layers=count,
            width=size.width,
            heads=size.heads,
            kv_heads=size.kv_heads,
            head_size=size.head_size,
            vocabulary=model.shape.vocabulary,
            context=model.shape.context,
            activation="silu",
            windows=(None,) * count,
            ropes=("",) * count,
            scales=Scales(),
            parallel=False,
        )
        device, dtype = self._place = model.device, model.dtype
        self.ops: Ops = for_guesses(model.ops, dtype, device)
        self._size, family = size, FAMILIES["llama"]
        self._rope = rope = RopeTable(Rotary(size), shape.context, device)
        self.blocks: list[Block] = []
        for index in range(count):
            with torch.device("meta"):
                block = small_block(size)
            own = {name: tensors[f"blocks.{index}.{name}"].float() for name in block.state_dict()}
            block.load_state_dict(own, assign=True)
            block.requires_grad_(False).to(device, dtype)
            self.blocks.append(own_block(block, index, family, shape, self.ops, rope))
        self._passes, self._plan = Passes(self.blocks), LayerPlan(0, count)
        self._ones = Norm(torch.ones(size.width, dtype=dtype, device=device), EPS)

    def new_cache(self, rows: int, capacity: int) -> KVCache:
        """A cache of these blocks' own."""
        (device, dtype), size = self._place, self._size
        shape = (len(self.blocks), rows, size.kv_heads, size.head_size)
        return KVCache(shape, capacity, dtype, device)

    def unit(self, x: Tensor) -> Tensor:
        """(tokens, width), RMS-normalised."""
        return self.ops.norm(x.contiguous(), self._ones)

    def guessing(
        self, model: LayeredModel, head: Linear, embedded: Linear, before: Linear
    ) -> Guessing | None:
        """From guesses to what follows them in one call, through these products; None where our
        kernels cannot."""
        if not isinstance(embedded, PackedLinear) or not isinstance(before, PackedLinear):
            return None
        if model.ends is None:
            return None
        entry = Entry(embedded, before, self._ones)
        at_once = self._passes.at_once(*model.ends, head, entry)
        return at_once and partial(self._guess, at_once)

    def _guess(
        self,
        at_once: WholePass,
        tokens: Sequence[int],
        own: Tensor,
        cache: KVCache,
        layout: TokenLayout,
    ) -> Guessed:
        self._reserve_angles(layout)
        x, logits, best, _ = at_once(tokens, self._plan, cache, layout, 1, None, (), own)
        cache.advance(layout, self._plan.attention_layers)
        return Guessed(x, logits, [ranked[0] for ranked in best])

    def _reserve_angles(self, layout: TokenLayout) -> None:
        self._rope.reserve(max(span.first + span.count for span in layout.spans))

    @torch.inference_mode()
    def run(self, x: Tensor, cache: KVCache, layout: TokenLayout) -> Tensor:
        """(tokens, width) through all blocks."""
        self._reserve_angles(layout)
        x, *_ = self._passes.run(x, Call(self._plan, cache, layout.on(self._place[0])))
        cache.advance(layout, self._plan.attention_layers)
        return x


def unit(x: Tensor) -> Tensor:
    """x / rms(x), in float32. What `Stack.unit` computes."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)
