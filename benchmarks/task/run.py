"""The stages of the task experiment: training data, two models, exact match of both and of early
exits alone, and the race of ways to decode. Knows no files but the models' and no tables."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer
from transformers import TrainerCallback

from benchmarks.task.data import Example, examples, write_examples
from benchmarks.task.result import Quality, Race, TaskOptions, by_drafts
from selfspec.errors import OptionError
from selfspec.llm import LLM
from selfspec.lossy import early_exit_generate
from selfspec.results import Result
from selfspec.train.data import Blocks, DataOptions, pack
from selfspec.train.evaluate import evaluate_exits
from selfspec.train.run import REPORT, train

BATCH = 32  # utterances decoded together where only the answer counts
RARE = 1000  # a token that one structure in so many needs, and not its utterance, is not drafted
MOST_TOKENS = 160  # of an answer: longer than any structure of the grammar
DATA = DataOptions(length=128, held_out=0.01, chat_template=False)
Tick = Callable[[], None]
Way = Callable[[list[int]], Any]


def make_data(folder: Path, options: TaskOptions, end: str) -> None:
    """The training utterances, as a file that `selfspec train` reads, and the held-out ones with
    their structures, as a text and as questions for `scripts/bench paper`. `end` is the end
    token."""
    folder.mkdir(parents=True, exist_ok=True)
    write_examples(folder / "train.jsonl", examples("train", options.examples, options.seed))
    held_out = examples("held_out", options.held_out, options.seed)
    rows = (json.dumps({"prompt": each.prompt, "answer": each.structure}) for each in held_out)
    (folder / "held_out.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    (folder / "held_out.txt").write_text(text_of(held_out, end), encoding="utf-8")


def text_of(made: Sequence[Example], end: str) -> str:
    """With end tokens between, as the models see them in training: what
    `scripts/bench quality --text` reads."""
    return "".join(f"{each.prompt}{each.structure}{end}" for each in made)


class _Log(TrainerCallback):
    """A line on stderr now and then, for who waits."""

    def __init__(self, name: str) -> None:
        self._name = name

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        found = {name: value for name, value in (logs or {}).items() if name.startswith("exit_")}
        losses = "  ".join(f"{name} {value:.3f}" for name, value in found.items())
        if losses:
            at = f"step {state.global_step} of {state.max_steps}"
            typer.echo(f"{self._name}: {at}  {losses}", err=True)


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
    recipe = {**facts["recipe"], "exits": tuple(facts["recipe"]["exits"])}
    found = {"recipe": recipe, "steps": facts["steps"]}
    if found != asked:
        raise OptionError(
            f"{folder / name} was trained with other settings ({found}) than are asked for "
            f"({asked}); name another folder, or give the settings it was trained with"
        )
    return {key: facts[key] for key in ("steps", "tokens", "seconds", "recipe", "options", "log")}


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
        if layer is None:
            found = llm.generate(prompts, **given)
        else:
            found = early_exit_generate(llm, prompts, layer, **given)
        yield from ((each, result.text.strip()) for each, result in zip(some, found, strict=True))
        tick()


def exact_matches(pairs: Iterator[tuple[Example, str]]) -> int:
    """How many answers are the structure, character for character."""
    return sum(answer == each.structure for each, answer in pairs)


def blocks_of(tokenizer: Any, made: Sequence[Example], length: int = DATA.length) -> Blocks:
    """Right answers as text, for scores of exits: prompts are not counted."""
    end, texts = tokenizer.eos_token_id, []
    for each in made:
        asked = tokenizer(each.prompt)["input_ids"]
        answer = [*tokenizer(each.structure)["input_ids"], end]
        texts.append((asked + answer, [False] * len(asked) + [True] * len(answer)))
    return pack(texts, length, end)


def judge(llm: LLM, made: Sequence[Example], options: TaskOptions, tick: Tick) -> Quality:
    """Exact match of the model, and of its exits alone; and what exits are worth on the right
    answers."""
    found = Quality(exact_matches(answers(llm, made, None, tick)), len(made))
    some = made[: options.lossy]
    for layer in options.exits:
        found.lossy[str(layer)] = [exact_matches(answers(llm, some, layer, tick)), len(some)]
    scores = evaluate_exits(llm.model, blocks_of(llm.tokenizer, some), options.exits, most=40)
    found.exits = [score.as_dict() for score in scores]
    return found


def task_tokens(llm: LLM, file: Path) -> list[int]:
    """What a draft for this task needs beside its prompt's own tokens, which are always scored: the
    tokens that structures have and their utterances lack, but for those that fewer than one in a
    thousand needs."""
    tokenizer: Any = llm.tokenizer
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    asked, answered = (
        tokenizer([line[part] for line in lines])["input_ids"] for part in ("prompt", "response")
    )
    pairs = zip(answered, asked, strict=True)
    lacking = Counter(token for ids, known in pairs for token in set(ids) - set(known))
    often = {token for token, count in lacking.items() if count >= len(lines) / RARE}
    return sorted(often | {tokenizer.eos_token_id})


def contestants(llm: Any, tokens: Sequence[int], options: TaskOptions) -> dict[str, Way]:
    """The ways of decoding an utterance, by name."""

    def drafting(layer: int, drafts: int = options.drafts, **more: Any) -> Way:
        settings = {"draft": "early-exit", "draft_options": {"layer": layer, **more}}
        fixed = {"control": "fixed", "control_options": {"tokens": drafts}}
        return lambda prompt: llm.generate(prompt, max_new_tokens=MOST_TOKENS, **settings, **fixed)

    def alone(layer: int) -> Way:
        plain = {"draft": None, "max_new_tokens": MOST_TOKENS}
        return lambda prompt: early_exit_generate(llm, prompt, layer, **plain)

    found: dict[str, Way] = {
        "plain": lambda prompt: llm.generate(prompt, draft=None, max_new_tokens=MOST_TOKENS)
    }
    for layer in options.exits:
        found[f"E={layer}"] = drafting(layer, tokens=list(tokens))
        found[f"E={layer}, no reuse"] = drafting(layer, tokens=list(tokens), reuse=False)
        found[f"E={layer}, whole vocabulary"] = drafting(layer)
        found[f"E={layer} alone"] = alone(layer)
        for drafts in options.other_drafts:
            found[by_drafts(layer, drafts)] = drafting(layer, drafts, tokens=list(tokens))
    return found


def race(
    ways: dict[str, Way], prompts: Sequence[list[int]], tick: Tick = lambda: None
) -> dict[str, Race]:
    """Every way answers every prompt, in turns whose order rotates; the first prompt warms up and
    is not counted."""
    found = {name: Race() for name in ways}
    for number, prompt in enumerate([prompts[0], *prompts]):
        names = list(ways)
        turn = number % len(names)
        order = [*names[turn:], *names[:turn]]
        results: dict[str, Result] = {name: ways[name](prompt) for name in order}
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
