"""What drafters that run part of the model share: they draft one token after another.

A subclass computes one more token. The row's own sampler chooses it from the draft's logits, with
the random numbers that belong to the position: under sampling, the more alike the distributions are
the likelier is agreement with the target's draw (core/coupling.py). With `sample`, drafts are drawn
with numbers of their own and verified by rejection (speculative sampling as published). A draft
ends with a token that would end the row, since nothing behind it could be kept, and where none can
be chosen: a draft may not fail a request.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor

from ..core.contract import Budget, Draft, ExitStates
from ..core.guessing import chosen, drawn
from ..core.sampling import Sampler
from ..core.tree import Tree
from ..errors import OptionError
from ..exits.stop import StopRule
from ..model.compute.cache import RowSpan, TokenLayout
from ..model.compute.cpu.choosing import likeliest
from ..model.compute.plan import LayerPlan
from ..model.partial_head import PartialHead, partial_head
from .base import DraftSession, Target, Texts


@dataclass
class ChainRow:
    """What a session knows of one row, and the draft that it is making for it."""

    sampler: Sampler
    ends: frozenset[int]
    prompt: frozenset[int]
    drawn: bool  # at random, and verified by rejection
    guesses: list[int] = field(default_factory=list)
    drawn_from: list[Tensor | None] = field(default_factory=list)


class ChainSession(DraftSession):
    """Drafts chains with part of the model, on the generation's own cache.

    `vocabulary`, `tokens`: score only token ids below that number (many tokenizers give low ids to
    frequent tokens), these tokens, and those of the prompts, from which much is copied. Without
    both, all are scored. `vocabulary` may also be a part's own choice. `sample`: under sampling,
    draw drafts independently of the target's own draws and report what they were drawn from.
    """

    stop: StopRule | None = None
    """Ends drafts that predictors doubt, beside what the budget says."""

    def __init__(
        self,
        target: Target,
        vocabulary: int | PartialHead = 0,
        sample: bool = False,
        tokens: Sequence[int] = (),
    ) -> None:
        self.target, self.cache = target, target.cache
        self._sample = sample
        self._scored = _scored(target, vocabulary, tokens)
        # Drawn drafts decide the text, so the prompts of neighbours may not matter to them.
        shared = self._scored is not None and vocabulary is not self._scored
        self._with_prompts = shared and not sample
        self._partial = self._scored
        self.rows: dict[int, ChainRow] = {}
        self.reads_wait = target.model.device.type != "cpu"  # reading a token waits for the device

    def admit(
        self, row: int, prompt: Sequence[int], sampler: Sampler, ends: frozenset[int] = frozenset()
    ) -> None:
        drawn = self._sample and not sampler.params.greedy
        self.rows[row] = ChainRow(sampler, ends, frozenset(prompt), drawn)
        self._partial = None if self._with_prompts else self._scored

    def drop(self, row: int) -> None:
        del self.rows[row]

    @abstractmethod
    def hidden(self, tokens: Tensor, layout: TokenLayout, rows: Sequence[int]) -> Tensor:
        """The draft's hidden states of these tokens, one a row, ready for the head."""

    def slot(self, row: int, length: int) -> int:
        """Where in the cache the last token of a text of that length belongs."""
        return length - 1

    def exits(self, row: int) -> ExitStates | None:
        """The states from which a row's verification may go on, once its draft is made."""
        return None

    def propose(self, rows: Sequence[int], texts: Texts, budget: Budget) -> Sequence[Draft]:
        if self._with_prompts and self._partial is None and self._scored is not None:
            prompts = chain.from_iterable(row.prompt for row in self.rows.values())
            self._partial = self._scored.joined_by(prompts)
        states = [self.rows[row] for row in rows]
        for state in states:
            state.guesses, state.drawn_from = [], [None]
        asked = budget.threshold is not None or self.stop is not None  # how sure the draft is
        if self.reads_wait and _all_plain(states) and not asked:
            self._draft_unread(rows, texts, budget.tokens)
        else:
            self._draft(rows, texts, budget)
        return [self._finished(row, text) for row, text in zip(rows, texts, strict=True)]

    def _finished(self, row: int, text: Sequence[int]) -> Draft:
        state = self.rows[row]
        probs = state.drawn_from if state.drawn else None
        exits = self.exits(row) if state.guesses else None
        return Draft(Tree.chain(text[-1], state.guesses), probs, exits)

    def _draft(self, rows: Sequence[int], texts: Texts, budget: Budget) -> None:
        """One token after another, each row as far as its budget and its confidence go."""
        active = [index for index, most in enumerate(budget.tokens) if most > 0]
        while active:
            on, behind = [rows[index] for index in active], [texts[index] for index in active]
            states = [self.rows[row] for row in on]
            last = [(s.guesses or text)[-1] for s, text in zip(states, behind, strict=True)]
            lengths = [len(s.guesses) + len(text) for s, text in zip(states, behind, strict=True)]
            logits, best = self.following(last, self._layout(on, lengths), on)
            tokens, confident = self._choose(logits, best, states, behind, budget.threshold)
            goes_on = []
            for index, state, token, sure in zip(active, states, tokens, confident, strict=True):
                if token is None:
                    continue
                state.guesses.append(token)
                if sure and len(state.guesses) < budget.tokens[index] and token not in state.ends:
                    goes_on.append(index)
            active = goes_on

    def following(
        self, last: Sequence[int], layout: TokenLayout, rows: Sequence[int]
    ) -> tuple[Tensor, Sequence[int] | None]:
        """The draft's logits behind these tokens, one a row, and where the best one of each is, if
        that was found on the way."""
        tokens = torch.tensor(last, device=self.target.model.device)
        return self._logits(self.hidden(tokens, layout, rows)), None

    def _layout(self, rows: Sequence[int], lengths: Sequence[int]) -> TokenLayout:
        """The last tokens of texts that are so long, guesses included."""
        slots = map(self.slot, rows, lengths)
        spans = [RowSpan(row, slot, 1) for row, slot in zip(rows, slots, strict=True)]
        return self.cache.layout_at(spans)

    def _draft_unread(self, rows: Sequence[int], texts: Texts, most: Sequence[int]) -> None:
        """Greedy drafts of known lengths. Nothing is decided on the way, so a GPU's tokens are read
        once, at the end. Going on behind an end of sequence costs less than to look for one."""
        steps: list[tuple[list[int], Tensor]] = []
        for depth in range(max(most, default=0)):
            active = [index for index, tokens in enumerate(most) if tokens > depth]
            if depth == 0:
                first = [texts[index][-1] for index in active]
                last = torch.tensor(first, device=self.target.model.device)
            elif len(active) < len(last):
                last = last[[steps[-1][0].index(index) for index in active]]
            on = [rows[index] for index in active]
            lengths = [len(texts[index]) + depth for index in active]
            last = self._best(self._logits(self.hidden(last, self._layout(on, lengths), on)))
            steps.append((active, last))
        read = iter(torch.cat([tokens for _, tokens in steps]).tolist() if steps else ())
        for active, _ in steps:
            for index in active:
                self.rows[rows[index]].guesses.append(next(read))

    def _logits(self, x: Tensor) -> Tensor:
        return self._partial(x) if self._partial else self.target.model.head(x)

    def _best(self, logits: Tensor) -> Tensor:
        best = likeliest(logits)[:, 0]
        return self._partial.tokens[best] if self._partial else best

    def _choose(
        self,
        logits: Tensor,
        best: Sequence[int] | None,
        states: Sequence[ChainRow],
        texts: Texts,
        threshold: float | None,
    ) -> tuple[Sequence[int | None], list[bool]]:
        """A token for each row (None: there is none), and whether the draft is sure enough to go
        on."""
        sure = [True] * len(states)
        if threshold is not None:
            sure = (logits.float().softmax(-1).amax(-1) >= threshold).tolist()
        if self.stop is not None:
            sure = [a and b for a, b in zip(sure, self.stop.goes_on(logits), strict=True)]
        if _all_plain(states):
            if best is None:
                return self._best(logits).tolist(), sure
            return [self._partial.ids[at] for at in best] if self._partial else best, sure
        return list(map(_guess, states, self.whole(logits), texts)), sure

    def whole(self, logits: Tensor) -> Tensor:
        """Logits of the whole vocabulary, of which penalties and biases speak: -inf for tokens that
        are not scored."""
        if self._partial is None:
            return logits
        whole = logits.new_full((len(logits), self.target.model.shape.vocabulary), -torch.inf)
        whole[:, self._partial.tokens] = logits
        return whole


def _guess(state: ChainRow, logits: Tensor, text: Sequence[int]) -> int | None:
    """One row's next guess, after its text and the guesses so far."""
    context = [*text, *state.guesses]
    if not state.drawn:
        return chosen(state.sampler, logits, context)
    for token, q in drawn(state.sampler, logits, context, len(text)):
        state.drawn_from.append(q)
        return token
    return None


def _all_plain(states: Sequence[ChainRow]) -> bool:
    return all(state.sampler.plain and not state.drawn for state in states)


def _scored(
    target: Target, vocabulary: int | PartialHead, tokens: Sequence[int]
) -> PartialHead | None:
    """The tokens that drafts choose from; None is all of them."""
    size = target.model.shape.vocabulary
    outside = [token for token in tokens if not 0 <= token < size]
    if outside:
        raise OptionError(
            f"tokens: {outside[0]} is outside 0 to {size - 1}, the model's vocabulary, so it could "
            "never be drafted; make the list with this model's tokenizer"
        )
    if isinstance(vocabulary, PartialHead):
        return vocabulary
    if not 0 <= vocabulary <= size:
        raise OptionError(
            f"vocabulary={vocabulary} is outside 0 to {size}, the model's; 0 scores all of it"
        )
    if vocabulary == size or not (vocabulary or tokens):
        return None
    return partial_head(target.model, vocabulary, tokens)


class LayerSession(ChainSession):
    """Drafts with the halves of a plan. Before its first skip a plan computes what the model
    computes. Verification (`reuse`) takes these states and runs the other layers only."""

    def __init__(
        self,
        target: Target,
        plan: LayerPlan | None,
        vocabulary: int | PartialHead = 0,
        reuse: bool = True,
        sample: bool = False,
        tokens: Sequence[int] = (),
    ) -> None:
        super().__init__(target, vocabulary, sample, tokens)
        self._reuse = reuse
        self._states: dict[int, list[Tensor]] = {}
        self.use(plan)

    def use(self, plan: LayerPlan | None) -> None:
        """Draft by this plan from now on; None drafts nothing."""
        self.plan = plan
        self._exact, self._pieces = 0, list[LayerPlan]()
        if plan:  # its first layers up to the first that is not run whole, and the others
            self._exact = min(plan.skipped_attention | plan.skipped_mlp, default=plan.stop)
            pieces = [_piece(plan, 0, self._exact), _piece(plan, self._exact, plan.stop)]
            self._pieces = [piece for piece in pieces if piece]

    def propose(self, rows: Sequence[int], texts: Texts, budget: Budget) -> Sequence[Draft]:
        if self.plan is None:
            return [Draft.chain(text) for text in texts]
        self._states = {row: [] for row in rows}
        return super().propose(rows, texts, budget)

    def hidden(self, tokens: Tensor, layout: TokenLayout, rows: Sequence[int]) -> Tensor:
        model = self.target.model
        x = model.embed(tokens)
        for piece in self._pieces:
            x = model.run(x, piece, self.cache, layout)
            if piece.stop == self._exact:
                for index, row in enumerate(rows):
                    self._states[row].append(x[index : index + 1])
        return x

    def exits(self, row: int) -> ExitStates | None:
        states = self._states[row]
        if not (self._reuse and self._exact and states):
            return None
        return ExitStates([self._exact] * len(states), torch.cat(states))


def _piece(plan: LayerPlan, start: int, stop: int) -> LayerPlan | None:
    """The plan's layers `start` to `stop` - 1, or None if nothing of them runs."""
    attention, mlp = (
        frozenset(layer for layer in skipped if start <= layer < stop)
        for skipped in (plan.skipped_attention, plan.skipped_mlp)
    )
    return None if len(attention & mlp) == stop - start else LayerPlan(start, stop, attention, mlp)
