"""Tables of a sweep from its JSON: speedups of the grid and by skipped halves, the threshold's
course; an estimate of time.

A cell's speedup is plain decoding's seconds a token over the setting's, each the mean over prompts
and rounds; plain decoding's are those of the two turns at the ends of the same group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Any

from .report import table

WINDOW = 64  # rounds of the moving average, as in Draft & Verify's Figure 5
HEAD_SHARE = 0.2  # of a pass, for the estimate


@dataclass(frozen=True)
class CellSpeed:
    """One setting: grid (exit, drafts) or skips (halves left out, most drafts)."""

    first: int
    drafts: int
    speedup: float
    acceptance: float
    tokens_per_verification: float
    identical: bool


def grid_speeds(run: dict[str, Any]) -> list[CellSpeed]:
    """The cells of the heat map that were measured."""
    return _speeds(run, "grid")


def skip_speeds(run: dict[str, Any]) -> list[CellSpeed]:
    """One for each number of skipped halves."""
    return _speeds(run, "skips")


def _speeds(run: dict[str, Any], part: str) -> list[CellSpeed]:
    turns = [turn for turn in run["turns"] if turn["part"] == part]
    plain: dict[str, list[float]] = {}
    for turn in turns:
        if turn["kind"] == "plain":
            plain.setdefault(turn["group"], []).append(turn["seconds"] / turn["decoded"])
    found = []
    for setting in dict.fromkeys(
        (turn["first"], turn["drafts"]) for turn in turns if turn["kind"] == part
    ):
        mine = [
            turn
            for turn in turns
            if turn["kind"] == part and (turn["first"], turn["drafts"]) == setting
        ]
        speedup = fmean(fmean(plain[turn["group"]]) for turn in mine) / fmean(
            turn["seconds"] / turn["decoded"] for turn in mine
        )
        drafted = sum(turn["drafted"] for turn in mine)
        found.append(
            CellSpeed(
                *setting,
                speedup,
                sum(turn["accepted"] for turn in mine) / max(1, drafted),
                sum(turn["decoded"] for turn in mine) / sum(turn["verifications"] for turn in mine),
                all(turn["identical"] for turn in mine),
            )
        )
    return sorted(found, key=lambda cell: (cell.first, cell.drafts))


def unrest(run: dict[str, Any]) -> float:
    """How far apart the two plain turns of a group were on average, as a share: what a speedup may
    be off by for no reason."""
    ends: dict[str, list[float]] = {}
    for turn in run["turns"]:
        if turn["kind"] == "plain":
            ends.setdefault(turn["group"], []).append(turn["seconds"] / turn["decoded"])
    return fmean(abs(a - b) / ((a + b) / 2) for a, b in ends.values()) if ends else 0.0


def smoothed(run: dict[str, Any], window: int = WINDOW) -> list[tuple[float, float]]:
    """Moving average and standard deviation of the threshold over the last `window` rounds, round
    by round."""
    values = [each["threshold"] for each in run["gamma"]]
    pieces = [values[max(0, end - window) : end] for end in range(1, len(values) + 1)]
    return [(fmean(piece), pstdev(piece)) for piece in pieces]


def markdown(run: dict[str, Any]) -> str:
    """All tables, with what they say in a sentence."""
    parts = []
    if cells := grid_speeds(run):
        best = max(cells, key=lambda cell: cell.speedup)
        drafts = sorted({cell.drafts for cell in cells})
        by = {(cell.first, cell.drafts): cell for cell in cells}
        rows = [
            [
                str(layer),
                *(f"{by[layer, k].speedup:.2f}" if (layer, k) in by else "-" for k in drafts),
                _accepted(by, layer, drafts),
            ]
            for layer in sorted({cell.first for cell in cells})
        ]
        parts.append(
            "Speed over plain decoding by exit layer (rows) and drafts a round (columns); "
            "acceptance at the fewest drafts\n"
        )
        parts.append(table(["E \\ K", *map(str, drafts), "accepted"], rows))
        parts.append(
            f"\nBest: exit {best.first} with {best.drafts} drafts, {best.speedup:.2f} times plain "
            f"({best.acceptance:.0%} accepted).\n"
        )
    if cells := skip_speeds(run):
        best = max(cells, key=lambda cell: cell.speedup)
        rows = [
            [
                str(c.first),
                f"{c.speedup:.2f}",
                f"{c.acceptance:.0%}",
                f"{c.tokens_per_verification:.2f}",
            ]
            for c in cells
        ]
        parts.append(f"Halves left out, by {run['options']['by']}, adaptive control\n")
        parts.append(table(["halves", "speedup", "accepted", "tokens/verification"], rows))
        parts.append(
            f"\nBest: {best.first} of {2 * run['layers']} halves left out, {best.speedup:.2f} "
            f"times plain.\n"
        )
    if run["gamma"]:
        last = smoothed(run)[-1]
        parts.append(
            f"Threshold: from {run['gamma'][0]['threshold']:.3f} to "
            f"{run['gamma'][-1]['threshold']:.3f} in {len(run['gamma'])} "
            f"rounds (last {WINDOW}: mean {last[0]:.3f}, deviation {last[1]:.3f}).\n"
        )
    if run["turns"]:
        same = (
            "all texts are those of plain decoding"
            if all(t["identical"] for t in run["turns"])
            else "NOT all texts are equal"
        )
        parts.append(f"Plain turns of one group differ by {unrest(run):.1%} on average; {same}.")
    return "\n".join(parts) or "nothing was measured"


def _accepted(by: dict[tuple[int, int], CellSpeed], layer: int, drafts: Sequence[int]) -> str:
    cell = next((by[layer, k] for k in drafts if (layer, k) in by), None)
    return f"{cell.acceptance:.0%}" if cell else "-"


def seconds_of(cost: float, drafts: int, acceptance: float) -> float:
    """Steps a token of a round with `drafts` drafts at `cost` steps each, if each is kept with this
    chance."""
    tokens = sum(acceptance**place for place in range(drafts + 1))
    return (drafts * cost + 1 + 0.03 * drafts) / tokens


def estimate(
    settings: Sequence[tuple[str, int, int]],
    layers: int,
    step: float,
    new_tokens: int,
    chances: Sequence[float],
) -> float:
    """Seconds that turns will take: (kind, first, drafts) each; `chances[E]` is the acceptance of
    exit E, as far as known."""
    total = 0.0
    for kind, first, drafts in settings:
        if kind == "plain":
            steps = 1.0
        elif kind == "grid":
            steps = seconds_of(
                HEAD_SHARE + (1 - HEAD_SHARE) * first / layers, drafts, chances[first]
            )
        else:  # the controller stops early where little is kept
            steps = seconds_of(1 - (1 - HEAD_SHARE) * (first or layers // 2) / (2 * layers), 3, 0.6)
        total += steps * step * new_tokens
    return total
