"""The stages of an arm: train, reading the exits now and then; then what it can do. Knows no
tables."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, TrainerCallback

from benchmarks.models import folder_of
from benchmarks.recipe.arms import BASE, OWN, TASK, Arm, RecipeOptions
from benchmarks.recipe.texts import HELD_OUT, SHAPE, TASK_TRAIN, TRAIN, read_pieces, unseen
from benchmarks.task.result import Quality, Race
from benchmarks.task.run import MOST_TOKENS, answers, blocks_of, exact_matches, race
from selfspec.core.files import write_whole
from selfspec.llm import LLM
from selfspec.lossy import early_exit_generate
from selfspec.model.from_transformers import from_transformers
from selfspec.train.data import Blocks, pack
from selfspec.train.evaluate import evaluate_exits
from selfspec.train.run import REPORT, train

LOOKS = "looks.json"
FACTS = ("steps", "tokens", "seconds", "recipe", "options", "log")
Say = Callable[[str], None]


def folder_of_arm(folder: Path, arm: Arm) -> Path:
    return folder / arm.name.replace("/", "-")


class _Looks(TrainerCallback):
    """Reads all exits on held-out text now and then, and leaves the scores beside the model, so
    that a run which goes on has those from before. Also how long steps keep a core busy, which
    other work on the machine disturbs less than it does the clock."""

    def __init__(self, blocks: Blocks, every: int, most: int, file: Path, say: Say) -> None:
        self._blocks, self._every, self._most, self._file = blocks, every, most, file
        self._say = say
        self._since = 0, 0.0  # the last look's step, and the processor time then
        self.found: list[dict[str, Any]] = []
        if file.exists():
            self.found = json.loads(file.read_text(encoding="utf-8"))

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
    ) -> None:
        # in bfloat16 on a CPU the gradient of the fused attention takes half of a step this small
        model.set_attn_implementation("eager")
        self._since = state.global_step, time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        step = state.global_step
        self._say(f"step {step} of {state.max_steps}")
        if step % self._every and step != state.max_steps:
            return
        before, then = self._since
        busy = (time.process_time() - then) / (step - before)
        scores = evaluate_exits(from_transformers(_copy(model)), self._blocks, most=self._most)
        exits = [score.as_dict() for score in scores]
        line = {"step": step, "core_seconds_a_step": busy, "exits": exits}
        self.found = [each for each in self.found if each["step"] < step] + [line]
        self._file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self._file, json.dumps(self.found) + "\n")
        self._since = step, time.process_time()


def _copy(model: Any) -> Any:
    """The same weights without the recipe's forward and without gradients."""
    with torch.no_grad():
        fresh = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
        fresh.load_state_dict(model.state_dict())
    return fresh.eval().requires_grad_(False)


def text_blocks(tokenizer: Any, file: Path, length: int) -> Blocks:
    """Held-out text as the model sees it in training."""
    end = tokenizer.eos_token_id
    rows = [[*tokenizer(text)["input_ids"], end] for text in read_pieces(file)]
    return pack([(ids, [True] * len(ids)) for ids in rows], length, end)


def task_blocks(tokenizer: Any, options: RecipeOptions) -> Blocks:
    """Unseen utterances of trained phrasings with their structures, which alone are counted."""
    return blocks_of(tokenizer, unseen("train", options), options.length)


def train_arm(
    arm: Arm, folder: Path, options: RecipeOptions, start: str, text: Path, blocks: Blocks, say: Say
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Train, or go on, or find it done; says how it went, and what its exits were worth."""
    out = folder_of_arm(folder, arm)
    training = arm.training(options)
    assert training.steps is not None
    every = max(1, math.ceil(training.steps / options.looks))
    looks = _Looks(blocks, every, options.look_blocks, out / LOOKS, say)
    if not (out / REPORT).exists():
        train(
            start,
            [text],
            out,
            recipe=arm.recipe(options.layers),
            options=training,
            data=arm.data(options),
            callbacks=[looks],
        )
    facts = json.loads((out / REPORT).read_text(encoding="utf-8"))
    return {name: facts[name] for name in FACTS}, looks.found


def sources(arm: Arm, folder: Path, own: Path | None) -> tuple[str, Path]:
    """What an arm begins with, and what it reads."""
    if arm.group == OWN:
        assert own is not None, "the command asks for it"
        return str(folder_of("demo")), own
    if arm.group == TASK:
        return str(folder / BASE.replace("/", "-")), folder / TASK_TRAIN
    return str(folder / SHAPE), folder / TRAIN


def judge(llm: LLM, options: RecipeOptions) -> dict[str, Quality]:
    """Exact match on unseen utterances, of the whole model and of its exits alone."""
    found = {}
    for part in ("train", "held_out"):
        made = unseen(part, options)
        quality = Quality(exact_matches(answers(llm, made)), len(made))
        if part == "train":
            for layer in options.exits:
                right = exact_matches(answers(llm, made, layer))
                quality.lossy[str(layer)] = [right, len(made)]
        found[part] = quality
    return found


def task_prompts(llm: LLM, options: RecipeOptions) -> list[list[int]]:
    tokenizer: Any = llm.tokenizer
    made = unseen("train", options)[: options.prompts]
    return [list(tokenizer(each.prompt)["input_ids"]) for each in made]


def text_prompts(llm: LLM, file: Path, options: RecipeOptions) -> list[list[int]]:
    """Beginnings of held-out pieces, evenly spread."""
    tokenizer: Any = llm.tokenizer
    found = read_pieces(file)
    chosen = found[:: max(1, len(found) // options.prompts)][: options.prompts]
    return [list(tokenizer(piece)["input_ids"])[: options.length // 2] for piece in chosen]


def run_race(
    llm: Any, prompts: Sequence[list[int]], most: int, exits: Sequence[int], drafts: int
) -> dict[str, Race]:
    """Plain decoding, drafting with each exit, and each exit alone, in turns."""
    plain = {"draft": None, "max_new_tokens": most}

    def drafting(layer: int) -> Callable[[list[int]], Any]:
        fixed = {"control": "fixed", "control_options": {"tokens": drafts}}
        given = {"draft": "early-exit", "draft_options": {"layer": layer}, "max_new_tokens": most}
        return lambda prompt: llm.generate(prompt, **given, **fixed)

    def alone(layer: int) -> Callable[[list[int]], Any]:
        return lambda prompt: early_exit_generate(llm, prompt, layer, **plain)

    ways: dict[str, Callable[[list[int]], Any]] = {
        "plain": lambda prompt: llm.generate(prompt, **plain)
    }
    for layer in exits:
        ways[f"E={layer}"] = drafting(layer)
        ways[f"E={layer} alone"] = alone(layer)
    return race(ways, prompts)


def measure(arm: Arm, folder: Path, options: RecipeOptions) -> tuple[dict[str, Quality], Any]:
    """What a trained arm can do: exact match where it has a task, and the race."""
    llm = LLM.from_pretrained(str(folder_of_arm(folder, arm)), threads=torch.get_num_threads())
    exits = [round(layer * llm.info.layers / options.layers) for layer in options.exits]
    if arm.group == TASK:
        prompts, most, quality = task_prompts(llm, options), MOST_TOKENS, judge(llm, options)
    else:
        prompts, most, quality = text_prompts(llm, folder / HELD_OUT, options), 0, {}
    return quality, run_race(llm, prompts, most or options.new_tokens, exits, options.drafts)
