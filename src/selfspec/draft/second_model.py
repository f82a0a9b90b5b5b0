"""What drafters share whose model, or view of the target, has a cache of its own.

Before a draft it reads what was kept since its last one (in the same pass as its first new token,
unless that is much) and forgets what was rejected. Does not know where the model comes from.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..core.contract import Budget, Draft
from ..model.compute.cache import RowSpan, TokenLayout
from ..model.compute.cpu.choosing import likeliest
from ..model.compute.plan import LayerPlan
from ..model.layered import PREFILL_CHUNK
from ..model.partial_head import PartialHead
from .base import Target, Texts
from .chain import ChainSession


class SecondModelSession(ChainSession):
    """At work. `target` is the second model and its cache, `plan` says which halves of it run."""

    def __init__(
        self,
        target: Target,
        vocabulary: int | PartialHead,
        plan: LayerPlan | None = None,
        sample: bool = False,
    ) -> None:
        super().__init__(target, vocabulary, sample)
        self._plan = plan or target.model.full_plan
        self._read = defaultdict[int, list[int]](list)  # what its cache holds of each row
        self._behind: dict[int, Sequence[int]] = {}  # to read before the first new token

    def drop(self, row: int) -> None:
        super().drop(row)
        self._read.pop(row, None)

    def propose(self, rows: Sequence[int], texts: Texts, budget: Budget) -> Sequence[Draft]:
        context = self.target.model.shape.context  # may be shorter than the other model's
        most = [
            max(0, min(tokens, context - len(text)))
            for tokens, text in zip(budget.tokens, texts, strict=True)
        ]
        for row, text, tokens in zip(rows, texts, most, strict=True):
            if tokens:
                self._behind[row] = self._catch_up(row, text[:-1])
        return super().propose(rows, texts, replace(budget, tokens=most))

    def _catch_up(self, row: int, known: Sequence[int]) -> Sequence[int]:
        """Forget what was rejected, read most of what is new. The rest is for the first step."""
        cache, read = self.cache, self._read[row]
        cache.reserve_rows(row + 1)
        cache.reserve(len(known) + 64)
        differ = (i for i, (old, new) in enumerate(zip(read, known, strict=False)) if old != new)
        at = next(differ, min(len(read), len(known)))  # how many first tokens are the same
        cache.rollback(row, at)
        at = int(cache.lengths[row, list(self._plan.attention_layers)].min())
        cache.settle(row, at)
        while len(known) - at > PREFILL_CHUNK:
            self._run(known[at : at + PREFILL_CHUNK], [RowSpan(row, at, PREFILL_CHUNK)])
            at += PREFILL_CHUNK
        assert int(cache.lengths[row, list(self._plan.attention_layers)].min()) == at
        self._read[row] = list(known)
        return known[at:]

    def named(self, rows: Sequence[int], texts: Texts, count: int) -> Sequence[Sequence[int]]:
        """The likeliest next tokens. A text that fills the context has none."""
        context = self.target.model.shape.context
        some = [at for at, text in enumerate(texts) if len(text) <= context]
        found: list[list[int]] = [[] for _ in rows]
        if not some:
            return found
        unread, spans = list[int](), list[RowSpan]()
        for at in some:
            behind = [*self._catch_up(rows[at], texts[at][:-1]), texts[at][-1]]
            spans.append(RowSpan(rows[at], len(texts[at]) - len(behind), len(behind)))
            self._read[rows[at]].append(texts[at][-1])
            unread += behind
        x = self._run(unread, spans)
        logits = self.target.model.head(x[_ends(spans, x)])
        for at, tokens in zip(some, likeliest(logits, count).tolist(), strict=True):
            found[at] = tokens
        return found

    def hidden(self, tokens: Tensor, layout: TokenLayout, rows: Sequence[int]) -> Tensor:
        new = tokens.tolist()
        behind = [self._behind.pop(row, ()) for row in rows]
        for row, token in zip(rows, new, strict=True):
            self._read[row].append(token)
        if not any(behind):
            model = self.target.model
            return model.run(model.embed(tokens), self._plan, self.cache, layout)
        spans = [
            RowSpan(s.row, s.first - len(left), len(left) + 1)
            for s, left in zip(layout.spans, behind, strict=True)
        ]
        unread = [token for left, own in zip(behind, new, strict=True) for token in (*left, own)]
        x = self._run(unread, spans)
        return x[_ends(spans, x)]

    def _run(self, tokens: Sequence[int], spans: Sequence[RowSpan]) -> Tensor:
        model = self.target.model
        x = model.embed(torch.tensor(tokens, device=model.device))
        return model.run(x, self._plan, self.cache, self.cache.layout_at(spans))


def _ends(spans: Sequence[RowSpan], x: Tensor) -> Tensor:
    """Where each span's last token stands."""
    return torch.tensor([span.count for span in spans], device=x.device).cumsum(0) - 1
