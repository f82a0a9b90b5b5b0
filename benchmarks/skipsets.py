"""`scripts/bench skipsets`: which halves to leave out, as several searches see it.

Each search gets its time, on skip sets alone; `gp-timed` is Draft & Verify's: a Gaussian process
over timed generations, looked at after 50, 100, 200 and 300 sets. `profile` may use everything that
drafts; beside it stands every drafter at its defaults. Beside the others stand the first, the
middle, the last and random halves, as many as the best set leaves out, and the best sets of some
sizes. In the end everything is timed in turns with plain decoding, and what is compared for longer.
A later run with another search adds to the same file, and all is timed anew. One of our own models
is asked the questions that lie beside it.

`--model deep`: a random one whose middle halves are damped until they change next to nothing, while
each of the others decides what is written. Leaving out all damped ones is as good as it gets.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import typer
from transformers import PreTrainedModel

from benchmarks.command import Out, Show, Threads, made_by, result_path, run_command
from benchmarks.models import folder_of
from benchmarks.verdicts import SHORT, asked_of
from selfspec import LLM
from selfspec.bench.html import Table
from selfspec.bench.schema import Result, read, write
from selfspec.bench.tables import markdown as as_text
from selfspec.cli.bench import progress_bar
from selfspec.core.files import is_there
from selfspec.draft.registry import drafter_names
from selfspec.errors import OptionError, SelfspecError
from selfspec.profile import Way
from selfspec.testing import tiny_model, tiny_tokenizer
from selfspec.tune.options import Setting, TuneOptions
from selfspec.tune.run import Tuning
from selfspec.tune.search import Halves, Tried, split
from selfspec.tune.texts import prompts_of
from selfspec.tune.timing import Trials

DEEP = "deep"
LAYERS, FACTOR = 24, 1e-3
ATTENTION, MLP = range(4, 20), range(6, 22)
"""Of the deep model, the layers whose attention and whose MLP are damped."""
GROWN, TIMED, FREE = "grown", "gp-timed", "profile"
SEARCHES = {
    GROWN: ("grown", False), "tpe": ("tpe", False), TIMED: ("gp", True), FREE: ("grown", False),
}  # fmt: skip
SKIPS, EVERYTHING = "skips", Setting.drafters
ALONE_NOTHING = ("draft-model", "scripted")  # without a model, without text
DEFAULT, DEFAULT_AUTO = "default", "default auto"
COMPARED = (
    (GROWN, TIMED), (GROWN, "known"), (FREE, GROWN), (FREE, DEFAULT), (FREE, DEFAULT_AUTO),
)  # fmt: skip
"""Whose fastest is held against whose."""
LENGTHS = (8, 12, 16, 24)  # drafts a round with the known set
AFTER = (50, 100, 200)  # sets, of a longer search
SIZES = (4, 8, 12, 16, 20, 24, 28)  # halves left out
PLACES = ("first halves", "middle halves", "last halves", "random halves")


@dataclass
class Searched:
    """One set, and whose it is."""

    search: str
    sets: int
    """How many were looked at."""
    way: Way

    def rank(self) -> float:
        """What it was predicted or seen to bring."""
        return self.way.measured or self.way.predicted or 0.0

    @property
    def left_out(self) -> int:
        """How many halves are."""
        return sum(len(self.way.draft_options.get(kind, ())) for kind in ("attention", "mlp"))


@dataclass
class Compared:
    """The fastest of one search over the fastest of another, in the same turns."""

    first: str
    second: str
    ratio: float
    low: float
    high: float


@dataclass
class SkipsetsRun(Result):
    """All sets so far."""

    kind = "skipsets"
    measured_by = "scripts/bench skipsets"

    model: str
    layers: int
    minutes: float
    """That each search of the last run was given."""
    found: list[Searched] = field(default_factory=list)
    compared: list[Compared] = field(default_factory=list)


def left_out(attention: Sequence[int], mlp: Sequence[int], tokens: int = 0) -> Way:
    """Drafting without these; with so many drafts a round, or as many as the paper's rule says."""
    options = {"attention": sorted(attention), "mlp": sorted(mlp)}
    if not tokens:
        return Way("layer-skip", options, "adaptive")
    return Way("layer-skip", options, "fixed", {"tokens": tokens})


def deep_model() -> PreTrainedModel:
    """A random model of which a third of the halves does all the work."""
    model = tiny_model(
        "llama", hidden_size=576, intermediate_size=1536, num_hidden_layers=LAYERS,
        num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=2048,
        tie_word_embeddings=False,
    )  # fmt: skip
    for layer in ATTENTION:
        model.model.layers[layer].self_attn.o_proj.weight.data *= FACTOR
    for layer in MLP:
        model.model.layers[layer].mlp.down_proj.weight.data *= FACTOR
    return model


def known_sets() -> Iterator[Searched]:
    """All damped halves; with the best of these lengths it is what can be had."""
    for tokens in LENGTHS:
        yield Searched("known", 1, left_out(ATTENTION, MLP, tokens))


def of_places(layers: int, best: Searched) -> Iterator[Searched]:
    """As many halves as the best set leaves out, from elsewhere (Draft & Verify, Table 7)."""
    attention, mlp = (len(best.way.draft_options[kind]) for kind in ("attention", "mlp"))

    def placed(name: str, start: int) -> Searched:
        return Searched(
            name, 1, left_out(range(start, start + attention), range(start, start + mlp))
        )

    longer = max(attention, mlp)
    for name, start in zip(PLACES, (1, (layers - longer) // 2, layers - longer - 1), strict=False):
        yield placed(name, max(0, start))
    dice = random.Random(0)
    drawn, others = (dice.sample(range(layers), count) for count in (attention, mlp))
    yield Searched(PLACES[-1], 1, left_out(drawn, others))


def of_sizes(tried: Sequence[Tried], layers: int, name: str) -> Iterator[Searched]:
    """The best set that a search saw of each size (Draft & Verify, Figure 4)."""
    for size in SIZES:
        of_it = [each for each in tried if len(each.halves) == size]
        if of_it:
            yield _set(f"{name}, {size} halves", max(of_it, key=_value), layers, len(of_it))


def of_counts(tried: Sequence[Tried], layers: int, name: str) -> Iterator[Searched]:
    """The best set after some of them (Draft & Verify, Table 8)."""
    for count in AFTER:
        if count < len(tried):
            yield _set(f"{name} after {count}", max(tried[:count], key=_value), layers, count)


def _set(name: str, tried: Tried, layers: int, count: int) -> Searched:
    halves: Halves = tried.halves
    return Searched(name, count, left_out(*split(halves, layers)))


def _value(tried: Tried) -> float:
    return tried.value


def searched(
    llm: LLM, name: str, options: TuneOptions, asked: Sequence[str], say: Callable[[str], None]
) -> Iterator[Searched]:
    """One search's sets: the best one first."""
    setting = Setting(drafters=EVERYTHING if name == FREE else SKIPS)
    tuning = Tuning(llm, options, asked, lambda stage, _: say(f"{name}: {stage}"), setting=setting)
    tuning.run()
    tried, layers = tuning.found.tried, llm.model.layers
    best = max(tuning.found.ways, key=lambda way: way.measured or 0.0, default=None)
    if best is not None:
        yield Searched(name, len(tried), best)
    if name == FREE:
        yield from at_their_defaults(llm)
        return
    if tried and (best is None or name == TIMED):  # as the search itself timed it
        yield _set(name, max(tried, key=_value), layers, len(tried))
    if name == GROWN:
        yield from of_sizes(tried, layers, name)
    else:
        yield from of_counts(tried, layers, name)


def at_their_defaults(llm: LLM) -> Iterator[Searched]:
    """Every drafter that this model has, told nothing."""
    for name in drafter_names():
        if name in ALONE_NOTHING:
            continue
        try:
            llm.generate([5, 6, 7], max_new_tokens=2, draft=name)
        except SelfspecError:  # it needs a part or a text that nobody gave
            continue
        yield Searched(f"{DEFAULT} {name}", 1, Way(name))


def markdown(run: SkipsetsRun) -> str:
    """The table, the fastest first."""
    rows = []
    ordered = sorted(run.found, key=lambda each: -(each.way.measured or 0.0))
    fastest = max((each.way.measured or 0.0 for each in ordered), default=0.0)
    for each in ordered:
        way = each.way
        speed = "-" if way.measured is None else f"{way.measured:.2f}"
        interval = "-" if way.low is None else f"{way.low:.2f} to {way.high:.2f}"
        share = f"{(way.measured or 0.0) / fastest:.1%}" if fastest else "-"
        predicted = "-" if way.predicted is None else f"{way.predicted:.2f}"
        said = str(way)[:60]
        size = str(each.left_out)
        rows.append([each.search, str(each.sets), size, predicted, speed, interval, share, said])
    head = ["search", "sets", "halves", "predicted", "measured", "95%", "of the fastest", "way"]
    where = run.provenance
    against = [
        f"{each.first} over {each.second}: {each.ratio:.3f} ({each.low:.3f} to {each.high:.3f})."
        for each in run.compared
    ]
    note = (
        f"{run.model}, {2 * run.layers} halves, {where.threads} threads, {where.cpu}. Speeds over "
        "plain decoding, in turns. A search of which no way pays stands for plain decoding."
    )
    return as_text([Table(head, rows), "\n".join([note, *against])])


def timed(
    trials: Trials, found: Sequence[Searched], turns: int, more: int
) -> tuple[list[Searched], list[Compared]]:
    """All sets with their speeds, in turns with plain decoding; `more` turns of those that are
    compared."""
    ways = list({str(each.way): each.way for each in found}.values())
    for _ in range(turns):
        trials.turn(ways)

    def fastest(names: Sequence[str]) -> Way | None:
        offers = [each.way for each in found if each.search in names]
        return max(offers, key=lambda way: trials.gain(way).value, default=None)

    pairs = []
    for first, second in COMPARED:  # the first by what it says itself, the other by all it saw
        seen = [each.search for each in found if each.search.startswith(second)]
        one, other = fastest([first]), fastest(seen)
        if one is not None and other is not None:
            pairs.append((first, second, one, other))
    chosen = {str(way): way for *_, one, other in pairs for way in (one, other)}
    for _ in range(more if chosen else 0):
        trials.turn(list(chosen.values()))
    if not trials.exact:
        raise AssertionError("a text differs from plain decoding's")
    compared = []
    for first, second, *ways in pairs:
        ratio = trials.gain(*(way if trials.gain(way).value > 1 else None for way in ways))
        compared.append(Compared(first, second, ratio.value, ratio.low, ratio.high))
    return [replace(each, way=trials.timed(each.way)) for each in found], compared


def loaded(model: str, threads: int) -> LLM:
    """The model, without any profile."""
    if model == DEEP:
        return LLM.from_pretrained(
            deep_model(), tokenizer=tiny_tokenizer(), threads=threads, profile=None
        )
    return LLM.from_pretrained(folder_of(model), threads=threads, profile=None)


def kept_from(path: Path, names: Sequence[str], model: str) -> list[Searched]:
    """What earlier runs found by other searches; in a new file, the known sets."""
    if not is_there(path):
        return list(known_sets()) if model == DEEP else []
    found = read(SkipsetsRun, path).found
    again = (*names, *PLACES, *([DEFAULT] if FREE in names else []))
    return [each for each in found if not each.search.startswith(again)]


def skipsets(
    model: Annotated[str, typer.Option(help=f"A model, or {DEEP}.")] = DEEP,
    searches: Annotated[
        str, typer.Option(help=f"Of {', '.join(SEARCHES)}; none: only time again.")
    ] = "grown",
    minutes: Annotated[float, typer.Option(min=0.1, help="For each search.")] = 5.0,
    trials: Annotated[int, typer.Option(min=0, help="Skip sets of a search; 0: no limit.")] = 0,
    study: Annotated[str, typer.Option(help="Keeps Optuna's search: a file.")] = "",
    turns: Annotated[int, typer.Option(min=1, help="Of all that was found, in the end.")] = 4,
    more: Annotated[int, typer.Option(min=0, help="Turns of what is compared.")] = 8,
    threads: Threads = 2,
    out: Out = None,
    show: Show = None,
) -> None:
    """Compare searches for what to leave out, and add to what the file has.

    Example: scripts/bench skipsets --minutes 1 --searches grown
    """
    if show is not None:
        typer.echo(markdown(read(SkipsetsRun, show)))
        return
    names = [name for name in searches.split(",") if name not in ("", "none")]
    if unknown := [name for name in names if name not in SEARCHES]:
        raise OptionError(f"--searches: there is no {unknown[0]!r}; use {', '.join(SEARCHES)}")
    llm = loaded(model, threads)
    asked, judging = asked_of(model)
    new_tokens = SHORT if asked else TuneOptions.max_new_tokens
    path = out or result_path("skipsets", kind=f"-{Path(model).name}")
    run = SkipsetsRun(
        made_by("skipsets", threads), Path(model).name, llm.model.layers, minutes,
        kept_from(path, names, model),
    )  # fmt: skip
    with progress_bar(len(names) + 1) as (tick, say):
        for name in names:
            search, by_time = SEARCHES[name]
            kept_in = study if search != GROWN else ""
            options = TuneOptions(minutes, new_tokens, search, by_time, trials, kept_in)
            run.found += searched(llm, name, options, asked, say)
            write(run, path)  # whoever is stopped in the turns goes on with --searches none
            tick("")
        say("turns")
        own = [each for each in run.found if each.search in SEARCHES and each.search != FREE]
        if own:
            run.found = [each for each in run.found if each.search not in PLACES]
            run.found += of_places(llm.model.layers, max(own, key=Searched.rank))
        judged = Trials(llm, prompts_of(llm, judging), new_tokens)  # which no search saw
        run.found, run.compared = timed(judged, run.found, turns, more)
        tick("")
    run.complete = True
    write(run, path)
    typer.echo(markdown(run))


if __name__ == "__main__":
    run_command(skipsets)
