"""What the task experiment measured, and what of it can be changed. Knows no tables."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from selfspec.bench.schema import Result
from selfspec.train.recipe import Recipe
from selfspec.train.run import TrainOptions


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


@dataclass
class Quality:
    """What a model is worth on held-out utterances."""

    exact: int = 0
    of: int = 0
    lossy: dict[str, list[int]] = field(default_factory=dict)
    """By exit: right answers, and of how many."""
    exits: list[dict[str, Any]] = field(default_factory=list)
    """Each exit's agreement and perplexity on the right answers."""


@dataclass
class Race:
    """Turns of one way of decoding, utterance by utterance; lists are in step with the others'."""

    seconds: list[float] = field(default_factory=list)
    decoded: list[int] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    identical: bool = True

    @property
    def per_token(self) -> list[float | None]:
        """Seconds a token of each utterance; one that ended with its first token has none."""
        pairs = zip(self.seconds, self.decoded, strict=True)
        return [seconds / count if count else None for seconds, count in pairs]

    @property
    def acceptance(self) -> float | None:
        """Accepted over drafted; None where nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None


@dataclass
class TaskRun(Result):
    """Everything that was measured."""

    kind = "task"
    measured_by = "scripts/bench task"

    model: str
    options: TaskOptions
    generator: str
    layers: int = 0
    vocabulary: int = 0
    """Tokens of the draft's vocabulary, before a prompt's own."""
    training: dict[str, dict[str, Any]] = field(default_factory=dict)
    quality: dict[str, Quality] = field(default_factory=dict)
    race: dict[str, Race] = field(default_factory=dict)


def by_drafts(layer: int, drafts: int) -> str:
    """The way of decoding with another number of drafts than the others have."""
    return f"E={layer}, K={drafts}"
