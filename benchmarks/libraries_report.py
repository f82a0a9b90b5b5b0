"""Tables of a `scripts/bench libraries` result, from its JSON and nothing else. Rows that win, lose
or fail all stay in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.ratios import milliseconds, resampled
from selfspec.bench.html import Table
from selfspec.bench.schema import OURS, Result
from selfspec.bench.tables import failed, interval, percent, versions
from selfspec.bench.tables import markdown as as_text
from selfspec.bench.timing import Ratio

REFERENCE = ("transformers", "plain")
Costs = dict[int, tuple[float, int]]  # of each question: seconds, tokens


@dataclass
class Answer:
    """One contestant's answer to one question: seconds for 1 token and for all of them."""

    peer: str
    method: str
    question: int
    prompt_tokens: int
    first: float
    full: float
    made: int
    difference: int | None = None  # index of the first token that is not the reference's
    drafted: int | None = None  # as the peer says; shown, not used
    accepted: int | None = None


@dataclass
class LibrariesRun(Result):
    """Everything that was measured. The committed files are of a time when this was `versus`."""

    kind = "versus"
    measured_by = "scripts/bench libraries"

    model: str
    factor: float
    layer: int
    tokens: int
    new_tokens: int
    contestants: list[tuple[str, ...]] = field(default_factory=list)  # peer, method
    answers: list[Answer] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)  # "peer method" to the reason


def answers_of(run: LibrariesRun, peer: str, method: str) -> list[Answer]:
    return [answer for answer in run.answers if (answer.peer, answer.method) == (peer, method)]


def decoding(run: LibrariesRun, peer: str, method: str) -> Costs:
    """Of each question that left something to decode: seconds after the first token, and tokens
    after it."""
    mine = [answer for answer in answers_of(run, peer, method) if answer.made > 1]
    return {each.question: (each.full - each.first, each.made - 1) for each in mine}


def per_token(costs: Sequence[tuple[float, int]]) -> float:
    """Seconds a token over several questions."""
    return sum(seconds for seconds, _ in costs) / sum(count for _, count in costs)


def faster(theirs: Costs, ours: Costs) -> Ratio | None:
    """How many times as long a token takes them as us, over the questions that both answered,
    resampled whole."""
    both = sorted(theirs.keys() & ours.keys())

    def of(sample: Sequence[int]) -> float:
        mine = per_token([ours[number] for number in sample])
        return per_token([theirs[number] for number in sample]) / mine

    return resampled(both, of) if both else None


def markdown(run: LibrariesRun) -> str:
    """One table a method, fastest first: the reference's plain decoding is 1."""
    parts: list[str | Table | None] = []
    for method in dict.fromkeys(method for _, method in run.contestants):
        peers = [peer for peer, theirs in run.contestants if theirs == method]
        costs = {peer: list(decoding(run, peer, method).values()) for peer in peers}
        order = sorted(peers, key=lambda peer: per_token(costs[peer] or [(1e9, 1)]))
        header = [method, "ms a token", "speed, transformers plain = 1"]
        header += ["selfspec's speed, this = 1", "ms a token with prefill", "accepted/drafted"]
        lines = [_line(run, peer, method) for peer in order]
        parts.append(Table([*header, "same tokens"], lines))
    where = run.provenance
    share = f" with its later layers at {run.factor:g} of their size, so that exits are often right"
    parts.append(
        f"{run.model}{'' if run.factor == 1 else share}; "
        f"{len({answer.question for answer in run.answers})} questions, up to {run.new_tokens} new "
        f"tokens, {run.tokens} drafts a round, exit after {run.layer} layers, n-grams up to 3, "
        f"float32, {where.threads} threads, {where.cpu}. ms a token leaves out the first token and "
        "the prefill; a drafter's own prefill is in it where the library does it later. 95% "
        "intervals over questions. Acceptance is as each library counts it."
        + ("" if run.complete else " **Interrupted**: this is what had been measured.")
    )
    return as_text([*parts, f"Versions: {versions(where)}."])


def _line(run: LibrariesRun, peer: str, method: str) -> list[str]:
    reason = run.failures.get(f"{peer} {method}")
    costs, mine = decoding(run, peer, method), answers_of(run, peer, method)
    if reason is not None or not costs:
        return [peer, "-", "-", "-", "-", "-", failed(reason or "no answer")]
    reference, ours = decoding(run, *REFERENCE), decoding(run, OURS, method)
    drafted = sum(answer.drafted or 0 for answer in mine)
    accepted = sum(answer.accepted or 0 for answer in mine)
    different = sum(answer.difference is not None for answer in mine)
    return [
        peer,
        milliseconds(per_token(list(costs.values()))),
        interval(faster(reference, costs)),
        "1" if peer == OURS else interval(faster(costs, ours)),
        milliseconds(per_token([(answer.full, answer.made) for answer in mine])),
        percent(accepted / drafted if drafted else None),
        "yes" if not different else f"NO, {different} of {len(mine)} differ",
    ]
