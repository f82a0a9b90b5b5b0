"""The early-exit loss with one shared head, in memory that does not grow with the number of exits.

    J = sum_l w(l) * CE(finish(head(norm(x[l+1]))), Y)          (LayerSkip, equation 5)

`finish` is what some families do to their logits: y = s z, then y = c tanh(y / c).

The logits of one chunk of one exit live at a time. Their gradient (softmax minus one-hot) is known
as soon as they are, so it is taken at once. Only the gradients of the states and of the head are
kept. That is three products of the head's size an exit (two when the head is frozen), which its
arithmetic needs, and nothing is computed twice. An exit may be asked about some tokens that stand
for the whole vocabulary (`candidates.py`), which makes its products smaller. Knows no model and no
curriculum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .candidates import Candidates

LIVE_LOGITS = 1 << 24  # logits that exist at a time, 64 MB in float32
_LOW = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Exit:
    """One exit's share of the loss, at the positions that are trained."""

    states: Tensor  # (n, width), normed
    targets: Tensor  # (n,) the token that follows each
    scale: Tensor
    """What the sum of the losses is multiplied with (weight over count). A scalar tensor, so that a
    GPU need not be waited for."""
    among: Candidates | None = None
    """The tokens that the loss is taken over, all targets among them; None is the vocabulary."""


@dataclass(frozen=True)
class Finish:
    """What turns a product with the head into a logit: a scale, and a soft cap (0 is none)."""

    scale: float = 1.0
    cap: float = 0.0

    def __call__(self, logits: Tensor) -> Tensor:
        """The logits, in the product's own memory."""
        if self.scale != 1:
            logits.mul_(self.scale)
        return logits.div_(self.cap).tanh_().mul_(self.cap) if self.cap else logits

    def slope(self, finished: Tensor) -> Tensor | None:
        """The derivative of the cap where it gave these logits; None without a cap."""
        return None if not self.cap else (finished / self.cap).square_().neg_().add_(1)


def exit_loss(
    exits: Sequence[Exit],
    weight: Tensor,
    bias: Tensor | None = None,
    live: int = LIVE_LOGITS,
    finish: Finish | None = None,
) -> tuple[Tensor, Tensor]:
    """The loss through the head of this weight (vocab, width) and bias. Also the sum of each exit's
    cross entropies, detached."""
    setup = _Setup(exits, live, finish or Finish(), torch.is_grad_enabled())
    apply: Any = _ExitLoss.apply
    loss, sums = apply(setup, weight, bias, *[part.states for part in exits])
    return loss, sums


@dataclass(frozen=True)
class _Setup:
    exits: Sequence[Exit]
    live: int
    finish: Finish
    training: bool


@dataclass(frozen=True)
class _Rows:
    """The rows of the head that one exit is asked about, in the dtype they are computed in."""

    weight: Tensor
    bias: Tensor | None
    among: Candidates | None

    def of(self, among: Candidates | None) -> _Rows:
        if among is None:
            return self
        bias = None if self.bias is None else self.bias[among.some]
        return _Rows(self.weight[among.some], bias, among)

    def spread(self, into: Tensor, part: Tensor) -> None:
        """Add what these rows' part holds to the whole."""
        if self.among is None:
            into += part
        else:
            into.index_add_(0, self.among.some, part)


def _compute_dtype(weight: Tensor) -> torch.dtype:
    """What the head's product would run in: autocast does not reach into a function of our own."""
    kind = weight.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype


class _Gradients:
    """Gradients on the way: of the head (accumulated over all exits) and of each exit's states."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, states: Sequence[Tensor], wanted: Sequence[bool]
    ) -> None:
        dtype = torch.float32 if weight.dtype in _LOW else weight.dtype
        self.weight = torch.zeros_like(weight, dtype=dtype) if wanted[0] else None
        keep = bias if wanted[1] else None
        self.bias = None if keep is None else torch.zeros_like(keep, dtype=dtype)
        pairs = zip(states, wanted[2:], strict=True)
        self.states = [torch.empty_like(state) if want else None for state, want in pairs]

    def add(
        self, index: int, at: slice, errors: Tensor, states: Tensor, rows: _Rows, scale: Tensor
    ) -> None:
        """`errors` (n, rows): the gradient of the unscaled sum by the product with the rows."""
        low = errors.to(rows.weight.dtype)
        into = self.states[index]
        if into is not None:
            into[at] = (low @ rows.weight).to(scale.dtype) * scale
        # scaled after the product in low precision, where a small factor would underflow
        if self.weight is not None:
            if rows.weight.dtype in _LOW or rows.among is not None:
                rows.spread(self.weight, (low.T @ states).to(scale.dtype) * scale)
            else:
                self.weight.addmm_(low.T, states * scale)
        if self.bias is not None:
            rows.spread(self.bias, errors.sum(0) * scale)


class _ExitLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, setup: _Setup, weight: Tensor, bias: Tensor | None, *states: Tensor
    ) -> tuple[Tensor, Tensor]:
        scales, dtype = torch.stack([part.scale for part in setup.exits]), _compute_dtype(weight)
        with torch.autocast(weight.device.type, enabled=False):
            low_bias = None if bias is None else bias.to(dtype)
            head, gradients = _Rows(weight.to(dtype), low_bias, None), None
            if setup.training:
                gradients = _Gradients(weight, bias, states, ctx.needs_input_grad[1:])
            sums = torch.zeros_like(scales)
            for index, (part, given) in enumerate(zip(setup.exits, states, strict=True)):
                rows, among = head.of(part.among), part.among
                targets = part.targets if among is None else among.index[part.targets]
                chunk = max(1, setup.live // len(rows.weight))
                for start in range(0, len(targets), chunk):
                    at = slice(start, start + chunk)
                    piece = given[at].to(dtype)
                    logits = torch.nn.functional.linear(piece, rows.weight, rows.bias)
                    logits = logits.to(scales.dtype)
                    errors, total = _errors(logits, targets[at], setup.finish, among)
                    sums[index] += total
                    if gradients is not None:
                        gradients.add(index, at, errors, piece, rows, scales[index])
        ctx.gradients, ctx.dtypes = gradients, (weight.dtype, None if bias is None else bias.dtype)
        ctx.mark_non_differentiable(sums)
        return (sums * scales).sum(), sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        gradients: _Gradients | None = ctx.gradients
        if gradients is None:
            raise RuntimeError("the exit loss was already differentiated, which works once only")
        ctx.gradients = None
        sums = (gradients.weight, gradients.bias, *gradients.states)
        given = [value.mul_(outer) if value is not None else None for value in sums]
        of_weight = None if given[0] is None else given[0].to(ctx.dtypes[0])
        of_bias = None if given[1] is None else given[1].to(ctx.dtypes[1])
        return (None, of_weight, of_bias, *given[2:])


def _errors(
    logits: Tensor, targets: Tensor, finish: Finish, among: Candidates | None
) -> tuple[Tensor, Tensor]:
    """The gradient of the head's product, in the logits' memory: softmax minus one-hot, through
    what follows the product. Also the sum of the cross entropies."""
    finish(logits)
    slope = finish.slope(logits)
    if among is not None:
        logits.add_(among.counted)
    highest = logits.amax(-1, keepdim=True)
    logits.sub_(highest)
    wanted = logits.gather(1, targets[:, None])
    logits.exp_()
    mass = logits.sum(-1, keepdim=True)
    logits.div_(mass)
    logits.scatter_add_(1, targets[:, None], torch.full_like(wanted, -1.0))
    if slope is not None:
        logits.mul_(slope)
    if finish.scale != 1:
        logits.mul_(finish.scale)
    return logits, (mass.log() - wanted).sum()
