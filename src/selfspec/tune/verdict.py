"""What a tuning says in plain words: use this, do without, or train something first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..profile import Way
from .candidates import Plain, plain_round
from .steps import Steps

WORTH = 1.05  # a gain below this is none
Answer = Literal["helps", "does not", "undecided"]


@dataclass(frozen=True)
class Training:
    """What a trained exit would bring."""

    layer: int
    acceptance: float
    gain: float
    hours: float


def answer(ways: Sequence[Way]) -> Answer:
    """By the fastest way's measured interval. Without any way, none was predicted to pay."""
    best = fastest(ways)
    if best is None or best.high is None:
        return "undecided" if ways else "does not"
    if best.high < WORTH:
        return "does not"
    return "helps" if (best.low or 0.0) > WORTH else "undecided"


def fastest(ways: Sequence[Way]) -> Way | None:
    """The way with the highest measured speed."""
    timed = [way for way in ways if way.measured is not None]
    return max(timed, key=lambda way: way.measured or 0.0, default=None)


def words(
    ways: Sequence[Way],
    training: Training | None,
    *,
    exact: bool = True,
    busy: bool = False,
    short: bool = False,
    stopped: bool = False,
) -> str:
    """The verdict as a paragraph. `short`: there was no time for more than the least."""
    best, said = fastest(ways), answer(ways)
    text = []
    if not ways:
        text.append(
            "Do not use speculation here: of all that may draft, nothing is predicted to beat "
            "plain decoding."
        )
    elif best is None or best.measured is None:
        likely = max(ways, key=lambda way: way.predicted or 0.0)
        said_of_it = (
            f"{likely.predicted:.2f} times plain decoding" if likely.predicted else "unknown"
        )
        text.append(f"Nothing was timed. The best so far by prediction is {likely}: {said_of_it}.")
    elif said == "helps":
        text.append(
            f"Use {best}: {best.measured:.2f} times plain decoding here (95%: {best.low:.2f} to "
            f"{best.high:.2f})."
        )
    elif said == "does not":
        text.append(
            "Do not use speculation here: the best way found reaches "
            f"{best.measured:.2f} times plain decoding ({best.low:.2f} to {best.high:.2f}), {best}."
        )
    else:
        text.append(
            f"Undecided: {best} reaches {best.measured:.2f} times plain decoding, but the interval "
            f"{best.low:.2f} to {best.high:.2f} holds {WORTH}. Measure longer with --minutes, or "
            "with more --questions."
        )
    if training and training.gain > max(WORTH, best.measured or 0.0 if best else 0.0):
        text.append(
            f"Training an exit after {training.layer} layers would pay: about "
            f"{training.gain:.2f} times at {training.acceptance:.0%} accepted, some "
            f"{training.hours:.1f} hours on this machine (selfspec train MODEL --recipe layerskip)."
        )
    if not exact:
        text.append("WARNING: a text differed from plain decoding's; please report this.")
    if busy:
        text.append(
            "The machine was busy meanwhile, also when it was measured again, so figures are rough."
        )
    if stopped:
        text.append("It was stopped early: this is the best so far.")
    elif short:
        text.append(
            "The time was too short to look far: this is the best so far, and its interval says "
            "how sure it is. Give more --minutes."
        )
    return " ".join(text)


ACCEPTED = 0.75  # of a trained exit's drafts, as LayerSkip reports
STEPS, STEP_TOKENS = 3000, 1024  # of a training run that reaches it on a task


def training(steps: Steps, layers: int, plain: Plain) -> Training | None:
    """The exit that would pay most if it were trained, by costs alone."""
    found: list[Training] = []
    hours = STEPS * 3 * STEP_TOKENS / 128 * steps.pass_seconds((layers, layers), 1, 128, 128, 128)
    context, rows, host = plain.context, plain.rows, plain.host
    alone = plain_round(steps, layers, plain)
    for layer in range(max(1, layers // 5), layers // 2 + 1):
        draft = steps.pass_seconds((layer, layer), rows, 1, context, rows) + host.drafting(rows)
        rest = layers - layer
        for tokens in range(1, 9):
            kept = sum(ACCEPTED**depth for depth in range(1, tokens + 1))
            seconds = tokens * draft + host.round(rows, tokens + 1)
            scored = rows * (tokens + 1)
            seconds += steps.pass_seconds((rest, rest), rows, tokens + 1, context, scored)
            seconds += steps.pass_seconds((layer, layer), rows, 1, context, 0)
            found.append(Training(layer, ACCEPTED, (1 + kept) * alone / seconds, hours / 3600))
    return max(found, key=lambda each: each.gain, default=None)
