"""`scripts/bench probe`: is what the tuner's probe says of a draft what decoding keeps?

The model answers prompts by itself. Each way of drafting is probed on these texts, without
generating, and then decodes the same prompts for real, with several numbers of drafts a round.
Acceptance is drafts kept over drafts made. Half of the prompts are also probed to say what the
other half keeps: that is how a tuning uses it, and there the texts differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.command import Model, Out, Show, Threads, made_by, result_path, run_command
from benchmarks.models import folder_of
from selfspec import LLM
from selfspec.bench.html import Table
from selfspec.bench.schema import Result, read, write
from selfspec.bench.tables import markdown as as_text
from selfspec.cli.bench import progress_bar
from selfspec.core.files import is_there
from selfspec.model.copies import copy_in
from selfspec.tune.candidates import Candidate, copied, exiting, skipping
from selfspec.tune.probe import Probe
from selfspec.tune.steps import Line, Steps
from selfspec.tune.texts import BUILT_IN, own_texts, prompts_of

AIM = 0.03
FREE = Steps(Line({"1": 0.0}), Line({"1": 0.0}), {}, Line({"1": 0.0}), 0.0)  # costs matter not here


@dataclass
class Decoded:
    """Real decoding with so many drafts a round, and what the probe says of it."""

    tokens: int
    drafted: int
    accepted: int
    probed: float
    """Acceptance by the probe of the same texts."""
    other_half: float
    """Acceptance of the second half of the prompts by the probe of the first half's texts."""
    second_half: float
    """And in real decoding."""

    @property
    def real(self) -> float:
        return self.accepted / self.drafted


@dataclass
class WayProbed:
    """A way of drafting."""

    way: str
    lengths: list[Decoded] = field(default_factory=list)


@dataclass
class ProbeRun(Result):
    """Everything that was counted."""

    kind = "probe"
    measured_by = "scripts/bench probe"

    model: str
    prompts: int
    new_tokens: int
    ways: list[WayProbed] = field(default_factory=list)


def candidates_of(llm: LLM) -> list[Candidate]:
    """Of each kind of drafter that a probe covers: late exits, few and more halves left out, and
    copies."""
    model, layers = llm.model, llm.model.layers
    found = [exiting(model, FREE, round(share * layers)) for share in (0.6, 0.87, 0.94)]
    middle = layers // 2
    found.append(skipping(model, FREE, [middle], []))
    found.append(skipping(model, FREE, [middle - 4, middle, middle + 4], [middle + 2]))
    found += [copied(copy_in(model, weights), FREE, weights) for weights in ("int8", "int4")]
    return found


def named(candidate: Candidate) -> str:
    """A way of drafting, whatever the number of drafts."""
    return str(candidate.way(0)).partition(" @")[0]


def decoded(
    llm: LLM, candidate: Candidate, probes: tuple[Probe, Probe], prompts: Sequence[list[int]],
    lengths: Sequence[int], new_tokens: int,
) -> WayProbed:  # fmt: skip
    """A candidate probed, and decoding with it."""
    whole, half = (
        probe.agreement(candidate.model, candidate.plan, probe.everywhere) for probe in probes
    )
    found = WayProbed(named(candidate))
    cut = len(prompts) // 2
    for tokens in lengths:
        options = candidate.way(tokens).options
        drafted, accepted = [0, 0], [0, 0]
        for number, ids in enumerate(prompts):
            result = llm.generate(ids, max_new_tokens=new_tokens, eos=[], **options)
            drafted[number >= cut] += result.stats.drafted
            accepted[number >= cut] += result.stats.accepted
        kept = half.acceptance(tokens), accepted[1] / drafted[1]
        here = Decoded(tokens, sum(drafted), sum(accepted), whole.acceptance(tokens), *kept)
        found.lengths.append(here)
    return found


def markdown(run: ProbeRun) -> str:
    """The table."""
    rows, worst = [], 0.0
    for way in run.ways:
        for each in way.lengths:
            error = each.probed - each.real
            worst = max(worst, abs(error))
            shares = (each.real, each.probed, error, each.other_half - each.second_half)
            said = [f"{share:.3f}" for share in shares]
            rows.append([way.way, str(each.tokens), str(each.drafted), *said])
    head = ["way", "drafts a round", "drafts", "decoded", "probed", "error", "on other texts"]
    note = (
        f"{run.model}, {run.prompts} prompts, {run.new_tokens} tokens each, greedy. The largest "
        f"error on the same texts is {worst:.3f}; {AIM} is the aim."
    )
    return as_text([Table(head, rows), note])


def probe(
    model: Model = "demo",
    new_tokens: Annotated[int, typer.Option(min=24, help="Tokens of an answer.")] = 160,
    prompts: Annotated[int, typer.Option(min=2, help="How many of the built-in ones.")] = 8,
    lengths: Annotated[str, typer.Option(help="Drafts a round.")] = "2,4,8",
    only: Annotated[str, typer.Option(help="Ways whose name holds this.")] = "",
    threads: Threads = 2,
    out: Out = None,
    show: Show = None,
) -> None:
    """Compare the tuner's probe with decoding, way by way. Nothing is timed, and a run that was
    stopped goes on.

    Example: scripts/bench probe --new-tokens 64
    """
    if show is not None:
        typer.echo(markdown(read(ProbeRun, show)))
        return
    llm = LLM.from_pretrained(folder_of(model), threads=threads, profile=None)
    asked = prompts_of(llm, BUILT_IN[:prompts])
    texts = own_texts(llm, asked, new_tokens)
    probes = Probe(llm.model, texts), Probe(llm.model, texts[: len(texts) // 2])
    counts, path = [int(each) for each in lengths.split(",")], out or result_path("probe")
    run = ProbeRun(made_by("probe", threads), Path(model).name, len(asked), new_tokens)
    run.ways = known_ways(path, run, counts)
    offers = {named(candidate): candidate for candidate in candidates_of(llm)}
    done = {way.way for way in run.ways}
    missing = [name for name in offers if name not in done and only in name]
    with progress_bar(len(missing)) as (tick, say):
        for name in missing:
            say(name)
            run.ways.append(decoded(llm, offers[name], probes, asked, counts, new_tokens))
            run.ways.sort(key=lambda way: list(offers).index(way.way))
            run.complete = len(run.ways) == len(offers)
            write(run, path)
            tick("")
    typer.echo(markdown(run))


def known_ways(path: Path, run: ProbeRun, counts: Sequence[int]) -> list[WayProbed]:
    """What a run with the same settings that was stopped has counted."""
    if not is_there(path):
        return []
    before = read(ProbeRun, path)
    if before.complete or any(
        getattr(before, name) != getattr(run, name) for name in ("model", "prompts", "new_tokens")
    ):
        return []
    return [way for way in before.ways if [each.tokens for each in way.lengths] == list(counts)]


if __name__ == "__main__":
    run_command(probe)
