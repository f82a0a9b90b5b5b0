"""Ways of drafting beside one: the same with more or fewer drafts, another rule for how many, or
another option of its drafter. From the fastest way a tuning climbs over these. Knows no model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from ..profile import Way

STEPS = (1, -1, 3, -2)  # drafts more or fewer
RULES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("cost-aware", {}),
    ("confidence", {"threshold": 0.3}),
    ("confidence", {"threshold": 0.7}),
    ("adaptive", {}),
)
OPTIONS: dict[str, tuple[tuple[str, Any], ...]] = {
    "quantised": (
        ("unsure", 0.4), ("sure", 0.3), ("first", "none"), ("first", "recycle"), ("unsure", 0.7),
    ),
    "early-exit": (("weights", "int8"), ("weights", "int4")),
    "layer-skip": (("weights", "int8"), ("weights", "int4")),
    "dynamic-exit": (
        ("schedule", "all"), ("deepest", 0.75), ("schedule", "offline"), ("threshold", 0.8),
    ),
    "hybrid": (),
}  # fmt: skip
"""What may be set anew, by drafter. Which layer and which halves was searched before."""
BESIDE = 4  # neighbours that are timed together


def neighbours(way: Way, copies: bool = True) -> Iterator[Way]:
    """Each differs in one thing; the likeliest to pay first. `copies`: whether a copy in fewer bits
    may draft where none does so far."""
    plain = replace(way, predicted=None, measured=None, low=None, high=None)
    if plain.draft not in OPTIONS:  # `auto` decides all of it, and others are not known
        return
    if plain.control == "fixed":
        count = int(plain.control_options["tokens"])
        for step in STEPS:
            if count + step > 0:
                yield replace(plain, control_options={"tokens": count + step})
    for name, value in OPTIONS[plain.draft]:
        if plain.draft_options.get(name) != value and (copies or name != "weights"):
            yield replace(plain, draft_options={**plain.draft_options, name: value})
    for control, options in RULES:
        if (plain.control, plain.control_options) != (control, options):
            yield replace(plain, control=control, control_options=dict(options))


def climbed(
    ways: Sequence[Way],
    speeds: Callable[[Sequence[Way]], Sequence[float]],
    until: float,
    copies: bool = True,
) -> Iterator[Way]:
    """The fastest of them, then whatever neighbour is faster, step by step until none is or the
    clock says `until`. `speeds`: of ways that are timed together."""
    best: Way | None = None
    offers, seen = list(ways), {str(way) for way in ways}
    while offers and time.perf_counter() < until:
        offers += [best] if best else []
        taken = speeds(offers)
        found = offers[taken.index(max(taken))]
        if best is None or str(found) != str(best):
            best = found
            yield best
        fresh = [each for each in neighbours(best, copies) if str(each) not in seen]
        offers = fresh[:BESIDE]
        seen |= {str(each) for each in offers}
