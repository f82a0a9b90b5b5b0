"""The cost model on a suite result: speed measured over speed predicted, for runs with isolated
steps (`--costs`)."""

from __future__ import annotations

from statistics import median

from .step_costs import CostModel
from .suite_schema import OURS, SuiteRun, Turn
from .suite_stats import bootstrap
from .timing import Ratio

REFERENCE = f"{OURS}/plain"


def reached(run: SuiteRun, contestant: str) -> Ratio | None:
    """Measured speed over the cost model's, with a 95% interval over questions; None without step
    times."""
    costs = CostModel([vars(point) for point in run.steps])
    pairs = _pairs(run, contestant, costs) if costs.known else []
    if not pairs:
        return None

    def of(sample: list[tuple[float, float]]) -> float:
        return sum(predicted for predicted, _ in sample) / sum(measured for _, measured in sample)

    return bootstrap(
        of(pairs), lambda chance: of(chance.choices(pairs, k=len(pairs))), [len(pairs)]
    )


def _pairs(run: SuiteRun, contestant: str, costs: CostModel) -> list[tuple[float, float]]:
    """Of each question asked alone: predicted and measured seconds of decoding."""
    prompt_tokens = {question.id: question.prompt_tokens for question in run.questions}
    found = []
    for question in prompt_tokens:
        turns = [
            turn
            for turn in run.turns
            if turn.questions == [question] and turn.decoded > 0 and turn.counts is not None
        ]
        passes = [_pass(turn) for turn in turns if turn.contestant == REFERENCE]
        mine = [turn for turn in turns if turn.contestant == contestant]
        if passes and mine and mine[0].counts is not None and mine[0].counts.verified:
            predicted = sum(
                costs.seconds(_as_told(turn, prompt_tokens[question]), median(passes))
                for turn in mine
            )
            found.append((predicted, sum(turn.decode_seconds or 0.0 for turn in mine)))
    return found


def _pass(turn: Turn) -> float:
    """Seconds of one of plain decoding's passes, without the host."""
    assert turn.counts is not None
    return (turn.counts.verify_seconds or 0.0) / max(1, turn.counts.verifications or 1)


def _as_told(turn: Turn, prompt_tokens: int) -> dict[str, object]:
    """A turn as the cost model reads it."""
    assert turn.counts is not None
    return {
        "method": turn.contestant.partition("/")[2],
        "prompt_tokens": prompt_tokens,
        "decoded": turn.decoded,
        "verified": turn.counts.verified,
        "drafted": turn.counts.drafted or 0,
        "draft_seconds": turn.counts.draft_seconds or 0.0,
    }
