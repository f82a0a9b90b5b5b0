"""A trained draft head: a small block that guesses chains or trees from the model's hidden states.

An entry of the head is a token together with the states that the whole model had at the token
before it, where this one was chosen: x = W [e(t+1); h(t)], a = block(x), and the model's own last
norm and head (some of its rows) read a. Behind the last kept token the head is fed its own output:
x = W_e e + W_a a. Sources: EAGLE, Li et al. 2024, arXiv 2401.15077 (the entry); EAGLE-3, 2025,
arXiv 2503.01840 (states of several layers, trained on its own outputs); EAGLE-2, arXiv 2406.16858
(the tree grown by cumulative probability). Does not know how the head was trained.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...core.contract import Budget, Draft
from ...core.guessing import drawn
from ...core.sampling import Sampler
from ...errors import OptionError
from ...model.compute.cache import RowSpan, TokenLayout
from ...model.layered import LayeredModel
from ...trained.blocks import BlockSize, Stack
from ...trained.files import TrainedPart, find_part, partial_head_of, ready
from ..base import Drafter, DraftSession, Target, Texts
from ..beam import Beam, layout_of
from ..entries import EntriesSession


@dataclass(frozen=True)
class DraftHead(Drafter):
    """Draft with a small trained block that reads the whole model's hidden states."""

    name: ClassVar[str] = "draft-head"
    trees: ClassVar[bool] = True
    names: ClassVar[bool] = True
    reads_states: ClassVar[bool] = True

    part: str | os.PathLike[str] | TrainedPart | None = None
    """Folder of the trained part. None is the one that selfspec ships for this model."""
    width: int = 1
    """How many guesses are followed up at each depth, 1 to 16: 1 drafts a chain, more a tree."""
    sample: bool = False
    """Under sampling, draw drafts at random and verify them by rejection: the same distribution,
    other tokens for a seed. A tree's guesses at one place are drawn without replacement."""

    def __post_init__(self) -> None:
        if not 1 <= self.width <= 16:
            raise OptionError(
                f"width={self.width} is outside 1 to 16; 1 drafts a chain, 2 to 4 is a tree of use"
            )

    def start(self, target: Target) -> DraftSession:
        target.model.needs_layers("draft='draft-head'")
        part = find_part(self.part, "draft-head", target.model)
        return _Drafting(target, ready(part, target.model, _Head), self.width, self.sample)


class _Head:
    """A part's weights, ready to run."""

    def __init__(self, part: TrainedPart, model: LayeredModel) -> None:
        self.layers = tuple(part.settings["layers"])
        self.stack = Stack(BlockSize(**part.settings["block"]), part.tensors, 1, model)
        self.rows = partial_head_of(part, model)
        names, width = ("enter.weight", "again.weight"), model.shape.width
        enter, again = (part.tensors[name].to(model.device, model.dtype) for name in names)
        self._enter, self._of_token, self._of_own = (
            self.stack.ops.linear([weight.contiguous()], [None])
            for weight in (enter, enter[:, :width], again)
        )
        self._model, (head,) = model, self.rows.linears
        self.guess = self.stack.guessing(model, head, self._of_token, self._of_own)
        """All of a guess in one call, where our kernels can."""

    def enter(self, tokens: Tensor, states: Tensor) -> Tensor:
        """Entries of kept text: tokens (n,) and the tapped states before them, (n, taps, width)."""
        tapped = self.stack.unit(states.flatten(0, 1)).view(len(states), -1)
        return self._enter(torch.cat([self._embedded(tokens), tapped], dim=1))

    def again(self, tokens: Tensor, own: Tensor) -> Tensor:
        """Entries of guesses: tokens and the head's own outputs before them, (n, width)."""
        return self._of_own(self.stack.unit(own), self._of_token(self._embedded(tokens)))

    def _embedded(self, tokens: Tensor) -> Tensor:
        return self.stack.unit(self._model.states(self._model.embed(tokens)))


class _Drafting(EntriesSession):
    """Entry i of the text is token i + 1 with the states at token i."""

    def __init__(self, target: Target, head: _Head, width: int, sample: bool) -> None:
        super().__init__(target, head.rows, sample)
        self._head, self._width = head, width
        self.cache = head.stack.new_cache(target.cache.rows, 1)
        self.use_entries(head.layers, self.cache)
        self._own: dict[int, Tensor] = {}  # of each row: the output for its last entry, (1, width)
        self._named: dict[int, int] = {}  # how long each row's text was when its next were named

    def propose(self, rows: Sequence[int], texts: Texts, budget: Budget) -> Sequence[Draft]:
        self._entries.gather()
        budget = self._entries.allow(rows, texts, budget)
        asked = [index for index, tokens in enumerate(budget.tokens) if tokens]
        self._read({rows[i]: texts[i] for i in asked})
        if self._width == 1:
            return super().propose(rows, texts, budget)
        return self._grow(rows, texts, asked, budget)

    def named(self, rows: Sequence[int], texts: Texts, count: int) -> Sequence[Sequence[int]]:
        """What the head says: behind the kept text, or behind guesses, each of which was the end of
        a text that it was asked for. Nothing where the latest states are missing."""
        self._entries.gather()
        asked = dict(zip(rows, texts, strict=True))
        kept = {r: text for r, text in asked.items() if self._entries[r].end == len(text) - 1}
        before = self._own
        self._read(kept)
        behind = [
            row
            for row, text in asked.items()
            if row not in kept and row in before and self._named.get(row) == len(text) - 1
        ]
        if behind:
            spans = [RowSpan(row, self.slot(row, len(asked[row])), 1) for row in behind]
            self.cache.reserve(max(span.first for span in spans) + 1)
            last = [asked[row][-1] for row in behind]
            x = self._head.again(
                torch.tensor(last, device=self.target.model.device),
                torch.cat([before[row] for row in behind]),
            )
            x = self._head.stack.run(x, self.cache, self.cache.layout_at(spans))
            self._own.update(zip(behind, x.split(1), strict=True))
        self._named = {row: len(asked[row]) for row in self._own}
        if not self._own:
            return [[] for _ in rows]
        logits = self._head.rows(torch.cat(list(self._own.values())))
        best = logits.topk(min(count, logits.shape[1]), dim=1).indices
        tokens = self._head.rows.tokens[best].tolist()
        found = dict(zip(self._own, tokens, strict=True))
        return [found.get(row, []) for row in rows]

    def slot(self, row: int, length: int) -> int:
        return length - 2 - self._entries[row].first

    def following(
        self, last: Sequence[int], layout: TokenLayout, rows: Sequence[int]
    ) -> tuple[Tensor, Sequence[int] | None]:
        if self._head.guess is None or not self._behind_guesses(layout, rows):
            return super().following(last, layout, rows)
        own = torch.cat([self._own[row] for row in rows])
        found = self._head.guess(last, own, self.cache, layout)
        self._own.update(zip(rows, found.states.split(1), strict=True))
        return found.logits, found.best

    def _behind_guesses(self, layout: TokenLayout, rows: Sequence[int]) -> bool:
        """The first guess follows from the kept text, which was read, the others from guesses."""
        return layout.spans[0].first >= self._entries[rows[0]].held

    def hidden(self, tokens: Tensor, layout: TokenLayout, rows: Sequence[int]) -> Tensor:
        own = torch.cat([self._own[row] for row in rows])
        if self._behind_guesses(layout, rows):
            own = self._head.stack.run(self._head.again(tokens, own), self.cache, layout)
            self._own.update(zip(rows, own.split(1), strict=True))
        return own

    def _read(self, texts: Mapping[int, Sequence[int]]) -> None:
        """Bring the head's cache up to the kept text."""
        self._own = {}
        for spans, states in self._entries.unread(list(texts)):
            tokens: list[int] = []
            for span in spans:
                begin = self._entries[span.row].first + span.first + 1
                tokens += texts[span.row][begin : begin + span.count]
            ids = torch.tensor(tokens, device=self.target.model.device)
            layout = self.cache.layout_at(spans)
            x = self._head.stack.run(self._head.enter(ids, states), self.cache, layout)
            for span, piece in layout.pieces:
                self._own[span.row] = x[piece][-1:]

    def _grow(
        self, rows: Sequence[int], texts: Texts, asked: Sequence[int], budget: Budget
    ) -> Sequence[Draft]:
        """Trees: at each depth the likeliest guesses of every row are read together."""
        most, width, threshold = budget.tokens, self._width, budget.threshold
        growing = []
        for index in asked:
            row, text = rows[index], texts[index]
            held, state = self._entries[row].held, self.rows[row]
            beam = Beam(row, text[-1], held, most[index], width, threshold)
            growing.append(_Growing(beam, state.sampler if state.drawn else None, text, [None]))
        live, own = growing, [self._own[each.beam.row] for each in growing]
        while live:
            logits, counts = self._head.rows(torch.cat(own)), [len(states) for states in own]
            following = [
                states[self._extend(each, scores)]
                for each, states, scores in zip(live, own, logits.split(counts), strict=True)
            ]
            live, states = [each for each in live if each.beam.front], torch.cat(following)
            if live:
                beams = [each.beam for each in live]
                own = list(self._follow(beams, states).split([len(b.front) for b in beams]))
        drafts = {
            each.beam.row: Draft(each.beam.tree(), each.drawn_from if each.sampler else None)
            for each in growing
        }
        return [drafts.get(row) or Draft.chain(text) for row, text in zip(rows, texts, strict=True)]

    def _extend(self, growing: _Growing, logits: Tensor) -> list[int]:
        """Guesses after every node of one row's front. Of each of the new front: its parent."""
        if growing.sampler:
            return growing.draw(self.whole(logits))
        chances, best = logits.float().softmax(-1).topk(self._width)
        return growing.beam.extend(self._head.rows.tokens[best].tolist(), chances.tolist())

    def _follow(self, beams: Sequence[Beam], own: Tensor) -> Tensor:
        """Read the fronts, given the outputs before them."""
        layout = layout_of(beams)
        self.cache.reserve(int(layout.slots.max()) + 1)
        tokens = [token for beam in beams for token in beam.front_tokens]
        x = self._head.again(torch.tensor(tokens, device=own.device), own)
        return self._head.stack.run(x, self.cache, layout)


@dataclass
class _Growing:
    """One row's tree. With a sampler its guesses are drawn, and none of them is dropped again:
    which nodes are followed up may depend on what was drawn, but not what is kept of it."""

    beam: Beam
    sampler: Sampler | None
    text: Sequence[int]
    drawn_from: list[Tensor | None]

    def draw(self, logits: Tensor) -> list[int]:
        """Draw after every node of the front, the likeliest node first while there is room."""
        assert self.sampler is not None
        beam, room = self.beam, self.beam.room
        tokens: list[list[int]] = []
        chances: list[list[float]] = []
        for node, context, scores in zip(beam.front, self._contexts(), logits, strict=True):
            count, begin = min(beam.width, room), len(self.text)
            found = drawn(self.sampler, scores, context, begin, node, count) if count else []
            room -= len(found)
            tokens.append([token for token, _ in found])
            chances.append([float(found[0][1][token]) for token, _ in found])
            self.drawn_from += [q for _, q in found]
        parents = beam.extend(tokens, chances)
        if not room:
            beam.front = []
        return parents if room else []

    def _contexts(self) -> list[list[int]]:
        tree = self.beam.tree()
        return [list(tree.contexts(self.text)[node]) for node in self.beam.front]
