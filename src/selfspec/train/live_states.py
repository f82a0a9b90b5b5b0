"""What the model computes on its own text, computed when a batch is asked for: for a card.

A card computes states faster than a disk gives them back, if whole conversations go through the
model side by side, and then nothing is kept. There a copy of the model in bfloat16 is run, as the
module that it is, so states are those that `states.py` keeps up to its roundings.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ..model.family import Family, Shape
from ..model.weights import module
from ..trained.blocks import unit
from .head_net import Ends
from .states import Conversation, Span, StateOptions, Text

HEAD_ROWS = 4096  # whose logits are there at the same time


class LiveStates(Text):
    """Some conversations and the frozen model that reads them."""

    def __init__(
        self,
        network: Any,
        family: Family,
        shape: Shape,
        conversations: Iterable[Conversation],
        options: StateOptions,
    ) -> None:
        super().__init__()
        self._options, self._device = options, network.device
        rounded = self._device.type != "cpu"
        self._network = copy.deepcopy(network).bfloat16() if rounded else network
        self._layers = [*module(self._network, family.layers).children()]
        everything = torch.arange(shape.vocabulary, device=self._device)
        self._ends = Ends(self._network, family, shape, everything)
        texts, first = [], 0
        for text in conversations:
            span = Span(0, first, first + len(text.tokens), text.begin)
            self.add(text.name, span, text.held_out(options.held_out))
            texts.append(text.tokens)
            first = span.stop
        self._tokens = torch.tensor([*chain.from_iterable(texts)], dtype=torch.int32)
        self._there = self._tokens.to(self._device)

    @torch.no_grad()
    def batch(self, numbers: Sequence[int]) -> dict[str, Tensor]:
        spans = [self.where[number] for number in numbers]
        first, stop, begin = (
            torch.tensor(values, device=self._device)[:, None]
            for values in zip(*((span.first, span.stop, span.begin) for span in spans), strict=True)
        )
        at = torch.arange(max(span.stop - span.first for span in spans), device=self._device)
        inside = first + at < stop
        tokens = self._there[(first + at).clamp(max=len(self._there) - 1)] * inside
        after, layers = self._through(tokens), self._options.layers
        states = torch.stack([unit(after[layer].float()).half() for layer in layers], dim=2)
        # the answer's tokens but its last: those whose next one is known to be the model's own
        answered = (at >= begin) & (first + at < stop - 1)
        ids, chances = self._likeliest(after[len(self._layers) - 1][answered])
        batch = {"tokens": tokens, "states": states}
        for name, found in (("ids", ids), ("chances", chances)):
            batch[name] = found.new_zeros(*tokens.shape, self._options.top)
            batch[name][answered] = found
        return batch

    def frequencies(self, vocabulary: int) -> Tensor:
        total = torch.zeros(vocabulary, dtype=torch.float64)
        for span in (self.where[number] for number in self.trained):
            answer = self._tokens[span.first + span.begin + 1 : span.stop].long()
            total.index_add_(0, answer, torch.ones(len(answer), dtype=torch.float64))
        return total

    def _through(self, tokens: Tensor) -> dict[int, Tensor]:
        """What comes out of the wanted layers and of the last one. Rows are padded behind, where
        no token looks."""
        with _outputs(self._layers, {*self._options.layers, len(self._layers) - 1}) as after:
            self._network(input_ids=tokens, use_cache=False, logits_to_keep=1)
        return after

    def _likeliest(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The likeliest next tokens behind some states, and their probabilities."""
        pieces = []
        for piece in x.split(HEAD_ROWS):
            best = self._ends.logits(piece).float().softmax(-1).topk(self._options.top)
            pieces.append((best.indices.int(), best.values.half()))
        ids, chances = zip(*pieces, strict=True)
        return torch.cat(ids), torch.cat(chances)


@contextmanager
def _outputs(layers: Sequence[nn.Module], wanted: set[int]) -> Iterator[dict[int, Tensor]]:
    """Filled with what comes out of these layers while the model runs."""
    found: dict[int, Tensor] = {}

    def keep(index: int, layer: nn.Module, given: Any, output: Any) -> None:
        found[index] = output if isinstance(output, Tensor) else output[0]

    handles = [layers[index].register_forward_hook(partial(keep, index)) for index in wanted]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
