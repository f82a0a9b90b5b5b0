"""`scripts/bench exits`: exits that differ from token to token, lossy and not.

Lossy decoding (`selfspec.lossy`) by every schedule, fill and rule next to plain decoding, so part
by part as in SpecEE's Figure 19: layers a token beside the oracle's, how many tokens are what the
whole model says behind the same text, what looking for exits cost, seconds. Then drafting with
exits (`dynamic-exit`) next to fixed exits: kept drafts, readings of a layer's weights a token,
seconds, and whether the text is the model's. All take turns on each question. A question is written
down once all have answered it, and the same command goes on behind it. Does not know how the tables
look (`exits_report.py`).
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer

from benchmarks.command import Model, Out, Show, Threads, grouped, made_by, result_path, run_command
from benchmarks.exits_energy import Metering
from benchmarks.exits_report import (
    EVERYWHERE,
    PLAIN,
    DraftRow,
    ExitsRun,
    LossyRow,
    Oracle,
    markdown,
    summary,
)
from benchmarks.exits_shares import shares
from benchmarks.models import ASKED, beside, folder_of, known
from selfspec.bench.meters import EnergyMeter
from selfspec.bench.schema import continued, read, write
from selfspec.cli.bench import progress_bar
from selfspec.core.options import numbers
from selfspec.core.text_rows import read_rows
from selfspec.errors import OptionError
from selfspec.exits.part import Predictors, find_predictors
from selfspec.llm import LLM
from selfspec.lossy import AdaInfer, Confidence, LossyResult, SpecEE
from selfspec.model.compute.cache import KVCache, TokenLayout
from selfspec.train.exit_fitting import oracle
from selfspec.train.exit_samples import SampleOptions, collect, load_samples
from selfspec.train.own_text import Question, questions_from

LEVELS: tuple[Literal["all", "offline", "online", "both"], ...] = (
    "all",
    "offline",
    "online",
    "both",
)
FILLS: tuple[Literal["caught-up", "state", "holes"], ...] = ("caught-up", "state", "holes")
TREE = 8  # guesses
QUESTIONS = Path(__file__).with_name("exits_questions.jsonl")


@dataclass(frozen=True)
class Settings:
    """What is typed."""

    prompts: Annotated[
        Path | None,
        typer.Option(help="JSONL with prompts: questions to answer; by default some of ours."),
    ] = None
    part: Annotated[
        Path | None,
        typer.Option(help="Folder of predictors; by default what comes with the model."),
    ] = None
    questions: Annotated[int, typer.Option(min=1, help="How many questions, evenly spread.")] = 8
    new_tokens: Annotated[int, typer.Option(min=2, help="New tokens of each answer.")] = 32
    drafts: Annotated[int, typer.Option(min=1, help="Drafts a round (K).")] = 3
    threshold: Annotated[
        float, typer.Option(help="Threshold of predictors; drafts have theirs at 0.5.")
    ] = 0.5
    thresholds: Annotated[
        str, typer.Option(help="Thresholds of predictors, with every layer looked at.")
    ] = "0.5,0.9"
    trained: Annotated[
        str, typer.Option(help="Exits that were trained: looked at alone too, and drafted with.")
    ] = ""
    few: Annotated[
        str, typer.Option(help="Layers that a schedule of your own looks at; see exit_figures.")
    ] = ""
    ends: Annotated[bool, typer.Option("--ends", help="Answers end where the model ends them.")] = (
        False
    )
    oracle: Annotated[
        bool, typer.Option(help="Look for the earliest exits possible too, which takes longest.")
    ] = True
    short: Annotated[
        bool, typer.Option("--short", help="Only schedules with the default fill, and drafting.")
    ] = False
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Measure over the result of another run.")
    ] = False

    @property
    def layers(self) -> tuple[int, ...]:
        """The trained exits."""
        return numbers(self.trained, "--trained") if self.trained else ()


def contestants(settings: Settings, found: Predictors) -> dict[str, Any]:
    """Lossy ways to decode, by name."""
    part, ways = settings.part, dict[str, Any]()
    for level in LEVELS:
        techniques = "T1" if level == "all" else "T1+T2"
        how = SpecEE(part, schedule=level, threshold=settings.threshold)
        ways[f"SpecEE {techniques}, looks {level}"] = how
    if layers := settings.layers:
        how = SpecEE(part, layers=layers, schedule="all", threshold=settings.threshold)
        ways[f"SpecEE T1, looks {settings.trained}"] = how
    if settings.few:
        some = numbers(settings.few, "--few")
        how = SpecEE(part, layers=some, schedule="all", threshold=settings.threshold)
        ways[f"SpecEE T1+T2, looks {settings.few}"] = how
    if settings.short:
        return ways
    for threshold in map(float, settings.thresholds.split(",")):
        if threshold == settings.threshold:
            continue
        more = f", threshold {threshold:g}"
        ways[f"{EVERYWHERE}{more}"] = SpecEE(part, schedule="all", threshold=threshold)
        ways[f"SpecEE T1+T2, looks both{more}"] = SpecEE(part, threshold=threshold)
        if layers:
            name = f"SpecEE T1, looks {settings.trained}{more}"
            ways[name] = SpecEE(part, layers=layers, schedule="all", threshold=threshold)
    for fill in FILLS[1:]:
        how = SpecEE(part, fill=fill, threshold=settings.threshold)
        ways[f"SpecEE T1+T2, looks both, fill {fill}"] = how
    how = SpecEE(part, fill="state", tree=TREE, threshold=settings.threshold)
    ways[f"SpecEE T1+T2+T3, trees of {TREE}, fill state"] = how
    ways["confidence 0.9"] = Confidence(0.9)
    if found.svm is not None:
        ways["AdaInfer"] = AdaInfer(part)
    return ways


def drafting(settings: Settings, layers: int, found: Predictors) -> dict[str, dict[str, Any]]:
    """Ways to draft that change no text, by name. Where predictors have a pool of tokens, fixed
    exits choose from it too."""
    pool = {} if found.pool is None else {"tokens": tuple(found.pool.tokens.tolist())}
    ways: dict[str, dict[str, Any]] = {
        f"early-exit, layer {layer}": {
            "draft": "early-exit",
            "draft_options": {"layer": layer, **pool},
        }
        for layer in settings.layers or (layers // 4, layers // 2, layers - 3)
    }
    options: dict[str, Any] = {} if settings.part is None else {"part": settings.part}
    ways["dynamic-exit"] = {"draft": "dynamic-exit", "draft_options": options}
    for count in range(1, len(settings.layers) + 1):
        some = settings.layers[:count]
        ways[f"dynamic-exit, looks {','.join(map(str, some))}"] = {
            "draft": "dynamic-exit",
            "draft_options": {**options, "layers": some, "schedule": "all"},
        }
    control = {"control": "fixed", "control_options": {"tokens": settings.drafts}}
    return {name: {**way, **control} for name, way in ways.items()}


@contextmanager
def readings() -> Iterator[list[int]]:
    """Counts how often a layer's weights are read for attention: once a call and layer."""
    original, count = KVCache.advance, [0]

    def advance(self: KVCache, layout: TokenLayout, layers: tuple[int, ...]) -> None:
        count[0] += len(layers)
        original(self, layout, layers)

    KVCache.advance = advance  # type: ignore[method-assign]
    try:
        yield count
    finally:
        KVCache.advance = original  # type: ignore[method-assign]


def behind(llm: LLM, prompt: Sequence[int], tokens: Sequence[int]) -> tuple[int, float]:
    """How many of the tokens the whole model says behind the same text, and the sum of their
    log-probabilities by it."""
    model, text = llm.model, torch.tensor([*prompt, *tokens[:-1]])
    with torch.inference_mode():
        cache = model.new_cache(1, len(text))
        x = model.run(model.embed(text), model.full_plan, cache, cache.layout([len(text)]))
        logits = model.head(x[len(prompt) - 1 :]).float()
    said = torch.tensor(tokens)
    chances = logits.log_softmax(-1).gather(1, said[:, None])
    return int((logits.argmax(-1) == said).sum()), float(chances.sum())


def add_lossy(row: LossyRow, llm: LLM, prompt: Sequence[int], result: LossyResult) -> None:
    """Book one answer."""
    agreed, chance = behind(llm, prompt, result.tokens)
    row.tokens += len(result.tokens)
    row.agreed += agreed
    row.log_probability += chance
    row.exits += list(result.exits[1:])
    for name in ("looks", "fired", "left", "rule_seconds", "head_seconds"):
        setattr(row, name, getattr(row, name) + getattr(result.looking, name))
    row.decode_seconds.append(result.call.decode_seconds)
    row.decoded.append(len(result.tokens) - 1)


def earliest(llm: LLM, prompts: Sequence[Sequence[int]], new: int, found: Predictors) -> Oracle:
    """The earliest exits possible in the model's own answers to these prompts."""
    asked = [Question("", list(ids), "bench", number) for number, ids in enumerate(prompts)]
    taking = SampleOptions(
        found.count,
        found.source,
        pool=() if found.pool is None else tuple(found.pool.tokens.tolist()),
        first=found.layers[0],
        samples=10**9,
        batch=8,
        max_new_tokens=new,
    )
    with tempfile.TemporaryDirectory() as folder:
        collect(llm, lambda done: asked, Path(folder), taking)
        samples = load_samples(Path(folder))
    layers = llm.model.layers
    named = float((samples["answer"] >= 0).float().mean())
    stays = samples["same"].flip(1).int().cumprod(1).sum(1)
    anything = float((layers - stays).float().mean())
    return Oracle(float(oracle(samples, layers).float().mean()), anything, named, len(stays))


def measure(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    settings: Settings,
    run: ExitsRun,
    found: Predictors,
    say: Callable[[str], None] = lambda _: None,
) -> Iterator[int]:
    """All contestants in turns on each question that has no answers yet; gives its number once all
    have answered. `say` is told who answers."""
    lossy, exact = contestants(settings, found), drafting(settings, llm.model.layers, found)
    call: dict[str, Any] = {"max_new_tokens": settings.new_tokens}
    call |= {} if settings.ends else {"eos": []}
    meter = EnergyMeter.find(gpu=llm.model.device.type == "cuda")
    run.energy = meter.said
    for number in range(run.answered, len(prompts)):
        prompt = prompts[number]
        say(PLAIN)
        metering = Metering(meter)
        plain = metering.of(PLAIN, llm.generate, list(prompt), draft=None, **call)
        turns = [*zip(run.lossy, lossy.values(), strict=True)]
        answers, drafts = list[tuple[LossyRow, LossyResult]](), list[tuple[DraftRow, Any, int]]()
        for row, way in turns[number % len(turns) :] + turns[: number % len(turns)]:
            say(row.name)
            answers.append((row, metering.of(row.name, way.generate, llm, list(prompt), **call)))
        for drafted, options in zip(run.drafting, exact.values(), strict=True):
            say(drafted.name)
            with readings() as count:
                result = metering.of(drafted.name, llm.generate, list(prompt), **options, **call)
            drafts.append((drafted, result, count[0] - llm.model.layers * -(-len(prompt) // 512)))
        run.plain_seconds.append(plain.call.decode_seconds)  # from here on nothing can be stopped
        run.plain_tokens += plain.stats.decoded
        run.plain_decoded.append(plain.stats.decoded)
        for row, answer in answers:
            add_lossy(row, llm, prompt, answer)
        for drafted, result, read_ in drafts:
            add_drafted(drafted, result, plain.tokens, read_)
        metering.book(run.spent)
        run.answered = number + 1
        yield number


def add_drafted(row: DraftRow, result: Any, plain: Sequence[int], read: int) -> None:
    """Book one answer. `read`: how often a layer's weights were, while decoding."""
    row.readings += read
    row.same += int(list(result.tokens) == list(plain))
    row.questions += 1
    row.decoded += result.stats.decoded
    row.drafted += result.stats.drafted
    row.accepted += result.stats.accepted
    row.decode_seconds.append(result.call.decode_seconds)


def digest(prompts: Sequence[Sequence[int]]) -> str:
    """The same for the same questions."""
    return hashlib.sha256(json.dumps([list(each) for each in prompts]).encode()).hexdigest()[:8]


def plan_of(run: ExitsRun) -> dict[str, Any]:
    """What makes two sittings one run."""
    names = ("model", "kernel", "weights", "layers", "questions", "new_tokens", "drafts", "asked",
             "predictors")  # fmt: skip
    rows = [*(row.name for row in run.lossy), *(row.name for row in run.drafting)]
    return {**{name: getattr(run, name) for name in names}, "contestants": rows}


@grouped
def exits(
    model: Model = "demo",
    *,
    settings: Settings,
    threads: Threads = 2,
    out: Out = None,
    show: Show = None,
) -> None:
    """Exits that differ from token to token: layers, agreement, cost; and drafting with them.

    Example: scripts/bench exits --prompts question.jsonl --questions 12
    """
    if show is not None:
        typer.echo(markdown(read(ExitsRun, show)))
        return
    llm = LLM.from_pretrained(folder_of(model), threads=threads)
    settings = with_what_comes(model, settings)
    found = find_predictors(settings.part, llm.model)
    prompts = asked(llm, settings)
    target, begin = out or result_path("exits"), time.perf_counter()
    run = fresh_run(Path(model).name, llm, settings, prompts, found, threads)
    if not settings.fresh:
        run = continued(run, target, plan_of)
    before = run.seconds
    llm.generate(prompts[0], max_new_tokens=4, draft=None)  # the first answer packs and compiles
    run.shares = run.shares or shares(llm, prompts[0])
    with progress_bar(len(prompts) + settings.oracle) as (tick, say):
        for _ in range(run.answered):
            tick("")

        def at(name: str) -> None:
            say(f"question {run.answered + 1} of {len(prompts)}: {name}")

        for _ in measure(llm, prompts, settings, run, found, at):
            run.seconds = before + time.perf_counter() - begin
            write(run, target)
            tick("")
        if settings.oracle and run.oracle is None:
            say("the earliest exits possible")
            run.oracle = earliest(llm, prompts, settings.new_tokens, found)
            tick("")
    if not run.complete:
        run.seconds, run.complete = before + time.perf_counter() - begin, True
    write(run, target)
    typer.echo(markdown(run))
    typer.echo(json.dumps({**summary(run), "file": target.name}))


def with_what_comes(model: str, settings: Settings) -> Settings:
    """With the questions that lie beside a model of ours, unless others are named."""
    if model not in known():
        return settings
    return replace(settings, prompts=settings.prompts or beside(model, ASKED))


def asked(llm: LLM, settings: Settings) -> list[list[int]]:
    """The questions, as the model reads them."""
    file = settings.prompts or QUESTIONS
    there = list(questions_from(llm, read_rows(str(file))))
    if len(there) < settings.questions:
        raise OptionError(f"{file.name} has {len(there)} questions; ask for fewer")
    chosen = islice(there, 0, None, len(there) // settings.questions)
    return [list(question.ids) for question in islice(chosen, settings.questions)]


def fresh_run(
    name: str,
    llm: LLM,
    settings: Settings,
    prompts: Sequence[Sequence[int]],
    found: Predictors,
    threads: int,
) -> ExitsRun:
    """A run that has measured nothing."""
    info = llm.info
    run = ExitsRun(
        made_by("exits", threads), name, info.kernel, info.weights, info.layers,
        settings.questions, settings.new_tokens, settings.drafts,
        {**described(found), "threshold": settings.threshold},
        digest(prompts),
    )  # fmt: skip
    run.lossy = [LossyRow(name) for name in contestants(settings, found)]
    run.drafting = [DraftRow(name) for name in drafting(settings, info.layers, found)]
    return run


def described(found: Predictors) -> dict[str, Any]:
    """What the result says of the predictors."""
    return {
        "candidates": found.count,
        "source": found.source,
        "predictors": len(found.layers),
        "bytes": found.bytes,
        "exits": [round(share, 4) for share in found.exits],
    }


if __name__ == "__main__":
    run_command(exits)
