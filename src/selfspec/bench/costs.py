"""The cost model of a speculative round, the isolated step times that go into it, and how near to
it a run came.

A round that drafts n tokens should cost n drafts and one pass over n + 1 tokens, nothing else. In
units of plain decoding's pass:

    predicted seconds of an answer = pass * (sum over rounds of v(n + 1) + drafts * d)

v(n) = verify(n)/verify(1) and d = draft/verify(1) are measured alone, on a cache that nothing else
uses, after every question (so that drift hits both) at a few contexts, between which we
interpolate. `pass` is what plain decoding's pass took at the same question, without the host. So
what a round spends beside its steps counts against it. Does not know prompts or tables.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from ..core.contract import Budget
from ..core.sampling import Sampler, SamplingParams
from ..draft.base import DraftSession, Target
from ..draft.chain import ChainSession
from ..draft.registry import resolve
from ..model.layered import LayeredModel
from .schema import OURS, PLAIN, StepPoint, SuiteRun, Turn
from .suite_stats import bootstrap
from .timing import Ratio, timed

CONTEXTS = (128, 512, 1024)
DRAFTS = 4  # drafted at a time to learn what one costs
VERIFY = "verify"
Step = Callable[[], float | None]  # its seconds; None where there is nothing to draft


class Passes:
    """Our engine with `context` tokens in its cache: passes over some more, forgotten again."""

    def __init__(self, model: LayeredModel, ids: Sequence[int], context: int, longest: int) -> None:
        self.model, self.context = model, context
        self.cache = model.new_cache(rows=1, capacity=context + longest + 1)
        model.prefill([list(ids[:context])], self.cache)
        self.following = torch.tensor(list(ids[context : context + longest]))

    def run(self, tokens: int) -> None:
        """One pass with logits of every token; the cache is as before afterwards."""
        place = self.cache.layout([tokens])
        self.model.forward(self.following[:tokens], self.cache, place)
        self.cache.rollback(0, self.context)

    def contestant(self, tokens: int) -> Callable[[], float]:
        return timed(lambda: self.run(tokens))


@torch.inference_mode()
def read_window(
    model: LayeredModel, ids: Sequence[int], last: int | None = None
) -> tuple[float, list[int]]:
    """The summed loss of all ids but the first, or of the `last` ones, and what was likeliest in
    their places."""
    window = torch.tensor(list(ids), device=model.device)
    cache = model.new_cache(1, len(ids))
    logits = model.forward(window[:-1], cache, cache.layout([len(ids) - 1]))
    count = len(ids) - 1 if last is None else last
    return loss_and_likeliest(logits[len(logits) - count :], window[len(window) - count :])


def loss_and_likeliest(logits: torch.Tensor, wanted: torch.Tensor) -> tuple[float, list[int]]:
    """Of logits, those tokens' summed loss and the likeliest tokens."""
    loss = torch.nn.functional.cross_entropy(logits.double(), wanted, reduction="sum")
    return loss.item(), logits.argmax(-1).tolist()


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
        self._turns: list[tuple[StepPoint, Step]] = []
        self._asked = 0
        for context in fitting(CONTEXTS, min(len(ids), model.shape.context) - most):
            passes = Passes(model, ids, context, most)
            for count in range(1, most + 1):
                self._add(StepPoint(VERIFY, context, count), passes.contestant(count))
            for method, options in methods.items():
                drafting = _chain(model, passes, ids[: context + 1], options)
                if drafting is not None:
                    point = StepPoint(method, context, 1)
                    self._add(point, _drafts(drafting, passes, ids[: context + 1]))

    @torch.inference_mode()
    def _add(self, point: StepPoint, step: Step) -> None:
        if step() is not None:  # warms it up; a drafter that drafts nothing here has no step
            self.points.append(point)
            self._turns.append((point, step))

    @torch.inference_mode()
    def measure(self) -> None:
        """Every step once, beginning somewhere else each time."""
        shift = 7 * self._asked % max(1, len(self._turns))
        self._asked += 1
        for point, step in [*self._turns[shift:], *self._turns[:shift]]:
            seconds = step()
            assert seconds is not None, "a drafter that could draft here can do it again"
            point.seconds.append(seconds)


def fitting(contexts: Sequence[int], room: int) -> list[int]:
    """Those contexts that there is room for; what room there is if there are none."""
    return [context for context in contexts if context <= room] or [max(1, room)]


def _drafts(drafting: DraftSession, passes: Passes, text: Sequence[int]) -> Step:
    """One draft out of several in a row."""

    def step() -> float | None:
        start = time.perf_counter()
        draft = drafting.propose([0], [text], Budget([DRAFTS]))[0]
        seconds = time.perf_counter() - start
        passes.cache.rollback(0, passes.context)
        made = len(draft.guesses)
        return seconds / made if made else None

    return step


def _chain(
    model: LayeredModel, passes: Passes, text: Sequence[int], options: Mapping[str, Any]
) -> DraftSession | None:
    """The method's drafter at work, if it runs part of a model token by token; what others cost
    hangs on the text."""
    drafter, _ = resolve(options["draft"], options.get("draft_options"), None, None)
    if drafter is None:
        return None
    drafting = drafter.start(Target(model, passes.cache))
    drafting.admit(0, text, Sampler(SamplingParams()))
    return drafting if isinstance(drafting, ChainSession) else None


class CostModel:
    """Reads the points of a result."""

    def __init__(self, points: Sequence[StepPoint]) -> None:
        timed = [point for point in points if point.seconds]
        self._verify = {(p.context, p.tokens): p.seconds for p in timed if p.kind == VERIFY}
        self._draft = {(p.kind, p.context): p.seconds for p in timed if p.kind != VERIFY}
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
        one = self._verify[context, 1]
        values = {count: _paired(self._verify[context, count], one) for count in counts}
        if tokens <= counts[-1] or len(counts) == 1:
            return _between(values, tokens)
        slope = (values[counts[-1]] - values[1]) / (counts[-1] - 1)
        return values[counts[-1]] + (tokens - counts[-1]) * slope

    def seconds(self, turn: Turn, prompt_tokens: int, plain_pass: float) -> float:
        """What an answer should have taken."""
        counts, context = turn.counts, prompt_tokens + turn.decoded / 2
        assert counts is not None, "only turns whose rounds are known have a prediction"
        passes = sum(
            rounds * self.verify(tokens, context)
            for tokens, rounds in enumerate(counts.verified, start=1)
            if rounds
        )
        each = self.draft(turn.contestant.partition("/")[2], context)
        if each is None:
            return plain_pass * passes + (counts.draft_seconds or 0.0)
        return plain_pass * (passes + (counts.drafted or 0) * each)


def reached(run: SuiteRun, contestant: str, costs: CostModel) -> Ratio | None:
    """Measured speed over the cost model's, with a 95% interval over questions asked alone."""
    pairs: list[tuple[float, float]] = []
    for question in run.questions if costs.known else ():
        turns = [
            turn
            for turn in run.turns
            if turn.questions == [question.id] and turn.decoded > 0 and turn.counts is not None
        ]
        passes = [_pass(turn) for turn in turns if turn.contestant == f"{OURS}/{PLAIN}"]
        mine = [turn for turn in turns if turn.contestant == contestant]
        if passes and mine and mine[0].counts is not None and mine[0].counts.verified:
            own = median(passes)
            predicted = sum(costs.seconds(turn, question.prompt_tokens, own) for turn in mine)
            pairs.append((predicted, sum(turn.decode_seconds or 0.0 for turn in mine)))
    if not pairs:
        return None

    def of(sample: list[tuple[float, float]]) -> float:
        return sum(predicted for predicted, _ in sample) / sum(measured for _, measured in sample)

    return bootstrap(
        of(pairs), lambda chance: of(chance.choices(pairs, k=len(pairs))), [len(pairs)]
    )


def _pass(turn: Turn) -> float:
    """Seconds of one of plain decoding's passes, without the host."""
    assert turn.counts is not None
    return (turn.counts.verify_seconds or 0.0) / max(1, turn.counts.verifications or 1)


def _paired(first: Sequence[float], second: Sequence[float]) -> float:
    return median(a / b for a, b in zip(first, second, strict=True))


def _between(values: Mapping[int, float], at: float) -> float:
    """Linear between the nearest two keys; the outermost value beyond them."""
    keys = sorted(values)
    for low, high in pairwise(keys):
        if low <= at <= high:
            return values[low] + (values[high] - values[low]) * (at - low) / (high - low)
    return values[keys[0] if at < keys[0] else keys[-1]]
