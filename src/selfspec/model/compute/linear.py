"""Linears behind one call: `linear(x, residual=None)`, where several weights that read the same
input run as one product.

Our own kernels' is in cpu/linear.py. A packed weight replaces the original: nothing here keeps a
second copy.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import OptionError
from .grouped import Matrix, joined


class Linear(ABC):
    """A product with fixed weights, of shape (outputs, inputs)."""

    outputs: int
    inputs: int
    bias: Tensor | None
    readable = True  # whether `rows` works
    modules: Sequence[nn.Module] = ()  # what it calls that keeps weights of its own
    floats = ""
    """Why its weights are in float32 where others are in few bits; "" if they are not."""
    alone = "torch multiplies"
    """Why our kernels cannot take it into the one call of a pass; "" if they can."""

    def native(self) -> object | None:
        """What our kernels need to take it into the one call of a pass. None if they cannot."""
        return None

    @abstractmethod
    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x (rows, inputs) -> (rows, outputs), plus the residual if there is one."""

    def rows(self, index: Tensor) -> Tensor:
        """Rows of the weight itself, (n, inputs): how a tied head serves as the embedding."""
        raise NotImplementedError(f"{type(self).__name__} cannot be read back; keep the embedding")

    def cut(self, index: Tensor) -> Matrix:
        """The same for a product of their own, in as few bits as they are stored in."""
        return self.rows(index)

    @property
    def bytes(self) -> int:
        """Bytes of weight that one call reads."""
        return self.outputs * self.inputs * self._item

    _item = 4


def joined_tensors(weights: Sequence[Matrix]) -> Tensor:
    """Weights of one input as one, for torch."""
    weight = joined(weights)
    return weight if isinstance(weight, Tensor) else weight.float()


def joined_bias(weights: Sequence[Matrix], biases: Sequence[Tensor | None]) -> Tensor | None:
    """The biases of joined weights; zeros where one has none."""
    if all(bias is None for bias in biases):
        return None
    some = next(bias for bias in biases if bias is not None)
    pairs = zip(weights, biases, strict=True)
    return torch.cat([some.new_zeros(len(w)) if b is None else b.detach() for w, b in pairs])


class PlainLinear(Linear):
    """`F.linear`: every device and dtype. A row's bits may depend on how many rows run together."""

    def __init__(self, weights: Sequence[Matrix], biases: Sequence[Tensor | None]) -> None:
        self.weight = joined_tensors(weights)
        self.bias = joined_bias(weights, biases)
        self.outputs, self.inputs = self.weight.shape
        self._item = self.weight.element_size()

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        out = F.linear(x, self.weight, self.bias)
        return out if residual is None else residual + out

    def rows(self, index: Tensor) -> Tensor:
        return self.weight[index]


class MklLinear(Linear):
    """MKL's packed product: fast and row-stable on Intel processors, neither on others, so whoever
    uses it asks first (`mkl_is_row_stable`).

    The operator compares its last argument with the rows of x and silently runs a plain product
    with the third argument when they differ. Hence `x.shape[0]`, always.
    """

    ROWS = 64  # for which the weight is packed, once
    readable = False

    def __init__(self, weights: Sequence[Matrix], biases: Sequence[Tensor | None]) -> None:
        weight = joined_tensors(weights).contiguous()
        self.bias = joined_bias(weights, biases)
        self.outputs, self.inputs = weight.shape
        self._pack = torch.ops.mkl._mkl_reorder_linear_weight(weight, self.ROWS)
        self._shape_only = torch.empty(1).expand(self.outputs, self.inputs)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        out: Tensor = torch.ops.mkl._mkl_linear(
            x.contiguous(), self._pack, self._shape_only, self.bias, x.shape[0]
        )
        return out if residual is None else residual + out


class ModuleLinear(Linear):
    """A module that multiplies by itself, such as one with quantised weights; it may do so in
    another dtype. Whether a row's bits depend on its neighbours is up to the module."""

    readable = False

    def __init__(self, module: nn.Module, outputs: int, inputs: int) -> None:
        self._module = module
        self.modules = (module,)
        self.alone = f"a module of kind {kind_of(module)} multiplies"
        self.outputs, self.inputs = outputs, inputs
        self.bias = None  # if it has one, it adds it itself

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if self._module.training:
            raise OptionError(
                "the model is in training mode, and its own modules would drop at random; call "
                "model.eval() first"
            )
        out: Tensor = self._module(x).to(x.dtype)
        return out.contiguous() if residual is None else residual + out

    @property
    def bytes(self) -> int:
        held = [*self._module.parameters(), *self._module.buffers()]
        return sum(plain.nbytes for each in held for plain in plain_tensors(each))


def kind_of(module: nn.Module) -> str:
    """A module's kind in a word: its class, or that of its weight if it is a plain Linear."""
    return type(module.weight.data).__name__ if type(module) is nn.Linear else type(module).__name__


def plain_tensors(weight: Tensor) -> list[Tensor]:
    """The tensors that a weight is made of: itself, or those of a quantisation library."""
    if type(weight.data) is Tensor or not hasattr(weight, "__tensor_flatten__"):
        return [weight]
    names, _ = weight.__tensor_flatten__()
    return [plain for name in names for plain in plain_tensors(getattr(weight, name))]


class JoinedLinear(Linear):
    """Products of one input side by side. `order`: which output stands at each place."""

    readable = False

    def __init__(self, linears: Sequence[Linear], order: Tensor | None = None) -> None:
        self.linears, self._order = linears, order
        self.modules = [each for linear in linears for each in linear.modules]
        self.alone = next((linear.alone for linear in linears if linear.alone), self.alone)
        self.outputs, self.inputs = sum(each.outputs for each in linears), linears[0].inputs
        self.bias = None  # each adds its own

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        out = torch.cat([linear(x) for linear in self.linears], dim=1)
        if self._order is not None:
            # once: a step that is recorded cannot bring it there
            if self._order.device != x.device:
                self._order = self._order.to(x.device)
            out = out[:, self._order]
        return out if residual is None else residual + out

    @property
    def bytes(self) -> int:
        return sum(linear.bytes for linear in self.linears)


class LowRank(Linear):
    """What an adapter adds, in float32: `base(x) + up(down(x))`. `base` is the same without it."""

    alone = "an adapter beside its weights"

    def __init__(self, base: Linear, down: Linear, up: Linear) -> None:
        self.base, self._down, self._up = base, down, up
        self.modules = base.modules
        self.outputs, self.inputs, self.bias = base.outputs, base.inputs, base.bias
        self.readable = base.readable and down.readable and up.readable

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        out = self.base(x, residual)
        added = self._up(self._down(x.float()), out.float())
        return added.to(out.dtype)

    def rows(self, index: Tensor) -> Tensor:
        down = self._down.rows(torch.arange(self._down.outputs, device=index.device))
        base = self.base.rows(index)
        return (base + self._up.rows(index) @ down).to(base.dtype)

    @property
    def bytes(self) -> int:
        return self.base.bytes + self._down.bytes + self._up.bytes


def without_low_rank(linear: Linear) -> Linear:
    """A product without what adapters add to it."""
    return linear.base if isinstance(linear, LowRank) else linear


@functools.cache
def mkl_is_row_stable() -> bool:
    """Whether MKL's pack is right here and gives a row the same bits for any number of rows."""
    if not (torch.backends.mkl.is_available() and hasattr(torch.ops.mkl, "_mkl_linear")):
        return False
    generator = torch.Generator().manual_seed(0)
    for shape in ((960, 576), (576, 1536), (512, 512)):
        weight = torch.randn(shape, generator=generator)
        x = torch.randn((64, shape[1]), generator=generator)
        packed = MklLinear([weight], [None])
        alone = torch.cat([packed(x[i : i + 1]) for i in range(64)])
        if not torch.allclose(alone, F.linear(x, weight), atol=1e-3):
            return False
        if not all(torch.equal(packed(x[:n]), alone[:n]) for n in (2, 3, 5, 8, 9, 16, 17, 33, 64)):
            return False
    return True
