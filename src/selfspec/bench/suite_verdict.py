"""The verdict on a suite result in one paragraph: what to use, what not, and why.

A loser's reason is the first that holds: few of its drafts are kept; drafting takes most of its
time; its passes over several tokens cost much more than plain decoding's; it hardly finds a guess.
All words come from figures of the JSON. Knows no HTML.
"""

from __future__ import annotations

from collections.abc import Sequence

from .schema import OURS, PLAIN, SuiteRun
from .suite_stats import Row, counts_of, near_tie, precisions, rows, turns_of
from .tables import percent

FEW = 0.4  # accepted over drafted, below which that is the reason
MUCH = 0.4  # of the time spent drafting, above which that is the reason
DEAR = 1.3  # times plain decoding's pass, above which a verifying pass is the reason
MOST_LOSERS = 3


def verdict(run: SuiteRun) -> str:
    """For the run's own precision: what to use at each batch size, what loses and why, and whether
    the texts are the same."""
    said, ours = [], []
    for batch in run.plan.batches:
        made = rows(run, batch)
        ours += [row for row in made if row.engine == OURS]
        contestants = [row for row in made if row.precision == precisions(run)[0]]
        contestants = [row for row in contestants if row.tokens_per_second is not None]
        where = f"At batch {batch}: " if len(run.plan.batches) > 1 else ""
        said.append(
            where + (_one(run, contestants, batch) if contestants else "nothing was measured.")
        )
    unfinished = " This run was interrupted, so it speaks of a part of the questions."
    return " ".join(said) + _sameness(ours) + ("" if run.complete else unfinished)


def _one(run: SuiteRun, contestants: Sequence[Row], batch: int) -> str:
    ours = [
        row for row in contestants if row.engine == OURS and not row.baseline and row.over_plain
    ]
    winners = [row for row in ours if row.speed > 1 and row.verdict in ("faster", None)]
    best = max(winners, key=lambda row: row.speed, default=None)
    if best is not None:
        words = (
            f"Use {settings(best.method)}: {_times(best)} our own plain decoding"
            f"{_against_best(contestants, best)}{_kept(best)}.{_equals(winners, best)}"
        )
        if best.verdict is None:
            words += " (One unit alone has no interval: ask more questions before you rely on it.)"
    elif ours:
        words = f"Keep plain decoding: none of our methods is clearly faster here.{_unsure(ours)}"
    else:
        words = "None of our methods took part."
    return words + _rivals(contestants) + _losers(run, ours, best, batch)


def _equals(winners: Sequence[Row], best: Row) -> str:
    """Those whose speed lies within the best one's interval: the order may be chance."""
    low = best.over_plain.low if best.over_plain and best.verdict else float("inf")
    near = [row for row in winners if row is not best and row.speed >= low]
    names = [f"{settings(row.method)} ({row.speed:.2f}x)" for row in near[:MOST_LOSERS]]
    return f" No worse within the interval: {', '.join(names)}." if names else ""


def _unsure(ours: Sequence[Row]) -> str:
    """The one that may be faster, if its interval leaves it open."""
    best = max(ours, key=lambda row: row.speed)
    said = f" {settings(best.method)} may be, at {_times(best)}: more questions would tell."
    return said if best.speed > 1 else ""


def settings(method: str) -> str:
    """A method as it is typed, in words: `ngram with longest=3, control fixed with tokens=6`."""
    draft, _, control = method.partition("@")
    parts = []
    for text, before in ((draft, ""), (control, "control ")):
        name, _, options = text.partition(":")
        told = f" with {options.replace(',', ', ')}" if options else ""
        parts += [f"{before}{name}{told}"] if name else []
    return ", ".join(parts)


def _times(row: Row) -> str:
    ratio = row.over_plain
    assert ratio is not None, "only rows with a baseline are judged"
    interval = "" if ratio.low == ratio.high else f" ({ratio.low:.2f} to {ratio.high:.2f})"
    return f"{ratio.value:.2f}x{interval}"


def _against_best(contestants: Sequence[Row], best: Row) -> str:
    """Against the fastest plain decoding of all, where others took part."""
    others = [row for row in contestants if row.baseline and row.engine != OURS]
    if best.over_best is None or not others:
        return ""
    if best.over_best == best.over_plain:
        return ", which is the fastest plain decoding here"
    return f", {best.over_best.value:.2f}x the fastest plain decoding here"


def _kept(row: Row) -> str:
    if row.tokens_per_verification is None:
        return ""
    accepted = f", {percent(row.acceptance)} of its drafts accepted"
    said = f"{row.tokens_per_verification:.2f} tokens a verification"
    return f" ({said}{'' if row.acceptance is None else accepted})"


def _rivals(contestants: Sequence[Row]) -> str:
    """Another engine that is faster than what we say to use is named."""
    ours = max(
        (row.tokens_per_second or 0.0 for row in contestants if row.engine == OURS), default=0.0
    )
    rival = max(contestants, key=lambda row: row.tokens_per_second or 0.0)
    if rival.engine == OURS or not ours:
        return ""
    times = (rival.tokens_per_second or 0.0) / ours
    return f" The fastest here is {rival.contestant}, at {times:.2f}x the best of ours."


def _losers(run: SuiteRun, ours: Sequence[Row], best: Row | None, batch: int) -> str:
    slower = [row for row in ours if row is not best and row.verdict == "slower"]
    losers = sorted(slower, key=lambda row: row.speed)[:MOST_LOSERS]
    named = [
        f"{settings(row.method)}: {row.speed:.2f}x, because {reason(run, row, batch)}"
        for row in losers
    ]
    return f" Not {'; nor '.join(named)}." if named else ""


def reason(run: SuiteRun, row: Row, batch: int) -> str:
    """Why a method does not pay, as far as the figures tell."""
    made = row.tokens_per_verification
    if row.acceptance is not None and row.acceptance < FEW:
        return f"{percent(row.acceptance)} of its drafts are accepted"
    if row.draft_share is not None and row.draft_share > MUCH:
        gained = f" for {made:.2f} tokens a verification" if made else ""
        return f"drafting takes {percent(row.draft_share)} of its time{gained}"
    dearness = pass_cost(run, row, batch)
    if dearness is not None and dearness > DEAR:
        return f"a pass over its drafts costs {dearness:.2f} times an ordinary one"
    if made is not None and made < 1.1:
        return f"it seldom finds a guess ({made:.2f} tokens a verification)"
    return "what it gains does not pay for what it costs here"


def pass_cost(run: SuiteRun, row: Row, batch: int) -> float | None:
    """Seconds of one of its verifying passes over seconds of one of plain decoding's."""
    costs = []
    for name in (row.contestant, f"{row.engine}/{PLAIN}"):
        counts = counts_of(turns_of(run, name, batch, row.task))
        passes = sum(each.verifications or 0 for each in counts)
        costs.append(sum(each.verify_seconds or 0.0 for each in counts) / passes if passes else 0.0)
    return costs[0] / costs[1] if all(costs) else None


def _sameness(ours: Sequence[Row]) -> str:
    compared = sum(row.compared for row in ours if not row.baseline)
    ties = [near_tie(each, row.precision) for row in ours for each in row.differences]
    if not compared:
        return ""
    if not ties:
        return f" All {compared} texts of our methods are token for token those of plain decoding."
    return (
        f" {len(ties)} of {compared} texts of our methods differ from plain decoding's; "
        f"{sum(ties)} of them at near-ties."
    )
