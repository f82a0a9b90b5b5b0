"""What a tuning is told: what the model is used for, and how much to look at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import OptionError, nearest

KINDS = ("copies", "exits", "skips", "text")
OF_AUTO = {"hybrid": "text", "quantised": "copies", "draft-head": "text", "early-exit": "exits"}
"""The drafters of `auto`, and their kind."""
OPTUNAS = ("tpe", "gp")
SEARCHES = ("grown", *OPTUNAS, "none")


@dataclass(frozen=True)
class Setting:
    """What the model will be used for."""

    batch: int = 1
    """Prompts that are answered together."""
    temperature: float = 0.0
    """Of what is timed. Drafts are probed on greedy text all the same."""
    drafters: str = "copies,exits,skips,text"
    """What may draft: copies (in fewer bits, which take memory), exits, skips, text (and a trained
    head, where the model has one)."""
    predictors: str = ""
    """Folder that `selfspec fit-exits` wrote, to time dynamic-exit with. Without it those are timed
    that lie in a folder inside the model's own, or come with selfspec for the model."""

    def __post_init__(self) -> None:
        if not 1 <= self.batch <= 256:
            raise OptionError(f"batch={self.batch} is no number of prompts; give 1 to 256")
        if not 0 <= self.temperature <= 10:
            raise OptionError(
                f"temperature={self.temperature} is none; use 0 (greedy) to 10, usually below 2"
            )
        for kind in self.drafters.split(","):
            if kind not in KINDS:
                raise OptionError(f"drafters: there is no kind {kind!r}; {nearest(kind, KINDS)}")

    def allows(self, kind: str) -> bool:
        """Whether that kind may draft."""
        return kind in self.drafters.split(",")

    @property
    def auto_options(self) -> dict[str, Any]:
        """What keeps `auto` to drafters of these kinds. None if that are all it knows."""
        kept = [name for name, kind in OF_AUTO.items() if self.allows(kind)]
        return {} if len(kept) == len(OF_AUTO) else {"candidates": kept}


@dataclass(frozen=True)
class TuneOptions:
    """How much to look at."""

    minutes: float = 5.0
    """About how long all of it may take."""
    max_new_tokens: int = 64
    """Tokens of each answer, of those that are probed and of those that are timed."""
    search: str = "grown"
    """How halves to leave out are searched: grown (half by half, by costs and probe), by Optuna
    (tpe, or gp: a Gaussian process, as in Draft & Verify), or none."""
    timed: bool = False
    """Judge skip sets by timed generations, as in Draft & Verify, instead of predictions."""
    trials: int = 0
    """Stop the search behind so many skip sets; 0 searches as long as there is time."""
    study: str = ""
    """Optuna's study: a file or a database's address. A killed search goes on with it, and several
    workers may share it."""

    def __post_init__(self) -> None:
        if self.search not in SEARCHES:
            raise OptionError(
                f"there is no search {self.search!r}; {nearest(self.search, SEARCHES)}"
            )
        if self.study and self.search not in OPTUNAS:
            raise OptionError(
                f"study={self.study!r} is for Optuna's searches, and {self.search} is none; "
                "use tpe or gp"
            )
        if not 0.1 <= self.minutes <= 10_000:
            raise OptionError(
                f"minutes={self.minutes} is too little to measure anything, or more than a week; "
                "give 0.1 to 10000"
            )
        if self.max_new_tokens < 16:
            raise OptionError(
                f"max_new_tokens={self.max_new_tokens} is too short for a chain of drafts; give 16 "
                "or more"
            )
