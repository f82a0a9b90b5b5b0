"""The cost model of a speculative round, and the isolated step times that go into it.

A round that drafts n tokens should cost n drafts and one pass over n + 1 tokens, nothing else. In
units of plain decoding's pass:

    predicted seconds of an answer = pass * (sum over rounds of v(n + 1) + drafts * d)

v(n) = verify(n)/verify(1) and d = draft/verify(1) are measured alone, on a cache that nothing else
uses, after every question (so that drift hits both) at a few contexts, between which we
interpolate. `pass` is what plain decoding's pass took at the same question, without the host. So
what a round spends beside its steps counts against it. Does not know prompts or reports.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any, Protocol

import torch

from ..core.contract import Budget
from ..core.sampling import Sampler, SamplingParams
from ..draft.base import DraftSession, Target
from ..draft.chain import ChainSession
from ..draft.registry import resolve
from ..model.layered import LayeredModel
from .card import Passes
from .suite_schema import StepPoint
from .timing import timed

CONTEXTS = (128, 512, 1024)
DRAFTS = 4  # drafted at a time to learn what one costs
VERIFY = "verify"


class StepTimer:
    """Measures all isolated steps once each time it is asked."""

    def __init__(
        self,
        model: LayeredModel,
        ids: Sequence[int],
        methods: Mapping[str, Mapping[str, Any]],
        most: int,
    ) -> None:
        """`ids`: a text as long as the longest context and `most` more. `methods`: what
        `LLM.generate` is told for each."""
        self.points: list[StepPoint] = []
        self._turns: list[tuple[StepPoint, _Step]] = []
        self._asked = 0
        for context in fitting(CONTEXTS, min(len(ids), model.shape.context) - most):
            passes = Passes(model, ids, context, most)
            for count in range(1, most + 1):
                self._add(StepPoint(VERIFY, context, count), _Pass(passes, count))
            for method, options in methods.items():
                drafting = _chain(model, passes, ids[: context + 1], options)
                if drafting is not None:
                    self._add(
                        StepPoint(method, context, 1), _Drafts(drafting, passes, ids[: context + 1])
                    )

    def _add(self, point: StepPoint, step: _Step) -> None:
        if (
            step.seconds() is not None
        ):  # also warms it up; a drafter that drafts nothing here has no step
            self.points.append(point)
            self._turns.append((point, step))

    def measure(self) -> None:
        """Every step once, beginning somewhere else each time."""
        shift = 7 * self._asked % max(1, len(self._turns))
        self._asked += 1
        for point, step in [*self._turns[shift:], *self._turns[:shift]]:
            seconds = step.seconds()
            assert seconds is not None, "a drafter that could draft here can do it again"
            point.seconds.append(seconds)


class _Step(Protocol):
    def seconds(self) -> float | None: ...


class _Pass:
    def __init__(self, passes: Passes, count: int) -> None:
        self._turn = timed(lambda: passes.run(count))

    @torch.inference_mode()
    def seconds(self) -> float | None:
        return self._turn()


class _Drafts:
    """One draft out of several in a row."""

    def __init__(self, drafting: DraftSession, passes: Passes, text: Sequence[int]) -> None:
        self._drafting, self._passes, self._text = drafting, passes, text

    @torch.inference_mode()
    def seconds(self) -> float | None:
        start = time.perf_counter()
        drafts = self._drafting.propose([0], [self._text], Budget([DRAFTS]))
        seconds = time.perf_counter() - start
        self._passes.cache.rollback(0, self._passes.context)
        made = len(drafts[0].guesses)
        return seconds / made if made else None


def fitting(contexts: Sequence[int], room: int) -> list[int]:
    """Those contexts that there is room for; what room there is if there are none."""
    return [context for context in contexts if context <= room] or [max(1, room)]


def _chain(
    model: LayeredModel, passes: Passes, text: Sequence[int], options: Mapping[str, Any]
) -> DraftSession | None:
    """The method's drafter at work, if what it does is run part of a model token by token; what
    others cost hangs on the text."""
    drafter, _ = resolve(options["draft"], options.get("draft_options"), None, None)
    if drafter is None:
        return None
    drafting = drafter.start(Target(model, passes.cache))
    drafting.admit(0, text, Sampler(SamplingParams()))
    return drafting if isinstance(drafting, ChainSession) else None


class CostModel:
    """Reads the points of a result."""

    def __init__(self, points: Sequence[Mapping[str, Any]]) -> None:
        self._verify: dict[tuple[int, int], list[float]] = {
            (p["context"], p["tokens"]): p["seconds"]
            for p in points
            if p["kind"] == VERIFY and p["seconds"]
        }
        self._draft: dict[tuple[str, int], list[float]] = {
            (p["kind"], p["context"]): p["seconds"]
            for p in points
            if p["kind"] != VERIFY and p["seconds"]
        }
        self._contexts = sorted({context for context, _ in self._verify})

    @property
    def known(self) -> bool:
        return bool(self._verify)

    def draft(self, method: str, context: float) -> float | None:
        """d: one draft in plain passes; None for drafters that were not measured alone."""
        values = {
            c: _paired(self._draft[method, c], self._verify[c, 1])
            for c in self._contexts
            if (method, c) in self._draft
        }
        return _between(values, context) if values else None

    def verify(self, tokens: int, context: float) -> float:
        """v: a pass over so many tokens in plain passes."""
        return _between({c: self._at(c, tokens) for c in self._contexts}, context)

    def _at(self, context: int, tokens: int) -> float:
        counts = sorted(count for c, count in self._verify if c == context)
        values = {
            count: _paired(self._verify[context, count], self._verify[context, 1])
            for count in counts
        }
        if tokens <= counts[-1] or len(counts) == 1:
            return _between(values, tokens)
        slope = (values[counts[-1]] - values[1]) / (counts[-1] - 1)
        return values[counts[-1]] + (tokens - counts[-1]) * slope

    def seconds(self, turn: Mapping[str, Any], plain_pass: float) -> float:
        """What an answer should have taken."""
        context = turn["prompt_tokens"] + turn["decoded"] / 2
        passes = sum(
            rounds * self.verify(count, context)
            for count, rounds in enumerate(turn["verified"], start=1)
            if rounds
        )
        each = self.draft(turn["method"], context)
        drafting = turn["draft_seconds"] if each is None else plain_pass * turn["drafted"] * each
        return float(plain_pass * passes + drafting)


def _paired(first: Sequence[float], second: Sequence[float]) -> float:
    return median(a / b for a, b in zip(first, second, strict=True))


def _between(values: Mapping[int, float], at: float) -> float:
    """Linear between the nearest two keys; the outermost value beyond them."""
    keys = sorted(values)
    for low, high in pairwise(keys):
        if low <= at <= high:
            return values[low] + (values[high] - values[low]) * (at - low) / (high - low)
    return values[keys[0] if at < keys[0] else keys[-1]]
