"""One run of `selfspec bench`: every contestant answers every question in turns; what was measured
is kept, whatever happens.

A *unit* is a question, or as many questions of a task as the batch is large. Within a unit
contestants take turns, beginning with another one each time, so that a machine that drifts drifts
for all. Tokens are compared with those of our plain decoding once the round is over. A finished
round of a unit is saved; a kill loses no more than one. Does not know how a peer works, what a
table looks like, or what was typed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path

from ..errors import OptionError, Unavailable
from .contestants import Contestant, drafts_at_most
from .engines import Engines, Measured
from .peers import PeerFailed
from .prompts import Prompt
from .schema import (
    OURS,
    Answer,
    ContestantRow,
    Counts,
    Difference,
    EngineRow,
    StepPoint,
    SuiteRun,
    Turn,
    engine_of,
    write,
)

WARM_UP_TOKENS = 8
LONGEST_BLOCK = 8  # tokens; isolated passes go up to this, further where a method drafts more


@dataclass(frozen=True)
class Unit:
    """What is asked at once."""

    task: str
    prompts: Sequence[Prompt]

    @property
    def names(self) -> list[str]:
        return [prompt.id for prompt in self.prompts]


def units_of(prompts: Sequence[Prompt], batches: Sequence[int]) -> list[Unit]:
    """Every question alone, and for other batch sizes consecutive questions of a task; a rest that
    fills no batch is left out."""
    units = []
    for batch in batches:
        for task in dict.fromkeys(prompt.task for prompt in prompts):
            mine = [prompt for prompt in prompts if prompt.task == task]
            if len(mine) < batch:
                raise OptionError(
                    f"--batches {batch} needs {batch} questions a task and {task} has {len(mine)}; "
                    f"ask more with --sample {batch}"
                )
            starts = range(0, len(mine) - batch + 1, batch)
            units += [Unit(task, mine[start : start + batch]) for start in starts]
    return units


@dataclass
class Suite:
    """A run that is ready to be measured. `costs`: ids of a text behind which isolated steps are
    timed after each question; without them they are not. `minutes`: after so long nothing new is
    begun, 0 is no limit."""

    run: SuiteRun
    contestants: Sequence[Contestant]
    prompts: Sequence[Prompt]
    engines: Engines
    out: Path
    decode: Callable[[Sequence[int]], str]
    eos: Sequence[int]
    costs: Sequence[int] = ()
    minutes: float = 0.0

    def __post_init__(self) -> None:
        self.units = units_of(self.prompts, self.run.plan.batches)
        self._rows = {row.name: row for row in self.run.contestants}
        self._answers = {answer.question: answer.tokens for answer in self.run.answers}

    @property
    def turns(self) -> int:
        return len(self.units) * self.run.plan.rounds * len(self.contestants)

    def measure(
        self,
        tick: Callable[[str], None] = lambda _: None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Everything that has not been measured yet. `tick` hears of every turn, `say` of what is
        going on. An error or Ctrl-C leaves the finished rounds in the file."""
        self._tick, self._say, self._saved = tick, say, time.perf_counter()
        ends = time.monotonic() + (60 * self.minutes or float("inf"))
        self.run.energy = self.engines.energy.said
        self.run.sittings += 1
        try:
            self._open()
            self._warm_up()
            self._saved = time.perf_counter()
            for index, unit in enumerate(self.units):
                for number in range(self.run.plan.rounds):
                    if time.monotonic() > ends:
                        return
                    self._round(unit, number, index + number)
            self.run.complete = True
        finally:
            self.engines.close()
            self._save()

    def _save(self) -> None:
        now = time.perf_counter()
        self.run.wall_seconds += now - self._saved
        self._saved = now
        write(self.run, self.out)

    def _open(self) -> None:
        known = {row.name: row for row in self.run.engines}
        longest = max((prompt.ids for prompt in self.prompts), key=len)
        for name in dict.fromkeys(contestant.engine for contestant in self.contestants):
            row = known.get(name) or EngineRow(name)
            if name not in known:
                self.run.engines.append(row)
            self._say(f"starting {name}")
            try:
                self.engines.open(row, longest)
                row.failure = None
            except PeerFailed as failure:
                row.failure = str(failure)
            known_versions = {**self.run.provenance.versions, **row.versions}
            self.run.provenance = replace(self.run.provenance, versions=known_versions)
        self._check_ours()

    def _warm_up(self) -> None:
        """A short answer of each contestant at each batch size; the first one says what a cold
        start costs."""
        for contestant in self.contestants:
            row = self._rows.get(contestant.name) or ContestantRow(contestant.name)
            if contestant.name not in self._rows:
                self._rows[contestant.name] = row
                self.run.contestants.append(row)
            for batch in self.run.plan.batches if self.run.failure(contestant.name) is None else ():
                self._say(f"warming up {contestant.name}")
                unit = next(unit for unit in self.units if len(unit.prompts) == batch)
                try:
                    made = self._ask(contestant, unit, WARM_UP_TOKENS)
                except PeerFailed as failure:
                    row.failure = str(failure)
                    break
                row.first_answer_seconds = row.first_answer_seconds or made.seconds
        self._check_ours()

    def _check_ours(self) -> None:
        """Without our plain decoding there is nothing to compare with."""
        failure = self.run.failure(self.run.plan.reference)
        if failure is not None:
            raise Unavailable(
                f"our own plain decoding failed, and everything is compared with it: {failure}"
            )

    def _ask(self, contestant: Contestant, unit: Unit, new_tokens: int) -> Measured:
        plan, options = self.run.plan, dict(contestant.options)
        if plan.temperature > 0:
            names = ("temperature", "top_p", "seed")
            options["sampling"] = {name: getattr(plan, name) for name in names}
        rows = [prompt.ids for prompt in unit.prompts]
        return self.engines.measure(contestant.engine, rows, new_tokens, list(self.eos), options)

    def _round(self, unit: Unit, number: int, shift: int) -> None:
        """All contestants in turns, each beginning a place further on; the comparison, the file."""
        at, taken = shift % len(self.contestants), []
        done = any((turn.questions, turn.round) == (unit.names, number) for turn in self.run.turns)
        for contestant in [*self.contestants[at:], *self.contestants[:at]]:
            if not done and self.run.failure(contestant.name) is None:
                self._say(f"{unit.names[0]}: {contestant.name}")
                try:
                    made = self._ask(contestant, unit, self.run.plan.new_tokens)
                    taken.append((_turn(contestant.name, unit, number, made), made.rows))
                except PeerFailed as failure:
                    self._rows[contestant.name].failure = str(failure)
            self._tick("")
        if done:  # rounds are saved whole
            return
        self._check_ours()
        self._compare(unit, taken)
        self.run.turns += [turn for turn, _ in taken]
        if self.costs and number == 0 and len(unit.prompts) == 1:
            self._measure_steps()
        self._save()

    def _compare(self, unit: Unit, taken: Sequence[tuple[Turn, list[list[int]]]]) -> None:
        """What differs from our plain decoding: where, and by how much the model preferred its own
        token there."""
        reference = next(rows for turn, rows in taken if turn.contestant == self.run.plan.reference)
        for prompt, tokens in zip(unit.prompts, reference, strict=True):
            if prompt.id not in self._answers:
                self._answers[prompt.id] = tokens
                answer = Answer(prompt.task, prompt.id, tokens, self.decode(tokens))
                self.run.answers.append(answer)
        for turn, rows in taken:
            if self.run.plan.temperature > 0 and engine_of(turn.contestant) != OURS:
                continue  # another engine draws other tokens: there is nothing to compare
            for prompt, tokens in zip(unit.prompts, rows, strict=True):
                at = first_difference(tokens, self._answers[prompt.id])
                if at is not None:
                    turn.differences.append(self._difference(prompt, tokens, at))

    def _difference(self, prompt: Prompt, tokens: Sequence[int], at: int) -> Difference:
        expected = self._answers[prompt.id]
        difference = Difference(prompt.id, at, text=self.decode(tokens), tokens=list(tokens))
        if at < min(len(tokens), len(expected)):
            self._say(f"{prompt.id}: comparing")
            asked = {"ids": [*prompt.ids, *expected[:at]]}
            # else it stays unsaid; a dead engine is started again for its next turn
            with suppress(PeerFailed):
                difference.gap, difference.largest = self.engines.get(OURS).call(
                    "gap", **asked, wanted=expected[at], written=tokens[at]
                )
        return difference

    def _measure_steps(self) -> None:
        """Isolated steps of our engine, beside the question, so that drift hits both."""
        self._say("steps alone")
        methods = [each.method for each in self.contestants if each.engine == OURS]
        most = max(LONGEST_BLOCK, *(drafts_at_most(method) + 1 for method in methods))
        points = self.engines.get(OURS).call(
            "steps", ids=list(self.costs), methods=methods, most=most
        )
        earlier = {(point.kind, point.context, point.tokens): point for point in self.run.steps}
        for each in points:
            point = StepPoint(**each)
            known = earlier.get((point.kind, point.context, point.tokens))
            if known is None:
                self.run.steps.append(point)
            else:
                known.seconds.append(point.seconds[-1])


def _turn(contestant: str, unit: Unit, number: int, made: Measured) -> Turn:
    sizes, said = [len(row) for row in made.rows], made.counts
    counts = Counts(**{each.name: said[each.name] for each in fields(Counts) if each.name in said})
    return Turn(
        contestant, unit.task, unit.names, len(sizes), number, made.seconds, made.first_seconds,
        made.first_tokens, sizes, made.peak_memory_bytes, made.joules, [], counts if said else None,
    )  # fmt: skip


def first_difference(mine: Sequence[int], expected: Sequence[int]) -> int | None:
    """Index of the first token in which two sequences differ (one that ends early differs there);
    None when they are equal."""
    if list(mine) == list(expected):
        return None
    pairs = enumerate(zip(mine, expected, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(mine), len(expected)))
