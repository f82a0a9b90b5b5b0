"""Rounds of the engine itself, timed over contexts that nobody computed, and what they take beside
their passes.

A round is more than its passes: layouts, choosing, keeping, bookkeeping. That share is measured as
rounds less the same passes, taken in turns, for one row and for several, with few tokens and with
more. Knows no candidates.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from ..control.fixed import FixedLength
from ..core.sampling import Sampler, SamplingParams
from ..draft.base import Drafter
from ..draft.from_layers.early_exit import EarlyExit
from ..draft.scripted import ScriptedDrafter
from ..engine.generation import Generation
from ..engine.row import Request
from ..model.compute.cache import KVCache
from ..model.compute.plan import LayerPlan
from ..model.layered import LayeredModel
from .steps import Bench, made_up_cache, seconds_of, undisturbed

WARM = 0  # rounds that do not count; the step before them reads a token
TIMED = 5
DRAFTS = 4  # of a round whose drafting is measured
MANY_ROWS, MANY_TOKENS = 4, 8  # where the host's share is measured, beside one of each
SHAPES = ((1, 1), (MANY_ROWS, 1), (1, MANY_TOKENS), (MANY_ROWS, MANY_TOKENS))
NEAR = 64  # entries behind these rounds


@dataclass(frozen=True)
class Host:
    """Seconds of a round beside its passes: of one row with one token, and what others add."""

    base: float
    row: float = 0.0
    """Each further row."""
    token: float = 0.0
    """Each token more than one a row."""
    draft: float = 0.0
    """Of one draft, beside its pass."""
    draft_row: float = 0.0
    """The same of each further row."""

    def round(self, rows: int, tokens: int) -> float:
        """Of a round with so many tokens a row, drafting left out."""
        return self.base + self.row * (rows - 1) + self.token * rows * (tokens - 1)

    def drafting(self, rows: int) -> float:
        """Of one more draft for each row."""
        return self.draft + self.draft_row * (rows - 1)


@dataclass(frozen=True)
class RoundSeconds:
    """One round: all of it, and its drafting."""

    all: float
    draft: float


def room_for(count: int, drafts: int) -> int:
    """Tokens that so many rounds may write to a row."""
    return (count + WARM + 2) * (drafts + 1) + 1


class Rounds:
    """Rounds of some rows, each behind `context` entries, with so many drafts a row. `cache`: one
    that has room for them, made for others."""

    def __init__(
        self,
        model: LayeredModel,
        rows: int,
        context: int,
        drafter: Drafter | None = None,
        tokens: int = 0,
        cache: KVCache | None = None,
    ) -> None:
        self._model, self._rows, self._context = model, rows, context
        self._drafter, self._tokens = drafter if tokens else None, tokens
        self._cache = cache or made_up_cache(model, rows, context, room_for(TIMED, tokens))

    def run(self, count: int = TIMED) -> list[RoundSeconds]:
        """So many rounds, one after another; the first ones warm up and are left out."""
        requests = [self._request(row, room_for(count, self._tokens)) for row in range(self._rows)]
        self._cache.assume(self._context)
        generation = Generation(self._model, requests, cache=self._cache)
        taken: list[RoundSeconds] = []
        generation.step()  # reads the prompts' last tokens
        while len(taken) < WARM + count:
            before, begin = generation.stats, time.perf_counter()
            generation.step()
            seconds, now = time.perf_counter() - begin, generation.stats
            rounds, drafting = now.rounds - before.rounds, now.draft_seconds - before.draft_seconds
            taken += [RoundSeconds(seconds / rounds, drafting / rounds)] * rounds
        return taken[WARM : WARM + count]

    def _request(self, row: int, most: int) -> Request:
        vocabulary = self._model.shape.vocabulary
        prompt = [(11 * place + 3 * row) % vocabulary for place in range(self._context + 1)]
        sampler = Sampler(SamplingParams(), 0)
        control = FixedLength(self._tokens) if self._drafter is not None else None
        return Request(prompt, sampler, most, drafter=self._drafter, controller=control)


def scripted(rows: int, tokens: int) -> ScriptedDrafter:
    """Guesses that cost nothing."""
    return ScriptedDrafter([list(range(5, 5 + 64 * (tokens + 1)))] * rows)


class HostParts:
    """Rounds next to the same passes, in turns: plain ones and ones with free guesses, of one row
    and of several, and drafts by the first layers."""

    def __init__(self, model: LayeredModel) -> None:
        layer = max(1, model.layers // 8)
        context = max(1, min(NEAR, model.shape.context - 8 * (MANY_TOKENS + 1)))
        bench = Bench(model, MANY_ROWS, context, MANY_TOKENS)
        self._pairs = [
            (
                Rounds(model, rows, context, scripted(rows, tokens - 1), tokens - 1),
                bench.scored(model.full_plan, rows, tokens),
            )
            for rows, tokens in SHAPES
        ]
        self._pairs += [
            (
                Rounds(model, rows, context, EarlyExit(layer), DRAFTS),
                bench.scored(LayerPlan(0, layer), rows, 1),
            )
            for rows in (1, MANY_ROWS)
        ]
        self._rounds: list[list[float]] = [[] for _ in self._pairs]
        self._passes: list[list[float]] = [[] for _ in self._pairs]

    def turn(self) -> None:
        """Each pair twice."""
        for index, (rounds, work) in enumerate(self._pairs):
            drafts, taken = index >= len(SHAPES), rounds.run(2)
            self._rounds[index] += [each.draft / DRAFTS if drafts else each.all for each in taken]
            self._passes[index] += [seconds_of(work) for _ in taken]

    @property
    def host(self) -> Host:
        """By all turns so far."""
        over = [
            undisturbed(ours) - undisturbed(passes)
            for ours, passes in zip(self._rounds, self._passes, strict=True)
        ]
        drafts = dict(zip((1, MANY_ROWS), over[-2:], strict=True))
        return _fitted(dict(zip(SHAPES, over, strict=False)), drafts)


def host_of(model: LayeredModel, turns: int = 6) -> Host:
    """What rounds take beside their passes."""
    parts = HostParts(model)
    for _ in range(turns):
        parts.turn()
    return parts.host


def _fitted(over: dict[tuple[int, int], float], drafts: dict[int, float]) -> Host:
    """Nothing is less than free, whatever noise says."""

    def more(high: float, low: float, units: float) -> float:
        return max(0.0, high - low) / units

    base, rows = max(0.0, over[1, 1]), MANY_ROWS
    row = more(over[rows, 1], base, rows - 1)
    token = more(over[rows, MANY_TOKENS], base + row * (rows - 1), rows * (MANY_TOKENS - 1))
    draft = max(0.0, drafts[1])
    return Host(base, row, token, draft, more(drafts[rows], draft, rows - 1))
