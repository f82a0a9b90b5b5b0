"""A paper's table with our columns beside it, as text and as a page, from the result's JSON and the
specification; and what cannot be compared."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.paper.copies import is_mask
from benchmarks.paper.result import PaperResult, key_of
from benchmarks.paper.table import COSINES, PaperRow, PaperTable, exit_of, find_table
from selfspec.bench.html import Facts, Heading, Paragraph, Piece, Table, page
from selfspec.bench.tables import commit, table, threads, versions

SHARES = ("accepted", "first right", "draft share", "verify share")
LABELS = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L"}
TIMES = ("tokens/s", "ms/token", "speedup")
PERCENT = ("accuracy", "exact match", "pass@1", "pass@10")


def markdown(result: PaperResult) -> str:
    """The table, then what is missing of the paper's, what cannot be compared, and how ours was
    measured."""
    spec, where = find_table(result.table), result.provenance
    title = f"**{spec.paper}, {spec.name}: {spec.title}**; ours: {result.model}\n"
    length = "" if spec.kind == COSINES else f"up to {result.new_tokens} new tokens, "
    runs = f" Raw seconds: {', '.join(result.runs)}." if result.runs else ""
    runs += f" Questions: {', '.join(result.samples)}." if result.samples else ""
    if result.halves:
        both = (f"{name} {', '.join(map(str, layers))}" for name, layers in result.halves.items())
        runs += f" Left out: {'; '.join(both)}."
    runs += "" if result.timed else " No times were taken (--untimed)."
    made = (
        f"Ours: {length}{where.threads} threads on {where.cpu}, {where.date[:10]}; made with "
        f"`{where.command}`.{runs}"
    )
    missing = [f"Not in the source: {spec.missing}"] if spec.missing else []
    apart = [f"Not comparable: {each}" for each in spec.apart]
    without = [f"No row of ours, {row.name}: {row.why}." for row in _without(spec)]
    return "\n".join([title, table(cells(spec, result)), "", *missing, *apart, *without, made])


def paper_page(result: PaperResult) -> str:
    """The same as a page."""
    spec, where = find_table(result.table), result.provenance
    subtitle = (
        f"{spec.paper}, {spec.name}; ours: {result.model}, up to {result.new_tokens} new tokens, "
        f"{threads(where)}"
    )
    missing = [f"Not in the source: {spec.missing}"] if spec.missing else []
    apart = [Paragraph(each) for each in (*missing, *spec.apart)]
    pairs = {
        "Command": where.command,
        "Raw seconds": ", ".join(result.runs) or "none: nothing was timed",
        "Commit": commit(where),
        "Date": where.date,
        "Versions": versions(where),
    }
    body: list[Piece] = [cells(spec, result), Heading("What cannot be compared"), *apart]
    return page(spec.title, subtitle, [*body, Heading("How ours was measured"), Facts(pairs)])


def cells(spec: PaperTable, result: PaperResult) -> Table:
    """A line for each row: the paper's figures, then ours; measured rows that the paper does not
    have last."""
    head = [f"ours {LABELS.get(measure, measure)}" for measure in spec.measures]
    lines = []
    for row in spec.rows:
        figures = [row.figures.get(column, "-") for column in spec.columns]
        values = result.values.get(key_of(row), {})
        ours = _no_times(spec, values) if is_mask(row.copy) else _ours(spec, values)
        name = _named(row, result.layers).replace("{draft}", result.draft or spec.draft)
        lines.append([name, *figures, *ours])
    known = {key_of(row) for row in spec.rows}
    for name, values in result.values.items():
        if name not in known:
            lines.append([name, *("-" for _ in spec.columns), *_ours(spec, values)])
    return Table(["", *spec.columns, *head], lines)


def _named(row: PaperRow, layers: int) -> str:
    exit = "" if row.exit is None else f" (ours: E={exit_of(row, layers)} of {layers})"
    return f"{row.name}{exit}" if row.task == "-" else f"{key_of(row)}{exit}"


def _ours(spec: PaperTable, values: Mapping[str, float]) -> list[str]:
    return [_shown(measure, values) for measure in spec.measures]


def _no_times(spec: PaperTable, values: Mapping[str, float]) -> list[str]:
    """Ours of a row whose weights no kernel makes use of."""
    pairs = zip(spec.measures, _ours(spec, values), strict=True)
    return ["no kernel" if measure in TIMES else shown for measure, shown in pairs]


def _shown(measure: str, values: Mapping[str, float]) -> str:
    value = values.get(measure)
    if value is None:
        return "-"
    if measure == "speedup":
        return f"{value:.2f}x ({values['speedup low']:.2f}-{values['speedup high']:.2f})"
    if measure in SHARES or measure in PERCENT:
        return f"{value:.1%}"
    if measure in ("tokens/s", "ms/token"):
        return f"{value:.1f}"
    if measure == "memory, MB":
        return f"{value:.0f}"
    return f"{value:.3g}"


def _without(spec: PaperTable) -> list[PaperRow]:
    """Rows that no method of ours fills, each reason once."""
    found = {row.why: row for row in reversed(spec.rows) if row.method is None}
    return list(reversed(found.values()))
