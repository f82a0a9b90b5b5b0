"""The result of `scripts/bench exits`, and its tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, ClassVar

from benchmarks.exits_energy import Spent, energy_table
from selfspec.bench.schema import Result
from selfspec.bench.tables import markdown as text

PLAIN = "plain decoding"
SPECEE = "SpecEE"
EVERYWHERE = f"{SPECEE} T1, looks all"
"""The row that schedules are compared with."""


@dataclass
class LossyRow:
    """One lossy way to decode, over all questions."""

    name: str
    tokens: int = 0
    agreed: int = 0
    """How many of them the whole model says behind the same text."""
    log_probability: float = 0.0
    """Of the text by the whole model, summed."""
    exits: list[int] = field(default_factory=list)
    """After how many layers each decoded token was said."""
    looks: int = 0
    fired: int = 0
    left: int = 0
    rule_seconds: float = 0.0
    head_seconds: float = 0.0
    decode_seconds: list[float] = field(default_factory=list)  # of each question
    decoded: list[int] = field(default_factory=list)  # tokens, of each question

    @property
    def average_layers(self) -> float:
        return sum(self.exits) / len(self.exits)

    @property
    def agreement(self) -> float:
        return self.agreed / self.tokens

    @property
    def perplexity(self) -> float:
        return math.exp(-self.log_probability / self.tokens)

    @property
    def rule_share(self) -> float:
        """Share of decoding that went into predictors, or what stands for them."""
        return self.rule_seconds / sum(self.decode_seconds)


@dataclass
class DraftRow:
    """One way to draft, over all questions."""

    name: str
    questions: int = 0
    same: int = 0
    """How many answers were plain decoding's."""
    decoded: int = 0
    drafted: int = 0
    accepted: int = 0
    readings: int = 0
    """Of a layer's weights, while decoding."""
    decode_seconds: list[float] = field(default_factory=list)


@dataclass
class Oracle:
    """The earliest exits possible."""

    layers: float
    """On average, where the answer has to be a candidate."""
    layers_of_any: float
    """The same if any token were a candidate."""
    named: float
    """Share of tokens whose answer was a candidate."""
    tokens: int


@dataclass
class ExitsRun(Result):
    """`scripts/bench exits`."""

    kind: ClassVar[str] = "exits"
    measured_by: ClassVar[str] = "scripts/bench exits"

    model: str
    kernel: str
    weights: str
    layers: int
    questions: int
    new_tokens: int
    drafts: int
    predictors: dict[str, Any]
    asked: str
    """Digest of the questions."""
    answered: int = 0
    """How many questions all have answered."""
    plain_seconds: list[float] = field(default_factory=list)
    plain_tokens: int = 0
    plain_decoded: list[int] = field(default_factory=list)
    """The same by question."""
    lossy: list[LossyRow] = field(default_factory=list)
    drafting: list[DraftRow] = field(default_factory=list)
    oracle: Oracle | None = None
    shares: dict[str, float] = field(default_factory=dict)
    """Seconds of all layers, and of the head, on one token alone."""
    seconds: float = 0.0
    energy: str = ""
    """What counts it, or why nothing does."""
    spent: dict[str, Spent] = field(default_factory=dict)
    """By who answered."""


def speed(run: ExitsRun, seconds: Sequence[float], decoded: int, each: Sequence[int] = ()) -> float:
    """How many times plain decoding's tokens a second: the median over questions where each one's
    tokens are known, else by mean times."""
    if each and run.plain_decoded:
        pairs = zip(run.plain_seconds, run.plain_decoded, seconds, each, strict=False)
        return median(a / m / (b / n) for a, m, b, n in pairs if m and n)
    plain = sum(run.plain_seconds[: len(seconds)]) / run.plain_tokens
    return plain / (sum(seconds) / decoded)


def speed_of(run: ExitsRun, row: DraftRow) -> float:
    """A draft's; its text is plain decoding's."""
    return speed(run, row.decode_seconds, row.decoded, run.plain_decoded)


def allowed(run: ExitsRun, row: LossyRow) -> float | None:
    """How many times plain decoding its average layers allow, with one head a token and what
    predictors took: (L + head) / (average + head + predictors)."""
    if not run.shares:
        return None
    layers, head = run.shares["layers"], run.shares["head"]
    looking = row.rule_seconds / len(row.exits)
    return (layers + head) / (layers * row.average_layers / run.layers + head + looking)


def saved_looks(run: ExitsRun, row: LossyRow) -> float | None:
    """Share of predictor calls that a schedule saves, next to looking everywhere; None for rules
    that have no schedule."""
    everywhere = next(each for each in run.lossy if each.name == EVERYWHERE)
    if not row.name.startswith(SPECEE):
        return None
    return 1 - (row.looks / len(row.exits)) / (everywhere.looks / len(everywhere.exits))


def saved_of_oracle(run: ExitsRun, row: LossyRow) -> float | None:
    """The layers that are left out, next to those that the earliest exits possible leave out."""
    if run.oracle is None or run.oracle.layers >= run.layers:
        return None
    return (run.layers - row.average_layers) / (run.layers - run.oracle.layers)


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def markdown(run: ExitsRun) -> str:
    lines = [
        f"{run.model}, {run.weights}, {run.layers} layers, {run.answered} of {run.questions} "
        f"questions, {run.new_tokens} new tokens each. LOSSY: the text is not the model's. T1: "
        "predictors at every layer, T2: their schedule.",
        "",
        "| lossy | layers a token | of the oracle's saving | agreement | perplexity "
        "| looks a token | calls saved | share of predictors | speed | layers allow |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in run.lossy:
        if not row.exits:
            continue
        decoded = len(row.exits)
        times = speed(run, row.decode_seconds, decoded, row.decoded)
        lines.append(
            f"| {row.name} | {row.average_layers:.2f} | {_share(saved_of_oracle(run, row))} | "
            f"{row.agreement:.1%} | {row.perplexity:.2f} | {row.looks / decoded:.1f} | "
            f"{_share(saved_looks(run, row))} | {row.rule_share:.1%} | "
            f"{times:.2f} | {_times(allowed(run, row))} |"
        )
    if run.oracle:
        lines += [
            "",
            f"The earliest exits possible (the oracle): {run.oracle.layers:.2f} layers where the "
            f"answer has to be a candidate ({run.oracle.named:.0%} of tokens), "
            f"{run.oracle.layers_of_any:.2f} where any token may be.",
        ]
    lines += [
        "",
        f"| drafting, {run.drafts} drafts a round | same text | kept drafts "
        "| layer readings a token | speed |",
        "|---|---|---|---|---|",
    ]
    for draft in run.drafting:
        if not draft.decoded:
            continue
        kept = draft.accepted / draft.drafted if draft.drafted else 0.0
        lines.append(
            f"| {draft.name} | {draft.same} of {draft.questions} | {kept:.1%} of {draft.drafted} | "
            f"{draft.readings / draft.decoded:.1f} | "
            f"{speed_of(run, draft):.2f} |"
        )
    return "\n".join([*lines, *_energy(run)])


def _energy(run: ExitsRun) -> list[str]:
    if not run.spent:
        return ["", f"Energy: {run.energy}."] if run.energy else []
    tokens = {row.name: row.tokens for row in run.lossy}
    tokens |= {draft.name: draft.decoded + draft.questions for draft in run.drafting}
    tokens[PLAIN] = run.plain_tokens + run.answered
    return ["", text([energy_table(run.spent, tokens), f"Energy: {run.energy}."])]


def summary(run: ExitsRun) -> dict[str, Any]:
    """For machines."""
    return {
        "layers": {row.name: round(row.average_layers, 3) for row in run.lossy},
        "agreement": {row.name: round(row.agreement, 4) for row in run.lossy},
        "perplexity": {row.name: round(row.perplexity, 3) for row in run.lossy},
        "oracle": run.oracle and run.oracle.layers,
        "identical": all(draft.same == draft.questions for draft in run.drafting),
    }
