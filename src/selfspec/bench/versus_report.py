"""Tables of a `scripts/bench versus` result, from its JSON and nothing else. Rows that win, lose or
fail all stay in."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .report import OURS, interval, milliseconds, table
from .schema import read_result
from .timing import Ratio

VERSUS_SCHEMA = 1
REFERENCE = ("transformers", "plain")
Costs = dict[int, tuple[float, int]]  # of each question: seconds, tokens


def load_versus(path: Path) -> dict[str, Any]:
    """Read a result; another file is an error that says so."""
    return read_result(path, "versus", VERSUS_SCHEMA, "scripts/bench versus")


def decoding(run: dict[str, Any], peer: str, method: str) -> Costs:
    """Of each question that left something to decode: seconds after the first token, and tokens
    after it."""
    mine = [
        answer
        for answer in run["answers"]
        if (answer["peer"], answer["method"]) == (peer, method) and answer["made"] > 1
    ]
    return {
        answer["question"]: (answer["full"] - answer["first"], answer["made"] - 1)
        for answer in mine
    }


def whole(run: dict[str, Any], peer: str, method: str) -> Costs:
    """The same of the whole call, prefill included."""
    mine = [
        answer for answer in run["answers"] if (answer["peer"], answer["method"]) == (peer, method)
    ]
    return {answer["question"]: (answer["full"], answer["made"]) for answer in mine}


def per_token(costs: Sequence[tuple[float, int]]) -> float:
    """Seconds a token over several questions."""
    return sum(seconds for seconds, _ in costs) / sum(count for _, count in costs)


def faster(theirs: Costs, ours: Costs, draws: int = 2000) -> Ratio | None:
    """How many times as long a token takes them as us, over the questions that both answered,
    resampled whole."""
    both = sorted(theirs.keys() & ours.keys())
    if not both:
        return None

    def of(sample: Sequence[int]) -> float:
        return per_token([theirs[number] for number in sample]) / per_token(
            [ours[number] for number in sample]
        )

    chance = random.Random(len(both))
    values = sorted(of(chance.choices(both, k=len(both))) for _ in range(draws))
    return Ratio(of(both), values[int(0.025 * draws)], values[int(0.975 * draws) - 1])


def markdown(run: dict[str, Any]) -> str:
    """One table a method, fastest first: the reference's plain decoding is 1."""
    parts = []
    for method in dict.fromkeys(method for _, method in run["contestants"]):
        peers = [peer for peer, theirs in run["contestants"] if theirs == method]
        header = [
            method,
            "ms a token",
            "speed, transformers plain = 1",
            "selfspec's speed, this = 1",
            "ms a token with prefill",
        ]
        header += ["accepted/drafted", "same tokens"]
        order = sorted(
            peers,
            key=lambda peer: per_token(list(decoding(run, peer, method).values()) or [(1e9, 1)]),
        )
        parts.append(table(header, [_line(run, peer, method) for peer in order]))
    where = run["provenance"]
    damped = (
        ""
        if run["factor"] == 1
        else f" with its later layers at {run['factor']:g} of their size, so that exits are often "
        f"right"
    )
    parts.append(
        f"{run['model']}{damped}; {len({answer['question'] for answer in run['answers']})} "
        f"questions, up to {run['new_tokens']} "
        f"new tokens, {run['tokens']} drafts a round, exit after {run['layer']} layers, n-grams "
        f"up to 3, float32, "
        f"{where['threads']} threads, {where['cpu']}. ms a token leaves out the first token and "
        f"the prefill; a drafter's own "
        "prefill is in it where the library does it later. 95% intervals over questions. "
        "Acceptance is as each library counts it."
        + ("" if run["complete"] else " **Interrupted**: this is what had been measured.")
    )
    parts.append(
        "Versions: "
        + ", ".join(f"{name} {version}" for name, version in sorted(where["versions"].items()))
        + "."
    )
    return "\n\n".join(parts)


def _line(run: dict[str, Any], peer: str, method: str) -> list[str]:
    reason = run["failures"].get(f"{peer} {method}")
    costs = decoding(run, peer, method)
    if reason is not None or not costs:
        return [peer, "-", "-", "-", "-", "-", f"failed: {reason or 'no answer'}".replace("|", "/")]
    reference, ours = decoding(run, *REFERENCE), decoding(run, OURS, method)
    answers = [
        answer for answer in run["answers"] if (answer["peer"], answer["method"]) == (peer, method)
    ]
    return [
        peer,
        milliseconds(per_token(list(costs.values()))),
        interval(faster(reference, costs)),
        "1" if peer == OURS else interval(faster(costs, ours)),
        milliseconds(per_token(list(whole(run, peer, method).values()))),
        _acceptance(answers),
        _same(answers),
    ]


def _acceptance(answers: Sequence[dict[str, Any]]) -> str:
    drafted = sum(answer["drafted"] or 0 for answer in answers)
    return f"{sum(answer['accepted'] or 0 for answer in answers) / drafted:.0%}" if drafted else "-"


def _same(answers: Sequence[dict[str, Any]]) -> str:
    different = sum(answer["difference"] is not None for answer in answers)
    return "yes" if not different else f"NO, {different} of {len(answers)} differ"
