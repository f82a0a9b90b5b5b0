"""A pass: halves of blocks, one after the other, on one cache.

Halves that are made of our kernels run in one call, as many as follow each other, and take little
more than their products. Any other half runs its own operations in between, and says why. Does not
know which halves are asked for, or what for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from .block import Block
from .compute.call import Call
from .compute.cpu.fused import Entry, FusedHalves, FusedModel, ModelEnds
from .compute.cpu.linear import PackedLinear
from .compute.halves import Half, HalfParts
from .compute.linear import Linear
from .compute.norms import Norm

WholePass = Callable[..., tuple[Tensor, Tensor, list[list[int]], Sequence[Tensor]]]
"""(tokens, plan of all layers, cache, layout, ranks, what layers read of the tokens themselves,
layers whose states are wanted, what came out before guesses) -> last states, logits, the likeliest
tokens of each, the states behind those layers."""
Which = tuple[int, bool]  # a half: its layer, and whether it is the attention
_SCALED = "its result is scaled, and one call would round that otherwise than a half alone does"


class Passes:
    """Runs any plan over some blocks."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._blocks = blocks
        together, self._alone = _sorted(
            {
                (layer, attention): half
                for layer, block in enumerate(blocks)
                for attention, half in zip((True, False), block.taken_apart(), strict=True)
                if half is not None
            }
        )
        self._fused = FusedHalves(together, len(blocks))
        self._together = together
        # Those that a call may go on to. An MLP that runs alone and reads what entered its layer
        # needs a call that begins with the layer: within a call nobody else sees the stream.
        self._following = {
            (layer, attention)
            for layer, block in enumerate(blocks)
            for attention in (True, False)
            if (layer, attention) not in self._alone
            and not (attention and block.parallel and (layer, False) in self._alone)
        }

    @property
    def alone(self) -> list[str]:
        """Which halves run by themselves, and why, in words; none where any plan is one call."""
        reasons = dict.fromkeys(self._alone.values())
        return [f"{self._named(reason)} ({reason})" for reason in reasons]

    def _named(self, reason: str) -> str:
        halves = [half for half, why in self._alone.items() if why == reason]
        if len(halves) == 2 * len(self._blocks):
            return "every half"
        layers = [[layer for layer, which in halves if which == kind] for kind in (True, False)]
        attention, mlp = (_spans(each) for each in layers)
        if attention == mlp:
            return attention
        return " and ".join(
            f"{name} of {each}" for name, each in (("attention", attention), ("MLP", mlp)) if each
        )

    def at_once(
        self,
        source: Tensor | Linear,
        norm: Norm,
        scales: tuple[float, float, float],
        head: Linear,
        entry: Entry | None = None,
    ) -> WholePass | None:
        """The whole model in one call, or None if our kernels cannot take all of it.

        `source`: the embedding's rows, or a product whose rows they are. `scales`: of the
        embedding, of logits, and the soft cap of these, 0 for none. `entry`: how guesses enter.
        """
        if self._alone or not self._blocks or not isinstance(head, PackedLinear):
            return None
        if isinstance(source, Tensor):
            if source.dtype != torch.float32 or not source.is_contiguous():
                return None
        elif not isinstance(source, PackedLinear):
            return None
        return FusedModel(self._fused, ModelEnds(source, norm, head, scales, entry))

    def run(self, x: Tensor, call: Call) -> tuple[Tensor, ...]:
        """What comes out, then what left each collected layer. `x` itself is not changed."""
        halves, observer = call.plan.halves, call.observer
        if not (self._alone or call.collected or observer):  # as the loop would, at once
            return (self._some(x, call, 0, len(halves), x),)
        states, begin, current, entered = [], 0, call.plan.start, x
        for end, half in enumerate(halves, start=1):
            layer, attention = half
            if begin == end - 1 and layer != current:
                current, entered = layer, x
            shown = not attention and layer in call.collected
            more = observer is None and not shown and end < len(halves)
            if more and half not in self._alone and halves[end] in self._following:
                continue
            before, x = x, self._some(x, call, begin, end, entered)
            begin = end
            if observer:
                observer(layer, attention, before, x)
            if shown:
                states.append(x)
        return x, *states

    def _some(self, x: Tensor, call: Call, begin: int, end: int, entered: Tensor) -> Tensor:
        """The stream after the plan's halves [begin, end), which go together or are one."""
        layer, attention = half = call.plan.halves[begin]
        if half not in self._alone:
            if not any(each in self._together for each in call.plan.halves[begin:end]):
                return x  # halves that the model does not have
            more = call.cache, call.layout, entered, call.of_tokens
            return self._fused.run(x, call.plan, begin, end, *more)
        block = self._blocks[layer]
        if attention:
            return block.attention(x, call.cache, call.layout, call.of_tokens)
        return block.mlp(x, entered, call.of_tokens)


def _sorted(halves: Mapping[Which, Half]) -> tuple[dict[Which, HalfParts], dict[Which, str]]:
    """The halves that our kernels can run together, and why each other one runs alone."""
    together: dict[Which, HalfParts] = {}
    alone: dict[Which, str] = {}
    for which, half in halves.items():
        if isinstance(half, HalfParts) and not half.alone:
            together[which] = half
        else:
            alone[which] = half.alone if isinstance(half, HalfParts) else half
    if alone:
        # x + y * scale is rounded once within a call and twice in a half that runs alone. A model
        # does not mix the two, so that its bits are those of all its halves run alone.
        scaled = [which for which, half in together.items() if half.scale != 1]
        alone.update(dict.fromkeys(scaled, _SCALED))
        for which in scaled:
            del together[which]
    return together, alone


def _spans(layers: Iterable[int]) -> str:
    """Layers by their numbers: "layer 3", "layers 0 to 2, 7"; "" for none."""
    spans: list[list[int]] = []
    for layer in layers:
        if spans and spans[-1][1] == layer - 1:
            spans[-1][1] = layer
        else:
            spans.append([layer, layer])
    words = ", ".join(f"{a}" if a == b else f"{a} to {b}" for a, b in spans)
    many = len(spans) > 1 or any(a != b for a, b in spans)
    return f"layer{'s' * many} {words}" if spans else ""
