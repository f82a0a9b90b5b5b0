"""The arms of the recipe's ablation: what each begins with, and what it is trained with and on.

Three groups. `scratch` trains new weights on free text (the paper's Table 3, Figures 8, 11 and
12), `task` goes on from the plain one of these with a task (Tables 5 and 10), `own` goes on from a
published model with text that it wrote itself (Figure 6). Recipes are the paper's presets as
printed; only steps, batch and learning rate are ours. Knows no files and trains nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from selfspec.errors import OptionError, nearest
from selfspec.train.data import DataOptions
from selfspec.train.presets import preset
from selfspec.train.recipe import VARIANTS, Recipe
from selfspec.train.run import TrainOptions

SCRATCH, TASK, OWN = "scratch", "task", "own"
CONSTANT = "constant"  # layer dropout alone, its mean the same at every layer
PRESETS = {SCRATCH: "scratch-1.5b", TASK: "task-1.5b", OWN: "continual-7b"}
BASE = f"{SCRATCH}/plain"
"""The arm that the task arms begin with."""


@dataclass(frozen=True)
class RecipeOptions:
    """What of the experiment can be changed. A model of llama's kind."""

    layers: int = 12
    width: int = 128
    heads: int = 4
    inner: int = 352
    """Width inside an MLP."""
    vocabulary: int = 2000
    """Tokens of the byte-pair vocabulary that is made of the texts."""
    length: int = 128
    """Tokens in a block."""
    batch: int = 8
    """Blocks a step."""
    steps: int = 2500
    """Optimizer steps of each arm from scratch."""
    task_steps: int = 7500
    """And of each task arm."""
    rate: float = 3e-3
    """Highest learning rate from scratch, the same for all arms."""
    task_rate: float = 2e-3
    """And of the task."""
    own_steps: int = 300
    """Steps of the arms that go on with a published model."""
    own_rate: float = 3e-5
    """Their highest learning rate, the paper's."""
    seeds: tuple[int, ...] = (0, 1)
    """Of the task arms: each is trained once for each."""
    examples: int = 60_000
    """Utterances made for training."""
    held_out: int = 500
    """Unseen utterances, of trained phrasings and of others each."""
    exits: tuple[int, ...] = (3, 6, 9)
    """Exit layers (E) that are drafted with: the paper's quarters of the depth."""
    drafts: int = 8
    """Drafts a round (K, the paper's d)."""
    prompts: int = 24
    """Texts or utterances that the ways of decoding answer in turns."""
    new_tokens: int = 64
    """Tokens after a text."""
    looks: int = 10
    """How often during training the exits are read on held-out text."""
    look_blocks: int = 16
    """Blocks of held-out text that they are read on."""


@dataclass(frozen=True)
class Arm:
    """One training: `scratch/LD+EE`, `task/EE/1`, `own/plain`."""

    group: str
    variant: str
    seed: int = 0

    @property
    def name(self) -> str:
        seed = [str(self.seed)] if self.group == TASK else []
        return "/".join([self.group, self.variant, *seed])

    def recipe(self, layers: int) -> Recipe:
        """The preset of its group, for a model of that depth. A rotation goes round all layers but
        the last, as the paper's does in its own model."""
        chosen = preset(PRESETS[self.group]).recipe
        if chosen.rotation is not None:
            chosen = replace(chosen, rotation=min(chosen.rotation, layers - 1))
        if self.variant == CONSTANT:
            return replace(chosen.variant("LD"), dropout_depth="constant")
        return chosen.variant(self.variant)

    def training(self, options: RecipeOptions) -> TrainOptions:
        """The same for all arms of a group."""
        rates = {SCRATCH: options.rate, TASK: options.task_rate, OWN: options.own_rate}
        steps = {SCRATCH: options.steps, TASK: options.task_steps, OWN: options.own_steps}
        return TrainOptions(
            steps=steps[self.group],
            batch=2 if self.group == OWN else options.batch,
            learning_rate=rates[self.group],
            precision="bfloat16",
            seed=self.seed,
            save_every=100,
            score_blocks=0,
            plot=False,
            from_scratch=self.group == SCRATCH,
        )

    def data(self, options: RecipeOptions) -> DataOptions:
        """Held-out text is kept apart before, so nearly all of the file is trained."""
        length = 2 * options.length if self.group == OWN else options.length
        return DataOptions(length=length, held_out=0.001, chat_template=self.group == OWN)


def all_arms(options: RecipeOptions) -> list[Arm]:
    """In the order in which they are best trained."""
    scratch = [Arm(SCRATCH, variant) for variant in ("plain", *_others(), CONSTANT)]
    task = [Arm(TASK, name, seed) for seed in options.seeds for name in ("plain", *_others())]
    return [*scratch, *task, Arm(OWN, "plain"), Arm(OWN, "LD+EE")]


def _others() -> list[str]:
    return [name for name in reversed(VARIANTS) if name != "plain"]


def chosen_arms(names: str, options: RecipeOptions) -> list[Arm]:
    """Arms by name or group; an arm that another begins with comes along before it."""
    known = all_arms(options)
    wanted: set[str] = set()
    for name in names.split(","):
        found = [arm.name for arm in known if name in (arm.name, arm.group)]
        if not found:
            choices = [*PRESETS, *(arm.name for arm in known)]
            raise OptionError(f"--arms: {name!r} is not known; {nearest(name, choices)}")
        wanted.update(found)
    if any(name.startswith(TASK) for name in wanted):
        wanted.add(BASE)
    return [arm for arm in known if arm.name in wanted]


def names(arms: Sequence[Arm]) -> list[str]:
    return [arm.name for arm in arms]
