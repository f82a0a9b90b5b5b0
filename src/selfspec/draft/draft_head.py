"""A trained draft head: one small block that guesses on from the hidden states of the whole model, as a chain or a tree.

An entry of the head is a token together with the states that the whole model had at the token before it, where this one was
chosen: x = W [e(t+1); h(t)], a = block(x), and the model's own last norm and head (some of its rows) read a. Behind the last
kept token the head is fed its own output: x = W_e e + W_a a. Sources: EAGLE, Li et al. 2024, arXiv 2401.15077 (the entry);
EAGLE-3, 2025, arXiv 2503.01840 (states of several layers, trained on its own outputs); EAGLE-2, arXiv 2406.16858 (the
tree grown by cumulative probability). Does not know how the head was trained.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..contract import Budget, Draft, Outcome
from ..errors import OptionError
from ..model.adapter import PREFILL_CHUNK, LayeredModel
from ..model.cache import Place, Span
from ..model.extras import Part, find_part
from ..model.partial_head import PartialHead
from ..model.small import BlockSize, Stack, blocks_of
from ..model.taps import Taps
from .base import Drafter, Drafting, Scene
from .chain import ChainDrafting
from .grown import Beam, place_of


@dataclass(frozen=True)
class DraftHead(Drafter):
    """Draft with a small trained block that reads the whole model's hidden states."""

    name: ClassVar[str] = "draft-head"
    trees: ClassVar[bool] = True

    part: str | os.PathLike[str] | Part | None = None
    """Folder of the trained part; None is the one that comes with selfspec for this model."""
    width: int = 1
    """Guesses that are followed up at each depth: 1 drafts a chain, more a tree."""
    sample: bool = False
    """Under sampling, draw drafts at random and verify them by rejection: the same distribution, other tokens for a seed."""

    def __post_init__(self) -> None:
        if not 1 <= self.width <= 16:
            raise OptionError(f"width={self.width} is outside 1 to 16; 1 drafts a chain, 2 to 4 is a tree of use")
        if self.sample and self.width > 1:
            raise OptionError(f"sample=True draws chains, and width={self.width} asks for a tree; leave one of them out")

    def start(self, scene: Scene) -> Drafting:
        return _Drafting(scene, _head_of(find_part(self.part, "draft-head", scene.model), scene.model), self.width, self.sample)


class _Head:
    """A part's weights, ready to run."""

    def __init__(self, part: Part, model: LayeredModel) -> None:
        self.layers = tuple(part.settings["layers"])
        self.stack = Stack(blocks_of(BlockSize(**part.settings["block"]), part.tensors, 1), model)
        self.rows = PartialHead(model, part.tensors["vocabulary"].to(model.device).long())
        width = model.shape.width
        enter, again = (part.tensors[name].to(model.device, model.dtype) for name in ("enter.weight", "again.weight"))
        self._enter = self.stack.ops.linear([enter], [None])
        self._again = self.stack.ops.linear([torch.cat([enter[:, :width], again], dim=1)], [None])
        self._model = model

    def enter(self, tokens: Tensor, states: Tensor) -> Tensor:
        """Entries of kept text: tokens (n,) and what the taps held before them, (n, taps, width)."""
        found = [self._embedded(tokens), *(self.stack.unit(states[:, tap]) for tap in range(states.shape[1]))]
        return self._enter(torch.cat(found, dim=1))

    def again(self, tokens: Tensor, own: Tensor) -> Tensor:
        """Entries of guesses: tokens and the head's own outputs before them, (n, width)."""
        return self._again(torch.cat([self._embedded(tokens), self.stack.unit(own)], dim=1))

    def _embedded(self, tokens: Tensor) -> Tensor:
        return self.stack.unit(self._model.embed(tokens))


_ready: WeakKeyDictionary[LayeredModel, dict[int, tuple[Part, _Head]]] = WeakKeyDictionary()


def _head_of(part: Part, model: LayeredModel) -> _Head:
    """The part's head, packed once for a model."""
    kept = _ready.setdefault(model, {})
    if id(part) not in kept:
        kept[id(part)] = part, _Head(part, model)
    return kept[id(part)][1]


@dataclass
class _Known:
    """What a row's part of the head's cache stands for: its slot 0 is entry `first` of the text; `held` entries are of kept text.
    Entry i is token i + 1 with the states at token i; `waiting` are states of entries not read yet."""

    first: int = 0
    held: int = 0
    waiting: Tensor | None = None

    @property
    def end(self) -> int:
        return self.first + self.held + (0 if self.waiting is None else len(self.waiting))


class _Drafting(ChainDrafting):
    def __init__(self, scene: Scene, head: _Head, width: int, sample: bool) -> None:
        super().__init__(scene, sample=sample)
        self._head, self._width, self._partial = head, width, head.rows
        self._taps = Taps(head.layers)
        self.taps = [self._taps]
        self.cache = head.stack.new_cache(len(scene.prompts), max(map(len, scene.prompts)) + 64)
        self._known = [_Known() for _ in scene.prompts]
        self._own: dict[int, Tensor] = {}  # of each row: the output for its last entry, (1, width)

    # ------------------------------------------------------------------------------------------------ what is known of texts

    def observe(self, outcome: Outcome) -> None:
        """Take over the states of what was kept; those of rejected drafts are dropped."""
        paths = {}
        for row, text, kept, accepted in zip(outcome.rows, outcome.texts, outcome.kept, outcome.accepted, strict=True):
            begin = len(text) - len(kept) - 1  # the slot of what was the last token
            paths[row, begin] = [0, *(index + 1 for index in accepted)][: len(kept)]
        self._gather(paths)

    def _gather(self, paths: dict[tuple[int, int], list[int]]) -> None:
        """Sort new states by rows. Of a verification (a span that begins where a path does) the path counts, else all."""
        for place, states in self._taps.take():
            pieces = states.split([span.count for span in place.spans])
            for span, piece in zip(place.spans, pieces, strict=True):
                path = paths.get((span.row, span.first))
                self._add(span.row, span.first, piece if path is None else piece[path])

    def _add(self, row: int, first: int, states: Tensor) -> None:
        """States of the tokens from `first` on. After a gap (a prompt's beginning that was cached) the head begins anew."""
        known = self._known[row]
        if known.end != first:
            known.first, known.held, known.waiting = first, 0, None
            self.cache.rollback(row, 0)
        known.waiting = states if known.waiting is None else torch.cat([known.waiting, states])

    # ------------------------------------------------------------------------------------------------------------- drafting

    def propose(self, rows: Sequence[int], texts: Sequence[Sequence[int]], budget: Budget) -> Draft:
        self._gather({})
        most = [
            tokens if self._known[row].end == len(text) - 1 else 0
            for row, text, tokens in zip(rows, texts, budget.tokens, strict=True)
        ]
        asked = [index for index, tokens in enumerate(most) if tokens]
        self._own = {}
        self._read([rows[i] for i in asked], [texts[i] for i in asked])
        budget = Budget(most, budget.threshold)
        draft = super().propose(rows, texts, budget) if self._width == 1 else self._grow(rows, asked, budget)
        for row in rows:
            self.cache.rollback(row, self._known[row].held)
        return draft

    def slot(self, row: int, length: int) -> int:
        return length - 2 - self._known[row].first

    def hidden(self, tokens: Tensor, place: Place, rows: Sequence[int]) -> Tensor:
        """The first guess follows from the kept text, which has been read; the others from guesses."""
        own = torch.cat([self._own[row] for row in rows])
        if int(place.slots[0]) >= self._known[rows[0]].held:
            own = self._head.stack.run(self._head.again(tokens, own), self.cache, place)
            self._own.update(zip(rows, own.split(1), strict=True))
        return own

    def _read(self, rows: Sequence[int], texts: Sequence[Sequence[int]]) -> None:
        """Bring the head's cache up to the kept text, all rows together, so many entries at a time."""
        while left := [(row, text) for row, text in zip(rows, texts, strict=True) if self._known[row].waiting is not None]:
            room, spans, states = PREFILL_CHUNK, [], []
            tokens: list[int] = []
            for row, text in left:
                known = self._known[row]
                assert known.waiting is not None
                count = min(room, len(known.waiting))
                room -= count
                begin = known.first + known.held + 1
                spans.append(Span(row, known.held, count))
                tokens += text[begin : begin + count]
                states.append(known.waiting[:count])
                known.held += count
                known.waiting = known.waiting[count:] if count < len(known.waiting) else None
            spans = [span for span in spans if span.count]
            x = self._head.enter(torch.tensor(tokens, device=self.scene.model.device), torch.cat(states))
            x = self._head.stack.run(x, self.cache, self.cache.place_at(spans))
            for span, piece in zip(spans, x.split([span.count for span in spans]), strict=True):
                self._own[span.row] = piece[-1:]

    def _grow(self, rows: Sequence[int], asked: Sequence[int], budget: Budget) -> Draft:
        """Trees: at each depth the likeliest guesses of every row are read together."""
        beams = [Beam(rows[i], self._known[rows[i]].held, budget.tokens[i], self._width, budget.threshold) for i in asked]
        live, own = beams, [self._own[beam.row] for beam in beams]
        while live:
            chances, best = self._head.rows(torch.cat(own)).float().softmax(-1).topk(self._width)
            tokens, counts = self._head.rows.tokens[best], [len(states) for states in own]
            following = []
            for beam, states, names, found in zip(live, own, tokens.split(counts), chances.split(counts), strict=True):
                following.append(states[beam.extend(names.tolist(), found.tolist())])
            live, states = [beam for beam in live if beam.front], torch.cat(following)
            if live:
                own = list(self._follow(live, states).split([len(beam.front) for beam in live]))
        trees = {beam.row: beam.tree() for beam in beams}
        found = [trees.get(row, ([], [])) for row in rows]
        return Draft([tokens for tokens, _ in found], parents=[parents for _, parents in found])

    def _follow(self, beams: Sequence[Beam], own: Tensor) -> Tensor:
        """Read the fronts, given the outputs before them."""
        place = place_of(beams)
        self.cache.reserve(int(place.slots.max()) + 1)
        tokens = torch.tensor([token for beam in beams for token in beam.front_tokens], device=own.device)
        return self._head.stack.run(self._head.again(tokens, own), self.cache, place)
