"""Tables made from a run's JSON and from nothing else, as Markdown. Peers that lose or fail keep
their rows. Times nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .schema import CostCard, PeerRow, PlainRun, Seconds, load
from .timing import Ratio, decode_seconds, median, ratio

OURS = "selfspec"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, padded so that it reads in a terminal too; the first column is text, the
    others are numbers."""
    widths = [max(len(line[column]) for line in (header, *rows)) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "| " + " | ".join(padded) + " |"

    rule = (
        "|"
        + "|".join(
            ("-" * (width + 1) + ":") if column else ("-" * (width + 2))
            for column, width in enumerate(widths)
        )
        + "|"
    )
    return "\n".join([line(header), rule, *(line(row) for row in rows)])


def milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f}"


def interval(quotient: Ratio | None) -> str:
    """A ratio with its interval; none where decode time, a difference of two timings, drowned in
    noise."""
    if quotient is None:
        return "-"
    return (
        f"{quotient.value:.2f} ({quotient.low:.2f}-{quotient.high:.2f})"
        if quotient.low > 0
        else "lost in noise"
    )


def per_token(row: PeerRow) -> Seconds:
    return decode_seconds(row.full, row.first, row.new_tokens)


def peer_table(run: PlainRun, prompt_tokens: int) -> str:
    """Every peer at one prompt length: decode and prefill, the ratios to the reference, and whether
    it wrote the same."""
    rows = [row for row in run.peers if row.prompt_tokens == prompt_tokens]
    reference = next((row for row in rows if row.peer == run.reference), None)
    header = [
        "peer",
        "ms a token",
        "tokens/s",
        f"decode speed, {run.reference} = 1",
        "first token, ms",
        "first token speed",
        "same tokens",
    ]
    return table(header, [_peer_line(row, reference) for row in sorted(rows, key=_speed)])


def _speed(row: PeerRow) -> tuple[bool, float]:
    """Fastest first, failed ones last."""
    decode = median(per_token(row))
    return row.failure is not None or decode is None, decode or 0.0


def _peer_line(row: PeerRow, reference: PeerRow | None) -> list[str]:
    decode = median(per_token(row))
    faster = ratio(per_token(reference), per_token(row)) if reference else None
    sooner = ratio(reference.first, row.first) if reference else None
    return [
        row.peer,
        milliseconds(decode),
        f"{1 / decode:.1f}" if decode and decode > 0 else "-",
        interval(faster),
        milliseconds(median(row.first)),
        interval(sooner),
        same_tokens(row),
    ]


def same_tokens(row: PeerRow) -> str:
    """The last column: equality with the reference, or why there is none."""
    if row.failure:
        return f"failed: {row.failure}".replace("|", "/").replace("\n", " ")
    if row.identical is None:
        return "not compared"
    return "yes" if row.identical else f"no, differs at {row.first_difference}"


def cost_lines(cost: CostCard) -> str:
    """The cost card in words: floor, products, step."""
    best = best_bandwidth(cost)
    floor, products, step = cost.weight_bytes / best, median(cost.products), median(cost.step)
    assert products is not None and step is not None  # a cost card is written when it is complete
    lines = table(
        ["one token, context " + str(cost.context), "ms", "of the floor"],
        [
            [
                f"floor: {cost.weight_bytes / 1e6:.0f} MB of weights at {best / 1e9:.1f} GB/s",
                milliseconds(floor),
                "1.00",
            ],
            ["matrix products alone", milliseconds(products), f"{products / floor:.2f}"],
            ["our whole step", milliseconds(step), f"{step / floor:.2f}"],
        ],
    )
    return f"{lines}\n\nThe step takes {interval(ratio(cost.step, cost.products))} times its products, round by round."


def best_bandwidth(cost: CostCard) -> float:
    """The most that memory was seen to give: best repetition of the best way of reading."""
    return max(value for way in cost.bandwidth.values() for value in way)


def verify_table(run: PlainRun) -> str:
    """verify(n)/decode(1): one row an n, one column a context."""
    contexts = sorted({point.context for point in run.verify})
    counts = sorted({point.tokens for point in run.verify})
    cells = {context: verify_ratios(run, context) for context in contexts}
    rows = [
        [
            "decode(1), ms",
            *(milliseconds(median(_seconds(run, context, 1))) for context in contexts),
        ]
    ]
    rows += [
        [
            f"verify({count})/decode(1)",
            *(interval(cells[context].get(count)) for context in contexts),
        ]
        for count in counts
    ]
    return table(["", *(f"context {context}" for context in contexts)], rows)


def verify_ratios(run: PlainRun, context: int) -> dict[int, Ratio]:
    """verify(n)/decode(1) at one context, for every n that was measured."""
    one = _seconds(run, context, 1)
    found = {
        point.tokens: ratio(point.seconds, one)
        for point in run.verify
        if point.context == context and one
    }
    return {count: quotient for count, quotient in found.items() if quotient is not None}


def _seconds(run: PlainRun, context: int, tokens: int) -> Seconds:
    return next(
        (
            point.seconds
            for point in run.verify
            if (point.context, point.tokens) == (context, tokens)
        ),
        [],
    )


def markdown(run: PlainRun) -> str:
    """The whole report."""
    where = run.provenance
    parts = [
        f"## Plain decoding: {run.model}, {run.dtype}, {where.threads} threads on {where.cpu}",
        f"{run.rounds} interleaved rounds, medians; a ratio has its 95% interval in brackets. "
        f"{where.date}, commit "
        f"{(where.commit or 'unknown')[:12]}{' with uncommitted changes' if where.uncommitted_changes else ''}; made with "
        f"`{where.command}`"
        + ("." if run.complete else "; **interrupted**, this is what had been measured."),
    ]
    for prompt_tokens in sorted({row.prompt_tokens for row in run.peers}):
        new = next(row.new_tokens for row in run.peers if row.prompt_tokens == prompt_tokens)
        parts += [f"### {prompt_tokens} prompt tokens, {new} new", peer_table(run, prompt_tokens)]
    if run.cost is not None:
        parts += ["### What the hardware allows", cost_lines(run.cost)]
    if run.verify:
        parts += ["### Verifying n tokens", verify_table(run)]
    parts += [f"- {note}" for note in run.notes]
    parts.append(
        "Versions: "
        + ", ".join(f"{name} {version}" for name, version in where.versions.items())
        + "."
    )
    return "\n\n".join(parts) + "\n"


def summary(run: PlainRun) -> dict[str, Any]:
    """The figures that the project steers by, for machines: the last line of a run."""
    result: dict[str, Any] = {
        "kind": run.kind,
        "schema_version": run.schema_version,
        "model": run.model,
        "complete": run.complete,
    }
    result["decode_ms"] = _figures(run, lambda row: median(per_token(row)))
    result["first_token_ms"] = _figures(run, lambda row: median(row.first))
    result["speed_over"] = {
        f"{row.peer}@{row.prompt_tokens}": quotient.value
        for row in run.peers
        for ours in run.peers
        if ours.peer == OURS != row.peer and ours.prompt_tokens == row.prompt_tokens
        if (quotient := ratio(per_token(row), per_token(ours))) is not None and quotient.low > 0
    }
    result["identical"] = {f"{row.peer}@{row.prompt_tokens}": row.identical for row in run.peers}
    if run.cost is not None:
        products = ratio(run.cost.step, run.cost.products)
        result["step_over_products"] = products.value if products else None
        result["bandwidth_gb_s"] = best_bandwidth(run.cost) / 1e9
    result["verify8_over_decode1"] = {
        str(context): quotients[8].value
        for context in sorted({point.context for point in run.verify})
        if 8 in (quotients := verify_ratios(run, context))
    }
    return result


def _figures(run: PlainRun, measure: Any) -> dict[str, float]:
    found = {f"{row.peer}@{row.prompt_tokens}": measure(row) for row in run.peers}
    return {name: round(value * 1e3, 3) for name, value in found.items() if value is not None}


def report(path: Path) -> str:
    """The tables of a result file."""
    return markdown(load(path))
