"""What the ablation measured, arm by arm. Knows no tables."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from benchmarks.recipe.arms import RecipeOptions
from benchmarks.task.result import Quality, Race
from selfspec.bench.schema import Provenance, Result


@dataclass
class ArmRun:
    """One arm: how it was trained, what its exits were worth meanwhile, and what it can do."""

    made: Provenance
    training: dict[str, Any]
    looks: list[dict[str, Any]]
    """Steps, how long each of those before kept a core busy (where it was noted), and each exit's
    loss, perplexity and agreement on held-out text."""
    quality: dict[str, Quality] = field(default_factory=dict)
    """Of a task: exact match by kind of utterance, "train" (trained phrasings) and "held_out"."""
    race: dict[str, Race] = field(default_factory=dict)
    """Ways of decoding in turns, with the whole vocabulary."""


@dataclass
class RecipeRun(Result):
    """Everything that was measured; arms may come from several days."""

    kind = "recipe"
    measured_by = "scripts/bench recipe"

    options: RecipeOptions
    texts: str
    """A digest of the free texts."""
    generator: str
    """Of the task's grammar."""
    own_text: str = ""
    """A digest of the text that the published model wrote."""
    arms: dict[str, ArmRun] = field(default_factory=dict)
