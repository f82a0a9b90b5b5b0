"""What a sweep says: tables as text, the page, the picture. From its JSON alone."""

from __future__ import annotations

from collections.abc import Sequence

from .html import Cell, Curves, Facts, Heading, Heat, Line, Paragraph, Piece, Table, page
from .pictures import Picture
from .sweep_result import WINDOW, CellSpeed, Sweep, best, smoothed, speeds, unrest
from .tables import commit, number, percent, threads, versions
from .tables import markdown as as_text

MOST_POINTS = 400  # of a curve


def markdown(run: Sweep) -> str:
    """All tables, with what they say in a sentence."""
    parts: list[str | Table | None] = []
    if cells := speeds(run, "grid"):
        top = best(cells)
        parts += [
            "Speed over plain decoding by exit layer (rows) and drafts a round (columns); "
            "acceptance at the fewest drafts",
            _grid_table(cells),
            f"Best: exit {top.first} with {top.drafts} drafts, {top.speedup:.2f} times plain "
            f"({top.acceptance:.0%} accepted).",
        ]
    if cells := speeds(run, "skips"):
        top, header = best(cells), ["halves", "speedup", "accepted", "tokens/verification"]
        lines = [
            [str(each.first), number(each.speedup, 2), percent(each.acceptance),
             number(each.tokens_per_verification, 2)]
            for each in cells
        ]  # fmt: skip
        parts += [
            f"Halves left out, by {run.options.by}, adaptive control",
            Table(header, lines),
            f"Best: {top.first} of {2 * run.layers} halves left out, {top.speedup:.2f} times "
            "plain.",
        ]
    if run.gamma:
        first, last, (mean, deviation) = run.gamma[0], run.gamma[-1], smoothed(run)[-1]
        parts.append(
            f"Threshold: from {first.threshold:.3f} to {last.threshold:.3f} in {len(run.gamma)} "
            f"rounds (last {WINDOW}: mean {mean:.3f}, deviation {deviation:.3f})."
        )
    if run.turns:
        same = (
            "all texts are those of plain decoding" if run.identical else "NOT all texts are equal"
        )
        parts.append(f"Plain turns of one group differ by {unrest(run):.1%} on average; {same}.")
    return as_text(parts) or "nothing was measured"


def _by_exit(cells: Sequence[CellSpeed]) -> tuple[list[int], dict[int, list[CellSpeed | None]]]:
    """The numbers of drafts, and for each exit layer its cells in their order."""
    by = {(each.first, each.drafts): each for each in cells}
    drafts = sorted({cell.drafts for cell in cells})
    layers = sorted({cell.first for cell in cells})
    return drafts, {layer: [by.get((layer, count)) for count in drafts] for layer in layers}


def _grid_table(cells: Sequence[CellSpeed]) -> Table:
    drafts, rows = _by_exit(cells)
    lines = []
    for layer, row in rows.items():
        fewest = next(each for each in row if each is not None)
        shown = [number(each.speedup, 2) if each else "-" for each in row]
        lines.append([str(layer), *shown, percent(fewest.acceptance)])
    return Table(["E \\ K", *map(str, drafts), "accepted"], lines)


def sweep_page(run: Sweep) -> str:
    """The whole page."""
    where = run.provenance
    subtitle = (
        f"{len(run.prompts)} prompts, {run.options.new_tokens} tokens a turn, {run.dtype}, "
        f"{threads(where)}, {where.date[:10]}"
    )
    body: list[Piece] = [Paragraph(sweep_verdict(run), "verdict")]
    told = {
        "Early exit": "Rows: how many layers draft (E). Columns: drafts a round (K). Green is "
        "faster than plain decoding, red slower.",
        "Layer skipping": f"Halves were chosen by {run.options.by}; the adaptive controller says "
        "when to stop drafting.",
        "The adaptive threshold": "Round by round and from prompt to prompt (Draft & Verify, "
        "Figure 5).",
    }
    for title, picture in pictures(run):
        if title in told:
            body += [Heading(title), Paragraph(told.pop(title), "soft")]
        body.append(picture)
    prompts = ", ".join(f"{name} ({size} tokens)" for name, size in run.prompts.items())
    facts = {
        "Command": where.command,
        "Commit": commit(where),
        "Prompts": prompts,
        "Versions": versions(where),
    }
    body += [Heading("How it was measured"), Facts(facts)]
    return page(f"What speeds {run.model} up", subtitle, body)


def pictures(run: Sweep) -> list[tuple[str, Picture]]:
    """The heat map of exits and drafts, the curves of skipped halves, the threshold's course."""
    pictures: list[tuple[str, Picture]] = []
    if cells := speeds(run, "grid"):
        pictures.append(("Early exit", _heat(cells)))
    if cells := speeds(run, "skips"):
        name = f"halves left out, of {2 * run.layers}"
        speed = Line("speed", [(cell.first, cell.speedup) for cell in cells])
        accepted = Line("accepted", [(cell.first, cell.acceptance) for cell in cells], 1)
        pictures += [
            ("Layer skipping", Curves([speed], name, "speed, plain = 1", mark=1.0)),
            ("", Curves([accepted], name, "accepted / drafted", span=(0.0, 1.0))),
        ]
    if run.gamma:
        step = max(1, len(run.gamma) // MOST_POINTS)
        course = list(enumerate(smoothed(run), 1))[::step]
        raw = [(float(at), each.threshold) for at, each in enumerate(run.gamma, 1)][::step]
        means = [(float(at), mean) for at, (mean, _) in course]
        band = [(mean - deviation, mean + deviation) for _, (mean, deviation) in course]
        lines = [
            Line("threshold", raw, 7, dots=False),
            Line(f"mean of {WINDOW} rounds", means, 0, dots=False, band=band),
        ]
        pictures.append(("The adaptive threshold", Curves(lines, "round", "threshold")))
    return pictures


def _heat(cells: Sequence[CellSpeed]) -> Heat:
    drafts, rows = _by_exit(cells)
    lines = [(str(layer), list(map(_cell, row))) for layer, row in rows.items()]
    return Heat("E \\ K", [str(count) for count in drafts], lines, "few")


def _cell(cell: CellSpeed | None) -> Cell:
    if cell is None:
        return Cell("-")
    made = f"{cell.tokens_per_verification:.2f} tokens a verification"
    return Cell.of_speed(cell.speedup, f"{cell.acceptance:.0%} accepted, {made}")


def sweep_verdict(run: Sweep) -> str:
    """What to use, and how far to trust it."""
    said = []
    for part in ("grid", "skips"):
        if cells := speeds(run, part):
            top = best(cells)
            words = f"Early exit at layer {top.first} with {top.drafts} drafts a round"
            if part == "skips":
                words = f"Layer skipping with {top.first} of {2 * run.layers} halves left out"
            kept = f"{top.speedup:.2f}x plain decoding with {top.acceptance:.0%} of its drafts"
            kept += " accepted"
            slower = f" comes nearest, {kept}: do not use it here."
            said.append(words + (f": {kept}." if top.speedup > 1 else slower))
    if not said:
        return "Nothing was measured yet."
    said.append(
        f"Plain turns of one group differ by {unrest(run):.0%} on average; take smaller "
        "differences for none."
    )
    same = "All texts are those of plain decoding." if run.identical else "NOT all texts are equal."
    return " ".join([*said, same])
