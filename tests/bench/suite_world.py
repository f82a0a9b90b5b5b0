"""A made-up suite result with figures known by heart, for tests of tables and reports. Run it to
write the sample anew."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from selfspec.bench.schema import (
    Answer,
    ContestantRow,
    Counts,
    Difference,
    EngineRow,
    Plan,
    Provenance,
    Question,
    Sample,
    StepPoint,
    SuiteRun,
    Turn,
    write,
)

SAMPLE = Path(__file__).with_name("suite-sample.json")
PROVENANCE = Provenance(
    command="selfspec bench demo --task spec-bench=question.jsonl "
    "--methods 'auto ngram@fixed:tokens=4'",
    date="2026-01-01T00:00:00+00:00",
    commit="0123456789ab",
    uncommitted_changes=False,
    cpu="a processor",
    cores=2,
    threads=2,
    memory_bytes=8_000_000_000,
    system="Linux x86_64",
    python="3.11.0",
    versions={"selfspec": "0", "torch": "1"},
    environment={},
)
PLAIN_SECONDS = 0.03  # a token of our plain decoding
SPEED = {
    "selfspec/plain": 1.0,
    "selfspec/auto": 1.6,
    "selfspec/ngram@fixed:tokens=4": 1.4,
    "selfspec/early-exit@fixed:tokens=4": 0.7,
    "transformers/plain": 0.5,
    "transformers/lookup:tokens=4": 0.6,
    "ctranslate2/plain": 0.8,
}


def a_turn(contestant: str, task: str, question: str, speed: float, **changes: Any) -> Turn:
    """41 tokens, the first after 0.2 s, the others at so many times our plain speed. A drafter
    keeps half of its drafts."""
    drafts = not contestant.endswith("/plain")
    ours = contestant.startswith("selfspec/")
    decoding = 40 * PLAIN_SECONDS / speed
    counts = None
    if ours and drafts:
        counts = Counts(
            40,
            20,
            20,
            0.1 * decoding,
            0.8 * decoding,
            0.1 * decoding,
            [20, 16, 4],
            [12, 7, 1],
            [0, 4, 16],
        )
    elif ours:
        counts = Counts(0, 0, 40, 0.0, 0.95 * decoding, 0.05 * decoding, [], [], [40])
    elif drafts:
        counts = Counts(40, 20)
    turn = Turn(
        contestant,
        task,
        [question],
        batch=1,
        round=0,
        seconds=0.2 + decoding,
        first_seconds=0.2,
        first_tokens=1,
        made=[41],
        peak_memory_bytes=900_000_000,
        counts=counts,
    )
    for name, value in changes.items():
        setattr(turn, name, value)
    return turn


def a_suite(
    speeds: Mapping[str, float] = SPEED, tasks: tuple[str, ...] = ("qa", "rag"), questions: int = 4
) -> SuiteRun:
    """Contestants at these speeds, our plain decoding being 1; questions differ in length of
    decoding, equally for all."""
    samples = [
        Sample(task, f"{task}-{questions}-00000000", "question.jsonl", questions, 40, True)
        for task in tasks
    ]
    plan = Plan(
        "SmolLM2-135M-Instruct",
        "float32",
        "cpu",
        2,
        41,
        1,
        [1],
        list(speeds),
        next(iter(speeds)),
        samples,
    )
    run = SuiteRun(
        PROVENANCE,
        plan,
        energy="no counter: /sys/class/powercap has no intel-rapl",
        wall_seconds=99.0,
        sittings=1,
    )
    names = [(task, f"{task}/{number}") for task in tasks for number in range(questions)]
    run.questions = [Question(task, name, 95) for task, name in names]
    engines = dict.fromkeys(name.partition("/")[0] for name in speeds)
    run.engines = [EngineRow(engine, "float32", {engine: "1.0"}, 3.0, 0.0002) for engine in engines]
    run.contestants = [ContestantRow(name, 0.4) for name in speeds]
    for index, (task, name) in enumerate(names):
        run.turns += [
            a_turn(who, task, name, speed * (1 + 0.02 * (index % 3)))
            for who, speed in speeds.items()
        ]
        run.answers.append(Answer(task, name, list(range(41)), "a text"))
    run.steps = [
        StepPoint("verify", 128, n, [0.028 + 0.0004 * n, 0.029 + 0.0004 * n]) for n in range(1, 9)
    ]
    run.complete = True
    return run


def the_sample() -> SuiteRun:
    """What suite-sample.json holds: one contestant differs once, one engine is not there."""
    run = a_suite()
    differing = next(turn for turn in run.turns if turn.contestant == "ctranslate2/plain")
    differing.differences = [
        Difference(
            differing.questions[0], 17, 2.1e-5, 21.4, "another text", [*range(17), *range(100, 124)]
        )
    ]
    run.engines.append(
        EngineRow("openvino", failure="ModuleNotFoundError: No module named 'openvino_genai'")
    )
    run.plan.contestants.append("openvino/plain")
    run.contestants.append(ContestantRow("openvino/plain"))
    return run


if __name__ == "__main__":
    write(the_sample(), SAMPLE)
