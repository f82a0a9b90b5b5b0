"""Small decoder blocks for trained parts: Llama's block, with the numbers that the part names.

`SmallBlock` holds the weights, with Llama's names, and is what is trained (train/). `Stack` runs
such blocks with the operations of the model room, on a cache of their own. The same for every
family of base: a part's block need not look like the base's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..model.block import Block, own_block
from ..model.compute.cache import KVCache, TokenLayout
from ..model.compute.call import Call
from ..model.compute.norms import Norm
from ..model.compute.ops import Ops
from ..model.compute.plan import LayerPlan
from ..model.compute.rope import RopeTable
from ..model.families import FAMILIES, Scales, Shape
from ..model.layered import LayeredModel
from ..model.operations import operations_for
from ..model.passes import Passes

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


class RmsNorm(nn.Module):
    """x / rms(x) * w."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.variance_epsilon = EPS

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * unit(x)


class _Attention(nn.Module):
    def __init__(self, size: BlockSize) -> None:
        super().__init__()
        queries, keys = size.heads * size.head_size, size.kv_heads * size.head_size
        self.q_proj = nn.Linear(size.width, queries, bias=False)
        self.k_proj = nn.Linear(size.width, keys, bias=False)
        self.v_proj = nn.Linear(size.width, keys, bias=False)
        self.o_proj = nn.Linear(queries, size.width, bias=False)
        self.scaling = size.head_size**-0.5


class _Mlp(nn.Module):
    def __init__(self, size: BlockSize) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size.width, size.inner, bias=False)
        self.up_proj = nn.Linear(size.width, size.inner, bias=False)
        self.down_proj = nn.Linear(size.inner, size.width, bias=False)


class SmallBlock(nn.Module):
    """The weights of one block. How they are run is `Stack`'s business, or the trainer's."""

    def __init__(self, size: BlockSize) -> None:
        super().__init__()
        self.size = size
        self.self_attn = _Attention(size)
        self.mlp = _Mlp(size)
        self.input_layernorm = RmsNorm(size.width)
        self.post_attention_layernorm = RmsNorm(size.width)


class Stack:
    """Some blocks, one after the other, ready to run."""

    def __init__(self, blocks: Sequence[SmallBlock], model: LayeredModel) -> None:
        size, count = blocks[0].size, len(blocks)
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
        self.ops: Ops = operations_for("auto", model.dtype, model.device)
        self._model, self._size = model, size
        self._rope = RopeTable(Rotary(size), shape.context, model.device)
        self.blocks: list[Block] = [
            own_block(
                block.to(model.device, model.dtype),
                index,
                FAMILIES["llama"],
                shape,
                self.ops,
                self._rope,
            )
            for index, block in enumerate(blocks)
        ]
        self._passes, self._plan = Passes(self.blocks), LayerPlan(0, count)
        self._ones = Norm(torch.ones(size.width, dtype=model.dtype, device=model.device), EPS)

    def new_cache(self, rows: int, capacity: int) -> KVCache:
        """A cache of these blocks' own."""
        size, model = self._size, self._model
        shape = (len(self.blocks), rows, size.kv_heads, size.head_size)
        return KVCache(shape, capacity, model.dtype, model.device)

    def unit(self, x: Tensor) -> Tensor:
        """(tokens, width), RMS-normalised."""
        return self.ops.norm(x.contiguous(), self._ones)

    @torch.inference_mode()
    def run(self, x: Tensor, cache: KVCache, layout: TokenLayout) -> Tensor:
        """(tokens, width) through all blocks."""
        self._rope.reserve(max(span.first + span.count for span in layout.spans))
        x, *_ = self._passes.run(x, Call(self._plan, cache, layout.on(self._model.device)))
        cache.advance(layout, tuple(range(len(self.blocks))))
        return x


def unit(x: Tensor) -> Tensor:
    """x / rms(x), in float32. What `Stack.unit` computes."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def blocks_of(size: BlockSize, tensors: Mapping[str, Tensor], count: int) -> list[SmallBlock]:
    """Blocks from a part's tensors, named blocks.0..., in float32."""
    blocks = []
    for index in range(count):
        prefix = f"blocks.{index}."
        with torch.device("meta"):
            block = SmallBlock(size)
        own = {
            name.removeprefix(prefix): tensor.float()
            for name, tensor in tensors.items()
            if name.startswith(prefix)
        }
        block.load_state_dict(own, assign=True)
        blocks.append(block.requires_grad_(False))
    return blocks
