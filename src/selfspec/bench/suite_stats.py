"""What a suite result says: speeds with intervals, acceptance, where the time went, who is faster.
From the JSON alone.

A cost is the seconds a token takes after the first ones: of each unit the median over rounds. The
speedup of a task is the mean cost of the baseline over the mean cost of the method. Its interval is
a bootstrap over units, the two always drawn together, since they took turns on the same unit,
widened for small samples. The mean of tasks draws within each task. All is seeded: a JSON has one
table.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from statistics import fmean, median

from .contestants import DRAFTS, own_options
from .schema import OURS, Counts, Difference, SuiteRun, Turn, engine_of, method_of
from .timing import Ratio, Verdict

PLAIN_METHODS = ("plain", "compiled")  # what is a baseline: decoding that drafts nothing
TOLERANCE = 0.02  # speeds whose interval comes this near to 1 are called equal
DRAWS = 2000
NORMAL = 1.96
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
NEAR_TIE = 1e-4  # logits, in float32
NEAR_TIE_SHARE = 0.03  # of the largest logit, in half precision
Unit = tuple[str, ...]
Costs = Mapping[Unit, float]
Pair = tuple[float, float]
Draw = Callable[[random.Random], float]


@dataclass(frozen=True)
class Row:
    """One contestant at one batch size, over one task or over all of them (`task` is None)."""

    contestant: str
    task: str | None
    batch: int
    precision: str
    failure: str | None
    units: int
    tokens_per_second: float | None
    """After the first tokens, all rows together."""
    tokens_per_second_with_prefill: float | None
    over_plain: Ratio | None
    """Speed over plain decoding of the same engine; None where it has none."""
    over_best: Ratio | None
    """Speed over the fastest plain decoding of all engines of this precision."""
    verdict: Verdict | None
    """Against plain decoding of the same engine; None when one unit alone cannot say."""
    slowest: tuple[str, float] | None
    """The unit where its speed over the same engine's plain decoding is least: the median of the
    rounds, each with its own plain turn."""
    tokens_per_verification: float | None
    acceptance: float | None
    drafts: str
    """At which K: a number where it is fixed, else what decides."""
    by_position: tuple[float, ...]
    draft_share: float | None
    verify_share: float | None
    host_share: float | None
    first_seconds: float | None
    peak_memory_bytes: int | None
    joules_per_token: float | None
    cold_start_seconds: float | None
    compared: int
    """How many rows were compared with the reference."""
    differences: tuple[Difference, ...]

    @property
    def engine(self) -> str:
        return engine_of(self.contestant)

    @property
    def method(self) -> str:
        return method_of(self.contestant)

    @property
    def baseline(self) -> bool:
        return is_baseline(self.contestant)

    @property
    def speed(self) -> float:
        """Over its own plain decoding; 0 where it has none."""
        return self.over_plain.value if self.over_plain else 0.0


def is_baseline(contestant: str) -> bool:
    """Whether it decodes plainly."""
    return method_of(contestant).partition(":")[0] in PLAIN_METHODS


def precisions(run: SuiteRun) -> list[str]:
    """Of the engines that started, ours first: each has a table of its own."""
    engines = sorted(run.engines, key=lambda engine: engine.name != OURS)
    named = [engine.precision for engine in engines if engine.precision]
    return list(dict.fromkeys(named)) or [run.plan.dtype]


def precision_of(run: SuiteRun, contestant: str) -> str:
    """An engine that never started would have been asked for the run's dtype."""
    known = {engine.name: engine.precision for engine in run.engines}
    return known.get(engine_of(contestant)) or run.plan.dtype


def sections(run: SuiteRun) -> list[tuple[str, int, list[Row]]]:
    """What may stand in one table: the rows of each precision and batch size, ours first."""
    return [
        (precision, batch, [row for row in rows(run, batch) if row.precision == precision])
        for precision in precisions(run)
        for batch in run.plan.batches
    ]


def tasks_of(run: SuiteRun) -> list[str]:
    """In the order in which they were asked."""
    return [sample.task for sample in run.plan.samples]


def turns_of(run: SuiteRun, contestant: str, batch: int, task: str | None = None) -> list[Turn]:
    """A contestant's turns."""
    mine = (turn for turn in run.turns if (turn.contestant, turn.batch) == (contestant, batch))
    return [turn for turn in mine if task in (None, turn.task)]


def counts_of(turns: Sequence[Turn]) -> list[Counts]:
    """What the engine said of those turns, where it said anything."""
    return [turn.counts for turn in turns if turn.counts is not None]


def costs_of(turns: Sequence[Turn]) -> dict[Unit, float]:
    """Seconds a token of each unit that left something to decode: the median over rounds."""
    times: dict[Unit, list[float]] = {}
    for turn in turns:
        if turn.decoded > 0 and turn.decode_seconds is not None and turn.decode_seconds > 0:
            times.setdefault(tuple(turn.questions), []).append(turn.decode_seconds / turn.decoded)
    return {unit: median(values) for unit, values in times.items()}


def slowest(baseline: Sequence[Turn], method: Sequence[Turn]) -> tuple[str, float] | None:
    """The unit with the least median over rounds of the method's speed over the baseline's."""
    rounds = {turn.round for turn in (*baseline, *method)}
    ratios: dict[Unit, list[float]] = {}
    for number in rounds:
        base, mine = (
            costs_of([turn for turn in turns if turn.round == number])
            for turns in (baseline, method)
        )
        for unit in base.keys() & mine.keys():
            ratios.setdefault(unit, []).append(base[unit] / mine[unit])
    least = min(((median(each), unit) for unit, each in ratios.items()), default=None)
    return None if least is None else (least[1][0], least[0])


def pairs(baseline: Costs, method: Costs) -> list[Pair]:
    """The units that both answered."""
    return [(baseline[unit], method[unit]) for unit in baseline if unit in method]


def speedup(costs: Sequence[Pair]) -> float:
    """Seconds a token of the baseline over the method's, each the mean over units."""
    return sum(base for base, _ in costs) / sum(method for _, method in costs)


def interval(groups: Sequence[Sequence[Pair]], draws: int = DRAWS) -> Ratio | None:
    """Mean over groups (tasks) of their speedups, with a 95% interval; None without a common
    unit."""
    groups = [group for group in groups if group]
    if not groups:
        return None
    each = [speedup(group) for group in groups]
    sizes = [len(group) for group in groups]
    if set(sizes) == {1}:  # one unit a task: the tasks are what can be drawn
        sizes = [len(each)]
        draw: Draw = lambda chance: fmean(chance.choices(each, k=len(each)))  # noqa: E731
    else:
        draw = lambda chance: fmean(  # noqa: E731
            [speedup(chance.choices(group, k=len(group))) for group in groups]
        )
    return bootstrap(fmean(each), draw, sizes, draws)


def bootstrap(value: float, draw: Draw, sizes: Sequence[int], draws: int = DRAWS) -> Ratio:
    """A value with its 95% interval from seeded draws.

    Drawing n values out of n shows too little spread, by sqrt(1 - 1/n), and the tails of few are
    those of Student's t: the interval is widened by both, with what the groups of these sizes leave
    free.
    """
    chance = random.Random(0)
    values = sorted(draw(chance) for _ in range(draws))
    free = sum(size - 1 for size in sizes)
    wider = student(free) / NORMAL * (sum(sizes) / free) ** 0.5 if free else 1.0
    low, high = values[int(0.025 * draws)], values[int(0.975 * draws) - 1]
    return Ratio(value, max(0.0, value - (value - low) * wider), value + (high - value) * wider)


def student(free: int) -> float:
    """The 97.5% point of Student's t: a table, then its expansion in 1/free (within 0.003)."""
    if free <= len(STUDENT):
        return STUDENT[free - 1]
    second = (5 * NORMAL**5 + 16 * NORMAL**3 + 3 * NORMAL) / (96 * free**2)
    return NORMAL + (NORMAL**3 + NORMAL) / (4 * free) + second


def verdict(speed: Ratio | None, units: int) -> Verdict | None:
    """Faster or slower than 1, or equal; one unit alone has an interval without width."""
    if speed is None or units < 2:
        return None
    if speed.low > 1 + TOLERANCE:
        return "faster"
    return "slower" if speed.high < 1 - TOLERANCE else "equal"


def best_baseline(run: SuiteRun, batch: int, precision: str) -> str | None:
    """The fastest plain decoding at this precision: least mean seconds a token over all units."""
    means = {}
    for name in run.plan.contestants:
        if is_baseline(name) and precision_of(run, name) == precision:
            costs = costs_of(turns_of(run, name, batch))
            if costs and run.failure(name) is None:
                means[name] = fmean(costs.values())
    return min(means, key=lambda name: means[name], default=None)


def rows(run: SuiteRun, batch: int, task: str | None = None) -> list[Row]:
    """Every contestant, those that lose or failed too, as the run named them."""
    best = {precision: best_baseline(run, batch, precision) for precision in precisions(run)}
    names = run.plan.contestants
    return [_row(run, name, batch, task, best.get(precision_of(run, name))) for name in names]


def _row(run: SuiteRun, name: str, batch: int, task: str | None, best: str | None) -> Row:
    turns, engine = turns_of(run, name, batch, task), engine_of(name)
    baselines = [each for each in run.plan.contestants if is_baseline(each)]
    plain = next((each for each in baselines if engine_of(each) == engine), None)
    over_plain, units = _over(run, plain, name, batch, task)
    counts = counts_of(turns)
    made = sum(sum(turn.made) for turn in turns)
    firsts = [turn.first_seconds for turn in turns if turn.first_seconds is not None]
    joules = [turn.joules for turn in turns if turn.joules is not None]
    peaks = [each for turn in turns if (each := turn.peak_memory_bytes) is not None]
    return Row(
        contestant=name,
        task=task,
        batch=batch,
        precision=precision_of(run, name),
        failure=run.failure(name),
        units=units,
        tokens_per_second=_over_sum((t.decoded, t.decode_seconds) for t in turns),
        tokens_per_second_with_prefill=_over_sum((sum(t.made), t.seconds) for t in turns),
        over_plain=over_plain,
        over_best=_over(run, best, name, batch, task)[0],
        verdict=verdict(over_plain, units),
        slowest=slowest(turns_of(run, plain, batch, task), turns) if plain else None,
        tokens_per_verification=_over_sum(
            (t.decoded, t.counts.verifications)
            for t in turns
            if t.counts and t.counts.verifications
        ),
        acceptance=_over_sum((each.accepted, each.drafted) for each in counts),
        drafts=drafts_of(name),
        by_position=by_position(counts),
        draft_share=_of_time(counts, "draft_seconds"),
        verify_share=_of_time(counts, "verify_seconds"),
        host_share=_of_time(counts, "host_seconds"),
        first_seconds=median(firsts) if firsts else None,
        peak_memory_bytes=max(peaks, default=None),
        joules_per_token=sum(joules) / made if joules else None,
        cold_start_seconds=_cold_start(run, name),
        compared=sum(turn.batch for turn in turns),
        differences=tuple(difference for turn in turns for difference in turn.differences),
    )


def _over(
    run: SuiteRun, base: str | None, name: str, batch: int, task: str | None
) -> tuple[Ratio | None, int]:
    """Speed over a baseline, and over how many units."""
    if base is None:
        return None, 0
    groups = []
    for each in tasks_of(run) if task is None else [task]:
        costs = [costs_of(turns_of(run, who, batch, each)) for who in (base, name)]
        groups.append(pairs(costs[0], costs[1]))
    return interval(groups), sum(map(len, groups))


def _over_sum(shares: Iterable[tuple[float | None, float | None]]) -> float | None:
    """The sum of the first over the sum of the second; None where that is nothing."""
    known = [(part or 0.0, whole or 0.0) for part, whole in shares]
    total = sum(whole for _, whole in known)
    return sum(part for part, _ in known) / total if total else None


def _of_time(counts: Sequence[Counts], phase: str) -> float | None:
    """A phase's share of the decoding time, both as the engine says."""
    known = [each for each in counts if each.draft_seconds is not None]
    phases = ("draft_seconds", "verify_seconds", "host_seconds")
    return _over_sum(
        (getattr(each, phase), sum(getattr(each, name) or 0.0 for name in phases)) for each in known
    )


def by_position(counts: Sequence[Counts]) -> tuple[float, ...]:
    """For each depth the share of drafts kept among those whose predecessors were all kept."""
    tried = [sum(each) for each in zip_longest(*(c.drafted_at for c in counts), fillvalue=0)]
    kept = [sum(each) for each in zip_longest(*(c.accepted_at for c in counts), fillvalue=0)]
    return tuple(k / n for k, n in zip_longest(kept, tried, fillvalue=0) if n)


def drafts_of(contestant: str) -> str:
    """The K at which its acceptance was measured."""
    method = method_of(contestant)
    if is_baseline(contestant):
        return "-"
    if engine_of(contestant) != OURS:
        pairs = (item.partition("=") for item in method.partition(":")[2].split(","))
        return next((value for name, _, value in pairs if name == "tokens"), "own")
    options = own_options(method)
    control = options.get("control")
    if control is None:
        return "auto" if options["draft"] == "auto" else str(DRAFTS)
    fixed = options["control_options"].get("tokens", DRAFTS)
    return str(fixed if control == "fixed" else control)


def _cold_start(run: SuiteRun, name: str) -> float | None:
    loads = {row.name: row.load_seconds for row in run.engines}
    firsts = {row.name: row.first_answer_seconds for row in run.contestants}
    load, first = loads.get(engine_of(name)), firsts.get(name)
    return None if load is None or first is None else load + first


def near_tie(difference: Difference, precision: str) -> bool:
    """Whether rounding alone can have turned the choice there."""
    if difference.gap is None:
        return False
    limit = NEAR_TIE if precision == "float32" else NEAR_TIE_SHARE * (difference.largest or 0.0)
    return abs(difference.gap) <= limit


def overhead(run: SuiteRun) -> float | None:
    """The harness's share of a turn: what a request that asks for nothing takes over the turn's."""
    pipes = {row.name: row.pipe_seconds for row in run.engines}
    known = [(pipes.get(engine_of(turn.contestant)), turn.seconds) for turn in run.turns]
    shares = [pipe / seconds for pipe, seconds in known if pipe is not None]
    return median(shares) if shares else None
