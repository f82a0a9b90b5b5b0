"""Tables of plain decoding, from a run's JSON and nothing else. Peers that lose or fail keep their
rows. Times nothing."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.plain.results import CostCard, PeerRow, PlainRun, Reading
from benchmarks.ratios import median, milliseconds, ratio
from selfspec.bench.html import Table
from selfspec.bench.schema import OURS, Seconds
from selfspec.bench.tables import commit, failed, interval, number, percent, versions
from selfspec.bench.tables import markdown as as_text
from selfspec.bench.timing import Ratio
from selfspec.errors import OptionError


def decode_seconds(
    full: Sequence[float | None], first: Sequence[float | None], new_tokens: int
) -> Seconds:
    """Seconds a token after the first, round by round: (T(n) - T(1)) / (n - 1). What both share,
    prefill above all, cancels."""
    if new_tokens < 2:
        raise OptionError(
            f"new_tokens={new_tokens}: there is no token after the first to time. Give at least 2."
        )
    return [
        None if whole is None or one is None else (whole - one) / (new_tokens - 1)
        for whole, one in zip(full, first, strict=True)
    ]


def per_token(row: PeerRow) -> Seconds:
    return decode_seconds(row.full, row.first, row.new_tokens)


def peer_table(run: PlainRun, prompt_tokens: int) -> Table:
    """Every peer at one prompt length: decode and prefill, the ratios to the reference, and whether
    it wrote the same; where weights differ also what was stored how."""
    rows = [row for row in run.peers if row.prompt_tokens == prompt_tokens]
    reference = next((row for row in rows if row.peer == run.reference), None)
    header = ["peer", "ms a token", "tokens/s", f"decode speed, {run.reference} = 1"]
    header += ["first token, ms", "first token speed", "same tokens"]
    lines = [_peer_line(row, reference) for row in sorted(rows, key=_speed)]
    if len({row.precision for row in rows if row.precision}) < 2:
        return Table(header, lines)
    stored = {row.peer: row.precision or "-" for row in rows}
    lines = [[*line, stored[line[0]]] for line in lines]
    return Table([*header, "weights and cache"], lines, (0, len(header)))


def reading_table(run: PlainRun) -> Table:
    """What each made of the text, beside the reference."""
    first = next((reading for reading in run.readings if reading.peer == run.reference), None)
    header = ["peer", "perplexity", f"beside {run.reference}", "same next token"]
    return Table(header, [_reading_line(each, first) for each in run.readings])


def _reading_line(reading: Reading, first: Reading | None) -> list[str]:
    if reading.failure is not None or not reading.tokens:
        return [reading.peer, failed(reading.failure or "read nothing"), "-", "-"]
    loss = reading.loss / reading.tokens
    line = [reading.peer, number(math.exp(loss), 3)]
    if first is None or not first.tokens:
        return [*line, "-", "-"]
    beside = f"{math.expm1(loss - first.loss / first.tokens):+.2%}"
    return [*line, beside, percent(reading.same / reading.tokens, 1)]


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
        number(1 / decode if decode and decode > 0 else None),
        interval(faster),
        milliseconds(median(row.first)),
        interval(sooner),
        same_tokens(row),
    ]


def same_tokens(row: PeerRow) -> str:
    """The last column: equality with the reference, or why there is none."""
    if row.failure:
        return failed(row.failure)
    if row.identical is None:
        return "not compared"
    return "yes" if row.identical else f"no, differs at {row.first_difference}"


def cost_table(cost: CostCard) -> Table:
    """The cost card: floor, products, step."""
    best = best_bandwidth(cost)
    floor, products, step = cost.weight_bytes / best, median(cost.products), median(cost.step)
    assert products is not None and step is not None  # a cost card is written when it is complete
    read = f"{cost.weight_bytes / 1e6:.0f} MB of weights at {best / 1e9:.1f} GB/s"
    seconds = {f"floor: {read}": floor, "matrix products alone": products, "our whole step": step}
    rows = [[name, milliseconds(each), number(each / floor, 2)] for name, each in seconds.items()]
    return Table([f"one token, context {cost.context}", "ms", "of the floor"], rows)


def costs_table(costs: Mapping[str, CostCard]) -> Table:
    """The cost cards of several kinds of weights, a row each."""
    header = ["one token of", "MB of weights", "reading them, ms", "matrix products alone, ms"]
    header += ["our whole step, ms", "step, reading = 1"]
    rows = []
    for name, cost in costs.items():
        floor, step = cost.weight_bytes / best_bandwidth(cost), median(cost.step)
        assert step is not None
        times = [milliseconds(each, 2) for each in (floor, median(cost.products), step)]
        rows.append([name, number(cost.weight_bytes / 1e6, 0), *times, number(step / floor, 2)])
    return Table(header, rows)


def best_bandwidth(cost: CostCard) -> float:
    """What memory gives by the best way of reading: the median of the same rounds, or before there
    were such, the most that was seen."""
    most = statistics.median if cost.in_turns else max
    return max(most(way) for way in cost.bandwidth.values())


def verify_table(run: PlainRun) -> Table:
    """verify(n)/decode(1): one row an n, one column a context."""
    contexts = sorted({point.context for point in run.verify})
    ratios = [verify_ratios(run, context) for context in contexts]
    ones = [milliseconds(median(_seconds(run, context, 1))) for context in contexts]
    rows = [["decode(1), ms", *ones]]
    for count in sorted({point.tokens for point in run.verify}):
        cells = [interval(found.get(count)) for found in ratios]
        rows.append([f"verify({count})/decode(1)", *cells])
    return Table(["", *(f"context {context}" for context in contexts)], rows)


def verify_ratios(run: PlainRun, context: int) -> dict[int, Ratio]:
    """verify(n)/decode(1) at one context, for every n that was measured."""
    one = _seconds(run, context, 1)
    points = [point for point in run.verify if point.context == context and one]
    found = {point.tokens: ratio(point.seconds, one) for point in points}
    return {count: quotient for count, quotient in found.items() if quotient is not None}


def _seconds(run: PlainRun, context: int, tokens: int) -> Seconds:
    found = {(point.context, point.tokens): point.seconds for point in run.verify}
    return found.get((context, tokens), [])


def markdown(run: PlainRun) -> str:
    """The whole report."""
    where = run.provenance
    state = "." if run.complete else "; **interrupted**, this is what had been measured."
    parts: list[str | Table | None] = [
        f"## Plain decoding: {run.model}, {run.dtype}, {where.threads} threads on {where.cpu}",
        f"{run.rounds} interleaved rounds, medians; a ratio has its 95% interval in brackets. "
        f"{where.date}, commit {commit(where)}; made with `{where.command}`{state}",
    ]
    for prompt_tokens in sorted({row.prompt_tokens for row in run.peers}):
        new = next(row.new_tokens for row in run.peers if row.prompt_tokens == prompt_tokens)
        parts += [f"### {prompt_tokens} prompt tokens, {new} new", peer_table(run, prompt_tokens)]
    if run.readings:
        parts += [f"### Reading {run.text}", reading_table(run)]
    if len(run.costs) > 1:
        parts += ["### What the hardware allows", costs_table(run.costs)]
    for cost in run.costs.values() if len(run.costs) == 1 else ():
        times = interval(ratio(cost.step, cost.products))
        parts += ["### What the hardware allows", cost_table(cost)]
        parts.append(f"The step takes {times} times its products, round by round.")
    if run.verify:
        parts += ["### Verifying n tokens", verify_table(run)]
    parts += [f"- {note}" for note in run.notes]
    return as_text([*parts, f"Versions: {versions(where)}."]) + "\n"


def summary(run: PlainRun) -> dict[str, Any]:
    """The figures that the project steers by, for machines: the last line of a run."""
    named = {f"{row.peer}@{row.prompt_tokens}": row for row in run.peers}
    faster = {}
    for name, row in named.items():
        ours = named.get(f"{OURS}@{row.prompt_tokens}")
        if ours is not None and row.peer != OURS:
            quotient = ratio(per_token(row), per_token(ours))
            if quotient is not None and quotient.low > 0:
                faster[name] = quotient.value
    result: dict[str, Any] = {
        "kind": run.kind,
        "schema_version": run.version,
        "model": run.model,
        "complete": run.complete,
        "decode_ms": _milliseconds({name: per_token(row) for name, row in named.items()}),
        "first_token_ms": _milliseconds({name: row.first for name, row in named.items()}),
        "speed_over": faster,
        "identical": {name: row.identical for name, row in named.items()},
    }
    for name, cost in run.costs.items():
        products = ratio(cost.step, cost.products)
        result.setdefault("step_over_products", {})[name] = products.value if products else None
        result.setdefault("bandwidth_gb_s", {})[name] = best_bandwidth(cost) / 1e9
    found = {
        str(each): verify_ratios(run, each) for each in {point.context for point in run.verify}
    }
    result["verify8_over_decode1"] = {
        context: ratios[8].value
        for context, ratios in sorted(found.items(), key=lambda pair: int(pair[0]))
        if 8 in ratios
    }
    return result


def _milliseconds(found: dict[str, Seconds]) -> dict[str, float]:
    medians = {name: median(seconds) for name, seconds in found.items()}
    return {name: round(value * 1e3, 3) for name, value in medians.items() if value is not None}
