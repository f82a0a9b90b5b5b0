"""Tables of a suite result, from its JSON alone. Rows that lose or fail stay in; only like
precisions share a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .report import table
from .step_costs import CostModel
from .suite_costs import reached
from .suite_schema import SuiteRun
from .suite_stats import Row, best_baseline, near_tie, overhead, precisions, rows, tasks_of
from .timing import Ratio

NAMED = 60  # characters of a failure in a table
Form = Callable[[float], str]


def markdown(run: SuiteRun) -> str:
    """The whole report: what was asked, then for each precision and batch size speeds and
    details."""
    parts = [heading(run)]
    for precision in precisions(run) or [run.plan.dtype]:
        for batch in run.plan.batches:
            found = [row for row in rows(run, batch) if row.precision == precision]
            title = (
                f"**{precision}, batch {batch}**"
                if len(precisions(run)) * len(run.plan.batches) > 1
                else ""
            )
            parts += [
                part for part in (title, speeds(run, found, batch), details(run, found)) if part
            ]
    parts.append(notes(run))
    return "\n\n".join(parts)


def heading(run: SuiteRun) -> str:
    """What was measured, where, and how to do it again."""
    where, plan = run.provenance, run.plan
    samples = ", ".join(f"{sample.name} (of {sample.of})" for sample in plan.samples)
    state = (
        ""
        if run.complete
        else " **Interrupted**: this is what had been measured; the same command goes on."
    )
    changed = " with uncommitted changes" if where.uncommitted_changes else ""
    return (
        f"{plan.model}, {plan.dtype}, {plan.threads} threads on {where.cpu}; up to "
        f"{plan.new_tokens} new tokens, "
        f"{plan.rounds} round{'s' if plan.rounds > 1 else ''}. Questions: {samples}. "
        f"{where.date}, commit "
        f"{(where.commit or 'unknown')[:12]}{changed}; made with `{where.command}`.{state}"
    )


def speeds(run: SuiteRun, found: Sequence[Row], batch: int) -> str:
    """Speed over plain decoding of the same engine by task, and of the mean over tasks, with tokens
    per second."""
    tasks = tasks_of(run)
    header = [
        "contestant",
        *tasks,
        "over its own plain",
        "",
        "over the best plain",
        "tokens/s",
        "with prefill",
        "same tokens",
    ]
    by_task = {task: {row.contestant: row for row in rows(run, batch, task)} for task in tasks}
    order = sorted(
        found, key=lambda row: (row.failure is not None, -(row.tokens_per_second or 0.0))
    )
    return table(
        header,
        [_speed_line(row, [by_task[task][row.contestant] for task in tasks]) for row in order],
    )


def _speed_line(row: Row, by_task: Sequence[Row]) -> list[str]:
    cells = [
        f"{each.over_plain.value:.2f}{' -' if each.verdict == 'slower' else ''}"
        if each.over_plain
        else "-"
        for each in by_task
    ]
    failed = (
        None
        if row.failure is None
        else f"failed: {row.failure[:NAMED]}".replace("|", "/").replace("\n", " ")
    )
    return [
        row.contestant,
        *cells,
        ratio(row.over_plain),
        "" if row.baseline or row.verdict is None else row.verdict,
        ratio(row.over_best),
        number(row.tokens_per_second),
        number(row.tokens_per_second_with_prefill),
        failed or same_tokens(row),
    ]


def details(run: SuiteRun, found: Sequence[Row]) -> str:
    """Where a contestant's time went, and what it takes beside time."""
    header = [
        "contestant",
        "K",
        "tokens/verification",
        "accepted/drafted",
        "by position",
        "draft",
        "verify",
        "host",
    ]
    header += ["first token, s", "peak memory, MB", "J/token", "cold start, s"]
    costs = CostModel([vars(point) for point in run.steps])
    if costs.known:
        header.append("measured/predicted")
    lines = []
    for row in found:
        if row.tokens_per_second is None:
            continue
        line = [
            row.contestant,
            row.drafts,
            number(row.tokens_per_verification, 2),
            percent(row.acceptance),
            " ".join(f"{share:.0%}" for share in row.by_position[:8]) or "-",
            *costs_of(row),
        ]
        lines.append([*line, ratio(reached(run, row.contestant), percent)] if costs.known else line)
    return table(header, lines) if lines else ""


def costs_of(row: Row) -> list[str]:
    """Where the time goes, then the time to the first token, memory, energy and cold start."""
    return [
        percent(row.draft_share),
        percent(row.verify_share),
        percent(row.host_share),
        number(row.first_seconds, 2),
        "-" if row.peak_memory_bytes is None else f"{row.peak_memory_bytes / 1e6:.0f}",
        number(row.joules_per_token, 2),
        number(row.cold_start_seconds),
    ]


def same_tokens(row: Row) -> str:
    """Equality with our plain decoding, or how often and where it parts first and by what gap."""
    if not row.differences:
        return "yes" if row.compared else "-"
    worst = max(
        row.differences, key=lambda each: (not near_tie(each, row.precision), abs(each.gap or 0.0))
    )
    gap = "gap unknown" if worst.gap is None else f"gap {worst.gap:.2g}"
    ties = sum(near_tie(each, row.precision) for each in row.differences)
    kind = "all near-ties" if ties == len(row.differences) else f"{ties} near-ties"
    return f"no: {len(row.differences)} of {row.compared} differ, at {worst.at} by {gap}; {kind}"


def notes(run: SuiteRun) -> str:
    """How to read the tables."""
    best = best_baseline(run, run.plan.batches[0], (precisions(run) or [run.plan.dtype])[0])
    share = overhead(run)
    sure = "" if share is None else f" The harness's own share of a turn is {share:.2%}."
    skipped = [line for sample in run.plan.samples for line in sample.skipped]
    said = [
        "Speeds are of decoding, after the first tokens, with 95% intervals over questions; - "
        "marks what is slower than its own "
        f"plain decoding. The best plain decoding is {best}. accepted/drafted is at the K named; "
        f"tokens are compared with our "
        f"plain decoding's. Cold start: from starting the process to its first short answer.{sure}",
        f"Energy: {run.energy}.",
        "Versions: "
        + ", ".join(
            f"{name} {version}" for name, version in sorted(run.provenance.versions.items())
        )
        + ".",
    ]
    failures = [
        f"{name}: {reason}" for name in run.plan.contestants if (reason := run.failure(name))
    ]
    said += [f"Failed: {'; '.join(failures)}."] if failures else []
    said += [f"Left out: {'; '.join(dict.fromkeys(skipped))}."] if skipped else []
    return "\n".join(said)


def ratio(value: Ratio | None, form: Form | None = None) -> str:
    """A ratio with its interval."""
    form = form or (lambda number: f"{number:.2f}")
    return "-" if value is None else f"{form(value.value)} ({form(value.low)}-{form(value.high)})"


def number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
