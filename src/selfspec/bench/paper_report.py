"""A paper's table with our columns beside it, from the result's JSON and the specification; and
what cannot be compared."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .paper import COSINES, PaperRow, PaperTable, exit_of, find_table
from .paper_run import PAPER_SCHEMA, key_of
from .report import table as grid
from .schema import read_result

SHARES = ("accepted", "draft share", "verify share")
LABELS = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L"}
PERCENT = ("accuracy", "exact match", "pass@1", "pass@10")


def load_paper(path: Path) -> dict[str, Any]:
    """Read a result; another file is an error that says so."""
    return read_result(
        path, "paper", PAPER_SCHEMA, "selfspec bench MODEL --paper TABLE", "a result"
    )


def markdown(result: Mapping[str, Any]) -> str:
    """The table, then what is missing of the paper's, what cannot be compared, and how ours was
    measured."""
    spec = find_table(result["table"])
    header, lines = cells(spec, result)
    where = result["provenance"]
    parts = [
        f"**{spec.paper}, {spec.name}: {spec.title}**; ours: {result['model']}\n",
        grid(header, lines),
        "",
    ]
    parts += [f"Not in the source: {spec.missing}"] if spec.missing else []
    parts += [f"Not comparable: {each}" for each in spec.apart]
    parts += [f"No row of ours, {row.name}: {row.why}." for row in _without(spec)]
    length = "" if spec.kind == COSINES else f"up to {result['new_tokens']} new tokens, "
    runs = f" Raw seconds: {', '.join(result['runs'])}." if result["runs"] else ""
    parts.append(
        f"Ours: {length}{where['threads']} threads on {where['cpu']}, {where['date'][:10]}; made "
        f"with `{where['command']}`.{runs}"
    )
    return "\n".join(parts)


def cells(spec: PaperTable, result: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The header, and a line for each row: the paper's figures, then ours; measured rows that the
    paper does not have last."""
    header = [
        "",
        *spec.columns,
        *(f"ours {LABELS.get(measure, measure)}" for measure in spec.measures),
    ]
    lines, known = [], set()
    for row in spec.rows:
        known.add(key_of(row))
        values = result["values"].get(key_of(row), {})
        named = _named(row, result["layers"])
        lines.append(
            [
                named,
                *(row.figures.get(column, "-") for column in spec.columns),
                *_ours(spec, values),
            ]
        )
    for name, values in result["values"].items():
        if name not in known:
            lines.append([name, *("-" for _ in spec.columns), *_ours(spec, values)])
    return header, lines


def _named(row: PaperRow, layers: int) -> str:
    exit = "" if row.exit is None else f" (ours: E={exit_of(row, layers)} of {layers})"
    return f"{row.name}{exit}" if row.task == "-" else f"{key_of(row)}{exit}"


def _ours(spec: PaperTable, values: Mapping[str, float]) -> list[str]:
    return [_shown(measure, values) for measure in spec.measures]


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
    return f"{value:.3g}"


def _without(spec: PaperTable) -> list[PaperRow]:
    """Rows that no method of ours fills, each reason once."""
    found = {row.why: row for row in reversed(spec.rows) if row.method is None}
    return list(reversed(found.values()))
