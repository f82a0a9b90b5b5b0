"""The page of a sweep: the E x K heat map, speed by number of skipped halves, the threshold's
course. From its JSON alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .html import Cell, Line, facts, heading, heat, lines, page, paragraph
from .sweep_report import WINDOW, CellSpeed, grid_speeds, skip_speeds, smoothed, unrest

MOST_POINTS = 400  # of a curve


def sweep_page(run: dict[str, Any]) -> str:
    """The whole file."""
    where = run["provenance"]
    subtitle = (
        f"{len(run['prompts'])} prompts, {run['options']['new_tokens']} tokens a turn, "
        f"{run['dtype']}, "
        f"{where['threads']} thread{'s' if where['threads'] > 1 else ''} on {where['cpu']}, "
        f"{where['date'][:10]}"
    )
    body = [paragraph(sweep_verdict(run), "verdict")]
    if cells := grid_speeds(run):
        body += _grid(cells)
    if cells := skip_speeds(run):
        body += _skips(cells, run)
    if run["gamma"]:
        body += _gamma(run)
    pairs = {
        "Command": where["command"],
        "Commit": (where["commit"] or "unknown")[:12],
        "Prompts": ", ".join(f"{name} ({size} tokens)" for name, size in run["prompts"].items()),
        "Versions": ", ".join(
            f"{name} {version}" for name, version in sorted(where["versions"].items())
        ),
    }
    return page(
        f"What speeds {run['model']} up",
        subtitle,
        [*body, heading("How it was measured"), facts(pairs)],
    )


def sweep_verdict(run: dict[str, Any]) -> str:
    """What to use, and how far to trust it."""
    said = []
    for cells, words in ((grid_speeds(run), _grid_words), (skip_speeds(run), _skip_words)):
        if cells:
            best = max(cells, key=lambda cell: cell.speedup)
            kept = f"{best.speedup:.2f}x plain decoding with {best.acceptance:.0%} of its drafts accepted"
            said.append(
                words(best, run)
                + (
                    f": {kept}."
                    if best.speedup > 1
                    else f" comes nearest, {kept}: do not use it here."
                )
            )
    if not said:
        return "Nothing was measured yet."
    noise = f" Plain turns of one group differ by {unrest(run):.0%} on average; take smaller differences for none."
    same = all(turn["identical"] for turn in run["turns"])
    return (
        " ".join(said)
        + noise
        + (" All texts are those of plain decoding." if same else " NOT all texts are equal.")
    )


def _grid_words(best: CellSpeed, _: dict[str, Any]) -> str:
    return f"Early exit at layer {best.first} with {best.drafts} drafts a round"


def _skip_words(best: CellSpeed, run: dict[str, Any]) -> str:
    return f"Layer skipping with {best.first} of {2 * run['layers']} halves left out"


def _grid(cells: Sequence[CellSpeed]) -> list[str]:
    drafts = sorted({cell.drafts for cell in cells})
    by = {(cell.first, cell.drafts): cell for cell in cells}
    rows = [
        (
            str(layer),
            [_cell(by[layer, count]) if (layer, count) in by else Cell("-") for count in drafts],
        )
        for layer in sorted({cell.first for cell in cells})
    ]
    told = "Rows: how many layers draft (E). Columns: drafts a round (K). Green is faster than plain decoding, red slower."
    return [
        heading("Early exit"),
        paragraph(told, "soft"),
        heat("E \\ K", [str(count) for count in drafts], rows, "few"),
    ]


def _cell(cell: CellSpeed) -> Cell:
    away = cell.speedup - 1 if cell.speedup >= 1 else 1 / max(cell.speedup, 1e-9) - 1
    title = (
        f"{cell.acceptance:.0%} accepted, {cell.tokens_per_verification:.2f} tokens a verification"
    )
    return Cell(
        f"{cell.speedup:.2f}",
        0.1 + 0.9 * min(1.0, 1.5 * away),
        "good" if cell.speedup >= 1 else "bad",
        title,
    )


def _skips(cells: Sequence[CellSpeed], run: dict[str, Any]) -> list[str]:
    name = f"halves left out, of {2 * run['layers']}"
    return [
        heading("Layer skipping"),
        paragraph(
            f"Halves were chosen by {run['options']['by']}; the adaptive controller says when to "
            f"stop drafting.",
            "soft",
        ),
        lines(
            [Line("speed", [(cell.first, cell.speedup) for cell in cells])],
            name,
            "speed, plain = 1",
            mark=1.0,
        ),
        lines(
            [Line("accepted", [(cell.first, cell.acceptance) for cell in cells], 1)],
            name,
            "accepted / drafted",
            span=(0.0, 1.0),
        ),
    ]


def _gamma(run: dict[str, Any]) -> list[str]:
    step = max(1, len(run["gamma"]) // MOST_POINTS)
    course = list(enumerate(smoothed(run), 1))[::step]
    raw = [(float(at), each["threshold"]) for at, each in enumerate(run["gamma"], 1)][::step]
    curves = [
        Line("threshold", raw, 7, dots=False),
        Line(
            f"mean of {WINDOW} rounds",
            [(float(at), mean) for at, (mean, _) in course],
            0,
            dots=False,
        ),
    ]
    return [
        heading("The adaptive threshold"),
        paragraph("Round by round and from prompt to prompt (Draft & Verify, Figure 5).", "soft"),
        lines(curves, "round", "threshold"),
    ]
