"""What a suite result says: tables as text, the page, the picture. From its JSON alone.

Rows that lose or failed stay in. Only like precisions share a table or a picture. Figures come from
`suite_stats.py`. Does not measure.
"""

from __future__ import annotations

from collections.abc import Sequence

from .costs import CostModel, reached
from .html import Bar, Bars, Cell, Curves, Facts, Heading, Heat, Line, Paragraph, Piece, Table, page
from .pictures import Picture
from .schema import Plan, SuiteRun
from .suite_stats import (
    Row,
    best_baseline,
    counts_of,
    near_tie,
    overhead,
    precisions,
    rows,
    sections,
    tasks_of,
    turns_of,
)
from .suite_verdict import verdict
from .tables import commit, failed, interval, number, percent, threads, versions
from .tables import markdown as as_text
from .timing import Ratio

NAMED = 60  # characters of a failure in a table
FEWEST_TRIES = 20  # of a position, below which its share is chance


def markdown(run: SuiteRun) -> str:
    """The whole report as text: what was asked, then speeds and details of each section."""
    parts: list[str | Table | None] = [_heading(run)]
    for name, batch, contestants in _named_sections(run):
        parts += [
            f"**{name}**" if name else "",
            speeds(run, contestants, batch),
            details(run, contestants),
        ]
    return as_text([*parts, _notes(run)])


def report_page(run: SuiteRun) -> str:
    """The whole report as a page: the verdict, pictures, tables, how it was measured."""
    plan, where = run.plan, run.provenance
    asked = sum(sample.questions for sample in plan.samples)
    subtitle = (
        f"{asked} questions of {len(plan.samples)} tasks, up to {plan.new_tokens} new tokens, "
        f"{stored(plan)}, {threads(where)}, {where.date[:10]}"
    )
    body: list[Piece] = [Paragraph(verdict(run), "verdict")]
    for name, batch, contestants in _named_sections(run):
        if any(row.tokens_per_second for row in contestants):
            name = f" ({name})" if name else ""
            for title, remark, piece in _pictures(run, contestants, batch):
                body += [Heading(f"{title}{name}"), Paragraph(remark, "soft"), piece]
            body += [
                Heading(f"All figures{name}"),
                speeds(run, contestants, batch),
                details(run, contestants),
            ]
    body += _remarks(run) + _method(run)
    return page(f"How fast {plan.model} writes", subtitle, body)


def stored(plan: Plan) -> str:
    """How the model is stored."""
    return plan.dtype if plan.weights == "auto" else f"{plan.dtype} with weights in {plan.weights}"


def pictures(run: SuiteRun) -> list[tuple[str, Picture]]:
    """The pictures of the first section, with titles: the first batch size and our precision."""
    _, batch, contestants = sections(run)[0]
    drawn = _pictures(run, contestants, batch)
    return [(f"{title}. {remark}", piece) for title, remark, piece in drawn]


def picture_title(run: SuiteRun) -> str:
    where = threads(run.provenance)
    return f"{run.plan.model}, {precisions(run)[0]}, {where}, batch {run.plan.batches[0]}"


def _named_sections(run: SuiteRun) -> list[tuple[str, int, list[Row]]]:
    """Each with a name, where there are several."""
    parts = sections(run)
    named = len(parts) > 1
    return [(f"{kind}, batch {n}" if named else "", n, some) for kind, n, some in parts]


def _heading(run: SuiteRun) -> str:
    """What was measured, where, and how to do it again."""
    where, plan = run.provenance, run.plan
    samples = ", ".join(f"{sample.name} (of {sample.of})" for sample in plan.samples)
    state = " **Interrupted**: this is what had been measured; the same command goes on."
    return (
        f"{plan.model}, {stored(plan)}, {plan.threads} threads on {where.cpu}; up to "
        f"{plan.new_tokens} new tokens, {plan.rounds} round{'s' if plan.rounds > 1 else ''}. "
        f"Questions: {samples}. {where.date}, commit {commit(where)}; made with "
        f"`{where.command}`.{'' if run.complete else state}"
    )


def speeds(run: SuiteRun, contestants: Sequence[Row], batch: int) -> Table:
    """Speed over plain decoding of the same engine by task and in the mean, tokens per second."""
    by_task = _rows_by_task(run, batch)
    header = ["contestant", *by_task, "over its own plain", "", "over the best plain", "tokens/s"]
    order = sorted(
        contestants, key=lambda row: (row.failure is not None, -(row.tokens_per_second or 0.0))
    )
    lines = []
    for row in order:
        cells = [_by_task(some[row.contestant]) for some in by_task.values()]
        cells += [interval(row.over_plain), "" if row.baseline else row.verdict or ""]
        cells += [interval(row.over_best), number(row.tokens_per_second)]
        cells.append(number(row.tokens_per_second_with_prefill))
        cells.append(same_tokens(row) if row.failure is None else failed(row.failure, NAMED))
        lines.append([row.contestant, *cells])
    words = (0, len(by_task) + 2, len(by_task) + 6)
    return Table([*header, "with prefill", "same tokens"], lines, words)


def _by_task(row: Row) -> str:
    slower = " -" if row.verdict == "slower" else ""
    return f"{row.speed:.2f}{slower}" if row.over_plain else "-"


def details(run: SuiteRun, contestants: Sequence[Row]) -> Table:
    """Where a contestant's time went, and what it takes beside time."""
    header = ["contestant", "slowest question", "K", "tokens/verification", "accepted/drafted"]
    header += ["by position", "draft", "verify", "host", "first token, s", "peak memory, MB"]
    header += ["J/token", "cold start, s"]
    costs = CostModel(run.steps)
    lines = []
    for row in contestants:
        if row.tokens_per_second is None:
            continue
        memory = None if row.peak_memory_bytes is None else row.peak_memory_bytes / 1e6
        lines.append([
            row.contestant,
            "-" if row.baseline else _slowest(row),
            row.drafts,
            number(row.tokens_per_verification, 2),
            percent(row.acceptance),
            " ".join(f"{share:.0%}" for share in row.by_position[:8]) or "-",
            *map(percent, (row.draft_share, row.verify_share, row.host_share)),
            number(row.first_seconds, 2),
            number(memory, 0),
            number(row.joules_per_token, 2),
            number(row.cold_start_seconds),
            *([interval(reached(run, row.contestant, costs), percent)] if costs.known else []),
        ])  # fmt: skip
    return Table([*header, *(["measured/predicted"] if costs.known else [])], lines)


def _slowest(row: Row) -> str:
    return "-" if row.slowest is None else f"{row.slowest[0]}: {row.slowest[1]:.2f}"


def same_tokens(row: Row) -> str:
    """Equality with our plain decoding, or how often and where it parts first and by what gap."""
    if not row.differences:
        return "yes" if row.compared else "-"
    ties = sum(near_tie(each, row.precision) for each in row.differences)
    worst = max(
        row.differences, key=lambda each: (not near_tie(each, row.precision), abs(each.gap or 0.0))
    )
    kind = "all near-ties" if ties == len(row.differences) else f"{ties} near-ties"
    parted = f"{len(row.differences)} of {row.compared} differ"
    return f"no: {parted}, at {worst.at} by gap {_gap(worst.gap)}; {kind}"


def _notes(run: SuiteRun) -> str:
    """How to read the tables."""
    best = best_baseline(run, run.plan.batches[0], precisions(run)[0])
    share = overhead(run)
    sure = "" if share is None else f" The harness's own share of a turn is {share:.2%}."
    skipped = [line for sample in run.plan.samples for line in sample.skipped]
    said = [
        "Speeds are of decoding, after the first tokens, with 95% intervals over questions; - "
        "marks what is slower than its own plain decoding. The best plain decoding is "
        f"{best}. accepted/drafted is at the K named; tokens are compared with our plain "
        "decoding's. The slowest question is the one with the least speed over its own plain "
        "decoding, the median of its rounds. Cold start: from starting the process to its first "
        "short answer."
        f"{sure}",
        f"Energy: {run.energy}.",
        f"Versions: {versions(run.provenance)}.",
    ]
    failures = [f"{name}: {why}" for name, why in _reasons(run)]
    said += [f"Failed: {'; '.join(failures)}."] if failures else []
    said += [f"Left out: {'; '.join(dict.fromkeys(skipped))}."] if skipped else []
    return "\n".join(said)


def _reasons(run: SuiteRun) -> list[tuple[str, str]]:
    return [(name, why) for name in run.plan.contestants if (why := run.failure(name))]


def _pictures(
    run: SuiteRun, contestants: Sequence[Row], batch: int
) -> list[tuple[str, str, Picture]]:
    """Title, remark and picture: speeds, speeds by task, how often a draft is kept."""
    best = best_baseline(run, batch, contestants[0].precision)
    measured = [row for row in contestants if row.tokens_per_second]
    order = sorted(measured, key=lambda row: -(row.tokens_per_second or 0.0))
    told = (
        f"Over the fastest plain decoding, {best}, the dashed line, with 95% intervals.",
        "Over plain decoding of the same engine: what drafting brings. Red is slower.",
        f"By its place, if all before it were kept; places tried {FEWEST_TRIES} times.",
    )
    bars = Bars([_bar(row, row.over_best) for row in order if row.over_best is not None])
    pieces: list[tuple[str, str, Picture]] = [("Speed", told[0], bars)]
    if (heat := _heat(run, order, batch)).rows:
        pieces.append(("By task", told[1], heat))
    if (curves := _positions(run, order, batch)).lines:
        pieces.append(("How often a draft is kept", told[2], curves))
    return pieces


def _bar(row: Row, speed: Ratio) -> Bar:
    note = f"{speed.value:.2f}x · {number(row.tokens_per_second)} tokens/s"
    return Bar(row.contestant, speed.value, speed.low, speed.high, note)


def _rows_by_task(run: SuiteRun, batch: int) -> dict[str, dict[str, Row]]:
    """Of each task the rows by contestant."""
    tasks = {task: rows(run, batch, task) for task in tasks_of(run)}
    return {task: {row.contestant: row for row in some} for task, some in tasks.items()}


def _heat(run: SuiteRun, order: Sequence[Row], batch: int) -> Heat:
    by_task = _rows_by_task(run, batch)
    lines = []
    for row in order:
        if not row.baseline and row.over_plain is not None:
            cells = [_speed_cell(some[row.contestant]) for some in by_task.values()]
            lines.append((row.contestant, [*cells, _speed_cell(row)]))
    return Heat("", [*(task.replace("_", " ") for task in by_task), "mean"], lines)


def _speed_cell(row: Row) -> Cell:
    speed = row.over_plain
    if speed is None:
        return Cell("-")
    title = f"{speed.low:.2f} to {speed.high:.2f}" + (f", {row.verdict}" if row.verdict else "")
    return Cell.of_speed(speed.value, title)


def _positions(run: SuiteRun, order: Sequence[Row], batch: int) -> Curves:
    """The chance of a draft by its place, of those whose predecessors were kept."""
    lines: list[Line] = []
    for row in order:
        counts = counts_of(turns_of(run, row.contestant, batch))
        points = [
            (float(at), kept)
            for at, kept in enumerate(row.by_position, start=1)
            if sum(sum(each.drafted_at[at - 1 : at]) for each in counts) >= FEWEST_TRIES
        ]
        lines += [Line(row.method, points, len(lines))] if points else []
    return Curves(lines, "place in the draft", "share kept", span=(0.0, 1.0))


def _remarks(run: SuiteRun) -> list[Piece]:
    """What some runs have: scores, engines that are not there, texts that differ."""
    scores = [
        [each.contestant, each.task, each.metric, f"{each.value:.4g}", str(each.count)]
        for each in run.scores
    ]
    missing = [list(each) for each in _reasons(run)]
    parted = [
        [turn.contestant, each.question, str(each.at), _gap(each.gap)]
        for turn in run.turns
        for each in turn.differences
    ]
    told = (
        "Where a text first parts from our plain decoding's, and by how many logits the model "
        "preferred its own token there."
    )
    sections = [
        ("Quality", "", Table(["", "task", "measure", "value", "texts"], scores, (0, 1, 2))),
        ("Not there", "", Table(["", "why"], missing, (0, 1))),
        ("Differing texts", told, Table(["", "question", "at token", "gap"], parted, (0, 1))),
    ]
    body: list[Piece] = []
    for title, remark, piece in sections:
        if piece.rows:
            body += [Heading(title), *([Paragraph(remark, "soft")] if remark else []), piece]
    return body


def _gap(gap: float | None) -> str:
    return "unknown" if gap is None else f"{gap:.2g}"


def _method(run: SuiteRun) -> list[Piece]:
    where, plan, share = run.provenance, run.plan, overhead(run)
    gigabytes = where.memory_bytes / 1e9
    asked = [f"{each.name} of {each.of} ({each.source})" for each in plan.samples]
    sampled = f"temperature {plan.temperature}, top-p {plan.top_p}"
    pairs = {
        "Command": where.command,
        "Commit": commit(where),
        "Machine": f"{where.cpu}, {where.cores} cores, {gigabytes:.0f} GB, {where.system}",
        "Questions": ", ".join(asked),
        "Sampling": sampled if plan.temperature else "greedy",
        "Rounds": str(plan.rounds),
        "Energy": run.energy or "not asked for",
        "Harness": "unknown" if share is None else f"{share:.2%} of a turn is its own",
        "Versions": versions(where),
    }
    how = (
        "All took turns on the same token ids with the same limits; the order moves on with every "
        "question. Speeds are of decoding, after the first tokens. Times and tokens are counted by "
        "the harness, not by the engines; drafts and shares of time are what an engine says of "
        "itself. An interval is a bootstrap over questions, baseline and method drawn together."
    )
    return [Heading("How it was measured"), Paragraph(how), Facts(pairs)]
