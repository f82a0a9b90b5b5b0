"""`scripts/bench task`: LayerSkip's task experiment in small (its Tables 5 and 10), from data to
table.

A text-to-structure task is generated (`task_data.py`), a model fine-tuned on it with the recipe
(LD+EE) and without, with the same data, steps, batch and learning rate. Then, on held-out
utterances: exact match of both and of early exits alone, which nobody verifies; acceptance and time
per token of self-speculative decoding at each exit, with and without reuse of the draft's states,
next to plain decoding of the same weights. Every stage can be run alone and goes on where it was
interrupted. Raw figures go into the JSON; the table is `task_report.py`'s.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import TrainerCallback

from ..core.options import numbers
from ..errors import OptionError, nearest
from ..llm import LLM
from ..lossy import early_exit_generate
from ..results import Result
from ..train.data import Blocks, DataOptions, pack
from ..train.evaluate import evaluate_exits
from ..train.recipe import Recipe
from ..train.run import REPORT, TrainOptions, train
from .plain import model_folder, progress_bar, run_command
from .provenance import CHECKOUT, cpu_name, gather, package_versions, slug
from .schema import write_json
from .task_data import Example, examples, generator_hash, write_examples
from .task_report import TASK_SCHEMA, by_drafts, load_task, markdown, summary

STAGES = ("data", "train", "quality", "speed")
BATCH = 32  # utterances decoded together where only the answer counts
RARE = 1000  # a token that one structure in so many needs, and not its utterance, is not drafted
MOST_TOKENS = 160  # of an answer: longer than any structure of the grammar
DATA = DataOptions(length=128, held_out=0.01, chat_template=False)
Tick = Callable[[], None]


@dataclass(frozen=True)
class TaskOptions:
    """What of the experiment can be changed."""

    steps: int = 3000
    """Optimizer steps of each of the two models."""
    batch: int = 2
    """Blocks of 128 tokens a step."""
    learning_rate: float = 1e-3
    """The highest."""
    precision: str = "bfloat16"
    """Of the products in training; weights stay float32."""
    examples: int = 40_000
    """Utterances made for training; a run takes as many as its steps need."""
    held_out: int = 2000
    """Utterances with other phrasings and other slot values, for exact match."""
    lossy: int = 500
    """How many of them are also answered by early exits alone."""
    exits: tuple[int, ...] = (8, 15, 22)
    """Exit layers (E): trained, and drafted with."""
    drafts: int = 7
    """Drafts a round (K)."""
    other_drafts: tuple[int, ...] = (2, 4, 11)
    """Numbers of drafts that each exit is tried with beside it."""
    utterances: int = 60
    """Utterances in the race."""
    seed: int = 0
    """Of the utterances and of the training."""

    def recipe(self, name: str) -> Recipe:
        """What the models are trained with; both by the same code."""
        if name == "plain":
            return Recipe().variant("plain")
        return Recipe(
            dropout=0.1, curriculum="all", exits=self.exits, weighting="even", exit_others=2048
        )

    def training(self) -> TrainOptions:
        """The same for both."""
        return TrainOptions(
            steps=self.steps,
            batch=self.batch,
            learning_rate=self.learning_rate,
            precision=self.precision,
            seed=self.seed,
            save_every=250,
            score_blocks=0,
            plot=False,
        )


MODELS = ("recipe", "plain")


@dataclass
class Quality:
    """What a model is worth on held-out utterances."""

    exact: int = 0
    of: int = 0
    lossy: dict[str, list[int]] = field(
        default_factory=dict
    )  # by exit: right answers, and of how many
    exits: list[dict[str, Any]] = field(
        default_factory=list
    )  # each exit's agreement and perplexity on the right answers


@dataclass
class Race:
    """Turns of one way of decoding, utterance by utterance; all lists are in step with those of the
    others."""

    seconds: list[float] = field(default_factory=list)
    decoded: list[int] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    identical: bool = True


@dataclass
class TaskRun:
    """Everything that was measured."""

    provenance: dict[str, Any]
    model: str
    options: dict[str, Any]
    generator: str
    layers: int = 0
    vocabulary: int = 0  # tokens of the draft's vocabulary, before a prompt's own
    training: dict[str, dict[str, Any]] = field(default_factory=dict)
    quality: dict[str, Quality] = field(default_factory=dict)
    race: dict[str, Race] = field(default_factory=dict)
    kind: str = "task"
    schema_version: int = TASK_SCHEMA


# ----------------------------------------------------------------------------------------- training


def make_data(folder: Path, options: TaskOptions) -> Path:
    """The training utterances, as a file that `selfspec train` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "train.jsonl"
    write_examples(file, examples("train", options.examples, options.seed))
    return file


class _Log(TrainerCallback):
    """A line on stderr now and then, for who waits."""

    def __init__(self, name: str) -> None:
        self._name = name

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        losses = "  ".join(
            f"{name} {value:.3f}"
            for name, value in (logs or {}).items()
            if name.startswith("exit_")
        )
        if losses:
            typer.echo(
                f"{self._name}: step {state.global_step} of {state.max_steps}  {losses}", err=True
            )


def train_one(name: str, base: Path, folder: Path, options: TaskOptions) -> dict[str, Any]:
    """One of the models, unless it is there already; says how its training went."""
    report = folder / name / REPORT
    if not report.exists():
        train(
            str(base),
            [folder / "train.jsonl"],
            folder / name,
            recipe=options.recipe(name),
            options=options.training(),
            data=DATA,
            callbacks=[_Log(name)],
        )
    facts = json.loads(report.read_text(encoding="utf-8"))
    asked = {"recipe": asdict(options.recipe(name)), "steps": options.steps}
    found = {
        "recipe": {**facts["recipe"], "exits": tuple(facts["recipe"]["exits"])},
        "steps": facts["steps"],
    }
    if found != asked:
        raise OptionError(
            f"{folder / name} was trained with other settings ({found}) than are asked for "
            f"({asked}); name another folder, or "
            "give the settings it was trained with"
        )
    return {key: facts[key] for key in ("steps", "tokens", "seconds", "recipe", "options", "log")}


# ------------------------------------------------------------------------------------------ quality


def answers(
    llm: Any, made: Sequence[Example], layer: int | None = None, tick: Tick = lambda: None
) -> Iterator[tuple[Example, str]]:
    """Greedy answers, of the whole model or of its first layers alone. Answers of a length are
    decoded together."""
    ordered = sorted(made, key=lambda each: len(each.structure))
    for start in range(0, len(ordered), BATCH):
        some = ordered[start : start + BATCH]
        prompts = [each.prompt for each in some]
        given: dict[str, Any] = {"draft": None, "max_new_tokens": MOST_TOKENS}
        found = (
            llm.generate(prompts, **given)
            if layer is None
            else early_exit_generate(llm, prompts, layer, **given)
        )
        yield from ((each, result.text.strip()) for each, result in zip(some, found, strict=True))
        tick()


def exact_matches(pairs: Iterator[tuple[Example, str]]) -> int:
    """How many answers are the structure, character for character."""
    return sum(answer == each.structure for each, answer in pairs)


def blocks_of(llm: LLM, made: Sequence[Example]) -> Blocks:
    """Right answers as text, for scores of exits: prompts are not counted."""
    tokenizer: Any = llm.tokenizer
    pairs = [
        (
            tokenizer(each.prompt)["input_ids"],
            [*tokenizer(each.structure)["input_ids"], tokenizer.eos_token_id],
        )
        for each in made
    ]
    return pack(
        [(p + r, [False] * len(p) + [True] * len(r)) for p, r in pairs],
        DATA.length,
        tokenizer.eos_token_id,
    )


def judge(llm: LLM, made: Sequence[Example], options: TaskOptions, tick: Tick) -> Quality:
    """Exact match of the model, and of its exits alone; and what exits are worth on the right
    answers."""
    found = Quality(exact_matches(answers(llm, made, None, tick)), len(made))
    some = made[: options.lossy]
    for layer in options.exits:
        found.lossy[str(layer)] = [exact_matches(answers(llm, some, layer, tick)), len(some)]
    scores = evaluate_exits(llm.model, blocks_of(llm, some), options.exits, most=40)
    found.exits = [score.as_dict() for score in scores]
    return found


# -------------------------------------------------------------------------------------------- speed


def task_tokens(llm: LLM, file: Path) -> list[int]:
    """What a draft for this task needs beside its prompt's own tokens, which are always scored: the
    tokens that structures have and their utterances lack, but for those that fewer than one in a
    thousand needs."""
    tokenizer: Any = llm.tokenizer
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    asked, answered = (
        tokenizer([line[part] for line in lines])["input_ids"] for part in ("prompt", "response")
    )
    lacking = Counter(
        token for ids, known in zip(answered, asked, strict=True) for token in set(ids) - set(known)
    )
    return sorted(
        {token for token, count in lacking.items() if count >= len(lines) / RARE}
        | {tokenizer.eos_token_id}
    )


def contestants(
    llm: Any, tokens: Sequence[int], options: TaskOptions
) -> dict[str, Callable[[list[int]], Any]]:
    """The ways of decoding an utterance, by name."""

    def drafting(
        layer: int, drafts: int = options.drafts, **more: Any
    ) -> Callable[[list[int]], Any]:
        settings = {
            "draft": "early-exit",
            "draft_options": {"layer": layer, **more},
            "control": "fixed",
            "control_options": {"tokens": drafts},
        }
        return lambda prompt: llm.generate(prompt, max_new_tokens=MOST_TOKENS, **settings)

    def alone(layer: int) -> Callable[[list[int]], Any]:
        return lambda prompt: early_exit_generate(
            llm, prompt, layer, draft=None, max_new_tokens=MOST_TOKENS
        )

    found: dict[str, Callable[[list[int]], Any]] = {
        "plain": lambda prompt: llm.generate(prompt, draft=None, max_new_tokens=MOST_TOKENS)
    }
    for layer in options.exits:
        found[f"E={layer}"] = drafting(layer, tokens=list(tokens))
        found[f"E={layer}, no reuse"] = drafting(layer, tokens=list(tokens), reuse=False)
        found[f"E={layer}, whole vocabulary"] = drafting(layer)
        found[f"E={layer} alone"] = alone(layer)
        found |= {
            by_drafts(layer, drafts): drafting(layer, drafts, tokens=list(tokens))
            for drafts in options.other_drafts
        }
    return found


def race(
    ways: dict[str, Callable[[list[int]], Any]],
    prompts: Sequence[list[int]],
    tick: Tick = lambda: None,
) -> dict[str, Race]:
    """Every way answers every prompt, in turns whose order rotates; the first prompt warms up and
    is not counted."""
    found = {name: Race() for name in ways}
    for number, prompt in enumerate([prompts[0], *prompts]):
        names = list(ways)
        turn = number % len(names)
        results: dict[str, Result] = {
            name: ways[name](prompt) for name in [*names[turn:], *names[:turn]]
        }
        tick()
        if not number:
            continue
        for name, result in results.items():
            entry, stats = found[name], result.stats
            entry.seconds.append(stats.decode_seconds)
            entry.decoded.append(stats.decoded)
            entry.drafted += stats.drafted
            entry.accepted += stats.accepted
            entry.identical &= result.tokens == results["plain"].tokens
    return found


# ------------------------------------------------------------------------------------------ command


def chosen_stages(text: str) -> list[str]:
    """Stages by name, in their order."""
    wanted = text.split(",")
    for name in wanted:
        if name not in STAGES:
            raise OptionError(f"--stages: {name!r} is not known; {nearest(name, STAGES)}")
    return [name for name in STAGES if name in wanted]


def run_stages(
    stages: Sequence[str],
    base: Path,
    folder: Path,
    options: TaskOptions,
    run: TaskRun,
    save: Callable[[], None],
) -> None:
    """Stage by stage; what is done is saved at once."""
    if "data" in stages:
        make_data(folder, options)
    if "train" in stages:
        for name in MODELS:
            run.training[name] = train_one(name, base, folder, options)
            save()
    made = examples("held_out", options.held_out, options.seed)
    if "quality" in stages:
        for name in MODELS:
            llm = LLM.from_pretrained(folder / name, threads=torch.get_num_threads())
            batches = -(-len(made) // BATCH) + len(options.exits) * -(
                -min(options.lossy, len(made)) // BATCH
            )
            with progress_bar(batches) as (tick, say):
                say(f"exact match of {name}")
                run.quality[name] = judge(llm, made, options, lambda tick=tick: tick(""))  # type: ignore[misc]
            save()
    if "speed" in stages:
        llm = LLM.from_pretrained(folder / "recipe", threads=torch.get_num_threads())
        tokens = task_tokens(llm, folder / "train.jsonl")
        run.layers, run.vocabulary = llm.info.layers, len(tokens)
        tokenizer: Any = llm.tokenizer
        prompts = [list(tokenizer(each.prompt)["input_ids"]) for each in made[: options.utterances]]
        with progress_bar(len(prompts) + 1) as (tick, say):
            say("decoding in turns")
            run.race = race(contestants(llm, tokens, options), prompts, lambda: tick(""))
        save()


def task(
    model: Annotated[str, typer.Option(help="'demo' or a model folder to fine-tune.")] = "demo",
    folder: Annotated[
        Path, typer.Option(help="Where data and trained models go; what is there is used.")
    ] = Path("task-models"),
    stages: Annotated[
        str, typer.Option(help="Which stages to run, in one go or one after the other.")
    ] = ",".join(STAGES),
    steps: Annotated[
        int, typer.Option(min=1, help="Optimizer steps of each of the two models.")
    ] = TaskOptions.steps,
    held_out: Annotated[
        int, typer.Option(min=1, help="Held-out utterances.")
    ] = TaskOptions.held_out,
    exits: Annotated[str, typer.Option(help="Exit layers.")] = ",".join(
        map(str, TaskOptions.exits)
    ),
    utterances: Annotated[
        int, typer.Option(min=2, help="Utterances in the race.")
    ] = TaskOptions.utterances,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 2,
    out: Annotated[
        Path | None, typer.Option(help="The JSON to write, and to add stages to.")
    ] = None,
    show: Annotated[
        Path | None, typer.Option(help="Run nothing: print the tables of this JSON.")
    ] = None,
) -> None:
    """LayerSkip's task experiment in small: fine-tune with and without the recipe, then exact
    match, acceptance and speed.

    Example: scripts/bench task --steps 20 --held-out 50 --utterances 5
    """
    if show is not None:
        typer.echo(markdown(load_task(show)))
        return
    wanted = chosen_stages(stages)
    options = TaskOptions(
        steps=steps, held_out=held_out, exits=numbers(exits, "--exits"), utterances=utterances
    )
    torch.set_num_threads(threads)
    base = model_folder(model)
    command = shlex.join(["scripts/bench", "task", *sys.argv[1:]])
    provenance = asdict(
        gather(command, threads, package_versions(["selfspec", "torch", "transformers"]))
    )
    run = TaskRun(provenance, Path(model).name, asdict(options), generator_hash(options.seed))
    target = out or CHECKOUT / "benchmarks" / "results" / f"task-{slug(cpu_name())}.json"
    written = _continued(asdict(run), target)

    def save() -> None:
        fresh = {key: value for key, value in asdict(run).items() if value}
        for part in ("training", "quality"):
            fresh[part] = {**written.get(part, {}), **asdict(run)[part]}
        written.update(fresh)
        write_json(written, target)

    run_stages(wanted, base, folder, options, run, save)
    save()
    typer.echo(markdown(written))
    typer.echo(json.dumps({**summary(written), "file": target.name}))


def _continued(fresh: dict[str, Any], target: Path) -> dict[str, Any]:
    """What earlier stages of the same experiment left, or a new result."""
    if not target.exists():
        return fresh
    found = load_task(target)
    for key in ("generator", "model"):
        if found[key] != fresh[key]:
            raise OptionError(
                f"{target.name} has {key} {found[key]!r}, this run {fresh[key]!r}: stages of two "
                f"experiments would be mixed. "
                "Name another file with --out, or delete it"
            )
    return {
        **fresh,
        **{part: found[part] for part in ("layers", "vocabulary", "training", "quality", "race")},
    }


if __name__ == "__main__":
    run_command(task)
