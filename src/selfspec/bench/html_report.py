"""The page of a suite result: the verdict, speeds with intervals, speeds by task, acceptance,
tables, how it was measured.

Made from the JSON alone and in one file. Rows that lose or failed stay in; only like precisions
share a picture. Figures come from `suite_stats.py`. Does not measure.
"""

from __future__ import annotations

from collections.abc import Sequence

from .html import Bar, Cell, Line, bars, facts, heading, heat, lines, page, paragraph, table
from .html_verdict import verdict
from .suite_report import costs_of, number, percent, ratio, same_tokens
from .suite_schema import SuiteRun
from .suite_stats import Row, best_baseline, overhead, precisions, rows, tasks_of

VERDICTS = {None: "", "faster": "faster", "slower": "slower", "equal": "no clear difference"}
FEWEST_TRIES = 20  # of a position, below which its share is chance


def report_page(run: SuiteRun) -> str:
    """The whole file."""
    plan, where = run.plan, run.provenance
    asked = sum(sample.questions for sample in plan.samples)
    subtitle = (
        f"{asked} questions of {len(plan.samples)} tasks, up to {plan.new_tokens} new tokens, "
        f"{plan.dtype}, "
        f"{plan.threads} thread{'s' if plan.threads > 1 else ''} on {where.cpu}, {where.date[:10]}"
    )
    body = [paragraph(verdict(run), "verdict")]
    for precision in precisions(run) or [plan.dtype]:
        for batch in plan.batches:
            found = [row for row in rows(run, batch) if row.precision == precision]
            if any(row.tokens_per_second for row in found):
                body += _compared(run, found, precision, batch)
    body += _quality(run) + _failures(run) + _differences(run) + _method(run)
    return page(f"How fast {plan.model} writes", subtitle, body)


def _compared(run: SuiteRun, found: Sequence[Row], precision: str, batch: int) -> list[str]:
    several = len(precisions(run)) * len(run.plan.batches) > 1
    where = f" ({precision}, batch {batch})" if several else ""
    order = sorted(
        (row for row in found if row.tokens_per_second),
        key=lambda row: -(row.tokens_per_second or 0.0),
    )
    best = best_baseline(run, batch, precision)
    return [
        heading(f"Speed{where}"),
        paragraph(
            f"Over the fastest plain decoding, {best}: the dashed line. The black line is the 95% "
            f"interval over questions.",
            "soft",
        ),
        bars([_bar(row) for row in order if row.over_best is not None]),
        heading(f"By task{where}"),
        paragraph(
            "Over plain decoding of the same engine: what drafting brings. Red is slower.", "soft"
        ),
        _by_task(run, order, batch),
        *_positions(run, order, batch, where),
        heading(f"All figures{where}"),
        _figures(order),
    ]


def _bar(row: Row) -> Bar:
    assert row.over_best is not None
    return Bar(
        row.contestant,
        row.over_best.value,
        row.over_best.low,
        row.over_best.high,
        f"{row.over_best.value:.2f}x · {number(row.tokens_per_second)} tokens/s",
    )


def _by_task(run: SuiteRun, order: Sequence[Row], batch: int) -> str:
    tasks = tasks_of(run)
    by_task = {task: {row.contestant: row for row in rows(run, batch, task)} for task in tasks}
    found = []
    for row in order:
        if not row.baseline and row.over_plain is not None:
            cells = [_speed_cell(by_task[task][row.contestant]) for task in tasks]
            found.append((row.contestant, [*cells, _speed_cell(row)]))
    if not found:
        return paragraph("Only plain decoding took part.", "soft")
    return heat("", [*(task.replace("_", " ") for task in tasks), "mean"], found)


def _speed_cell(row: Row) -> Cell:
    speed = row.over_plain
    if speed is None:
        return Cell("-")
    away = speed.value - 1 if speed.value >= 1 else 1 / max(speed.value, 1e-9) - 1
    title = f"{speed.low:.2f} to {speed.high:.2f}" + (f", {row.verdict}" if row.verdict else "")
    return Cell(
        f"{speed.value:.2f}",
        0.1 + 0.9 * min(1.0, 1.5 * away),
        "good" if speed.value >= 1 else "bad",
        title,
    )


def _positions(run: SuiteRun, order: Sequence[Row], batch: int, where: str) -> list[str]:
    """The chance of a draft by its place, of those whose predecessors were kept, where enough were
    tried."""
    curves: list[Line] = []
    for row in order:
        counts = [
            t.counts
            for t in run.turns
            if t.contestant == row.contestant and t.batch == batch and t.counts
        ]
        tried = [
            sum(each.drafted_at[at] for each in counts if at < len(each.drafted_at))
            for at in range(len(row.by_position))
        ]
        points = [
            (float(at), kept)
            for at, (kept, tries) in enumerate(zip(row.by_position, tried, strict=True), 1)
            if tries >= FEWEST_TRIES
        ]
        if points:
            curves.append(Line(row.method, points, len(curves)))
    if not curves:
        return []
    return [
        heading(f"How often a draft is kept{where}"),
        paragraph(
            f"By its place, if all before it were kept; places tried at least {FEWEST_TRIES} times.",
            "soft",
        ),
        lines(curves, "place in the draft", "share kept", span=(0.0, 1.0)),
    ]


def _figures(order: Sequence[Row]) -> str:
    header = [
        "", "over own plain", "verdict", "over best plain", "tokens/s", "with prefill", "K", "tokens/ verification", "accepted",
        "draft", "verify", "host", "first token, s", "memory, MB", "J/token", "cold start, s", "same tokens",
    ]  # fmt: skip
    return table(header, [_figure_line(row) for row in order], words=(0, 2, 16))


def _figure_line(row: Row) -> list[str]:
    return [
        row.contestant,
        ratio(row.over_plain),
        "" if row.baseline else VERDICTS[row.verdict],
        ratio(row.over_best),
        number(row.tokens_per_second),
        number(row.tokens_per_second_with_prefill),
        row.drafts,
        number(row.tokens_per_verification, 2),
        percent(row.acceptance),
        *costs_of(row),
        same_tokens(row),
    ]


def _quality(run: SuiteRun) -> list[str]:
    if not run.scores:
        return []
    lines_ = [
        [each.contestant, each.task, each.metric, f"{each.value:.4g}", str(each.count)]
        for each in run.scores
    ]
    return [
        heading("Quality"),
        table(["", "task", "measure", "value", "texts"], lines_, words=(0, 1, 2)),
    ]


def _failures(run: SuiteRun) -> list[str]:
    failed = [[name, reason] for name in run.plan.contestants if (reason := run.failure(name))]
    return [heading("Not there"), table(["", "why"], failed, words=(0, 1))] if failed else []


def _differences(run: SuiteRun) -> list[str]:
    found = [
        [
            turn.contestant,
            each.question,
            str(each.at),
            "unknown" if each.gap is None else f"{each.gap:.2g}",
        ]
        for turn in run.turns
        for each in turn.differences
    ]
    if not found:
        return []
    told = "Where a text first parts from our plain decoding's, and by how many logits the model preferred its own token there."
    return [
        heading("Differing texts"),
        paragraph(told, "soft"),
        table(["", "question", "at token", "gap"], found, words=(0, 1)),
    ]


def _method(run: SuiteRun) -> list[str]:
    where, share = run.provenance, overhead(run)
    changed = " with uncommitted changes" if where.uncommitted_changes else ""
    pairs = {
        "Command": where.command,
        "Commit": f"{(where.commit or 'unknown')[:12]}{changed}",
        "Machine": f"{where.cpu}, {where.cores} cores, {where.memory_bytes / 1e9:.0f} GB, "
        f"{where.system}",
        "Questions": ", ".join(
            f"{sample.name} of {sample.of} ({sample.source})" for sample in run.plan.samples
        ),
        "Sampling": "greedy"
        if not run.plan.temperature
        else f"temperature {run.plan.temperature}, top-p {run.plan.top_p}",
        "Rounds": str(run.plan.rounds),
        "Energy": run.energy or "not asked for",
        "Harness": "unknown" if share is None else f"{share:.2%} of a turn is its own",
        "Versions": ", ".join(
            f"{name} {version}" for name, version in sorted(where.versions.items())
        ),
    }
    how = (
        "All took turns on the same token ids with the same limits; the order moves on with every "
        "question. Speeds are of "
        "decoding, after the first tokens. Times and tokens are counted by the harness, not by "
        "the engines; drafts and shares of "
        "time are what an engine says of itself. An interval is a bootstrap over questions, "
        "baseline and method drawn together."
    )
    return [heading("How it was measured"), paragraph(how), facts(pairs)]
