"""Decoding whose tokens leave at different layers, unverified: SpecEE, and rules beside it.

The published method is lossy: an exit is checked by the head, never by the layers behind it. The
text is NOT what the model would write. The same predictors draft for the whole model, whose text it
stays, as `draft="dynamic-exit"`.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

from ..errors import OptionError
from ..exits.part import Wanted, find_predictors
from ..exits.rules import Confident, Predicted, Rule, Separated
from ..exits.schedule import Level, Schedule
from ..model.layered import LayeredModel
from ..trained.files import TrainedPart
from .result import Generates, LossyResult
from .session import Fill, Leaving, Log
from .trees import LeavingTrees

Part = str | os.PathLike[str] | TrainedPart | None


class _Lossy(ABC):
    """What the three have in common. Their options are fields of the same names."""

    layers: tuple[int, ...]
    fill: Fill
    tree: int = 0
    head: Part = None

    @abstractmethod
    def rule(self, model: LayeredModel) -> Rule:
        """When a token may leave."""

    def schedule_of(self) -> Schedule:
        """Where is looked."""
        return Schedule("all")

    def source(self, rule: Rule) -> str:
        """Who names candidates."""
        return rule.source

    def _check(self) -> None:
        if self.fill not in get_args(Fill):
            raise OptionError(f"fill={self.fill!r} is not known; use {', '.join(get_args(Fill))}")
        self.schedule_of()

    def generate(self, llm: Generates, prompts: Any, **options: Any) -> Any:
        """A `LossyResult` for a prompt, or one for each of a list: NOT what the model would write.

        `options` are those of `LLM.generate`, without those that say how to draft.
        """
        if said := sorted({"draft", "draft_options", "control", "control_options"} & {*options}):
            raise OptionError(
                f"{said[0]}={options[said[0]]!r}: drafts are verified by the whole model, which "
                f"{type(self).__name__} never asks, so both cannot be had; for the model's own "
                "text leave it out and use llm.generate(..., draft='dynamic-exit')"
            )
        model = llm.model
        model.needs_layers(f"lossy.{type(self).__name__}")
        if self.tree and model.chains_only:
            raise OptionError(f"tree={self.tree}: recurrent layers read no trees; leave it out")
        if self.fill == "holes" and model.chains_only:
            raise OptionError(
                "fill='holes' leaves out keys that layers lack, and recurrent layers have none to "
                "leave out; use fill='caught-up' or 'state'"
            )
        rule, log = self.rule(model), Log()
        layers = sorted(self.layers or rule.layers)
        if layers[0] < 1 or layers[-1] >= model.layers:
            raise OptionError(
                f"layers: {layers[0] if layers[0] < 1 else layers[-1]} is not inside this model of "
                f"{model.layers} layers; choose 1 to {model.layers - 1}"
            )
        how = rule, self.source(rule), self.schedule_of(), layers, self.fill, log, self.head
        drafter = LeavingTrees(*how, self.tree) if self.tree else Leaving(*how)
        results = llm.generate(prompts, draft=drafter, **options)
        several = isinstance(results, Sequence)
        found = [
            _flagged(result, exits, log, model.layers)
            for result, exits in zip(results if several else [results], log.exits, strict=True)
        ]
        return found if several else found[0]


def _flagged(result: Any, exits: Sequence[int], log: Log, layers: int) -> LossyResult:
    written = [layers, *exits][: len(result.tokens)]
    return LossyResult(**vars(result), layer=max(written), exits=written, looking=log.counts)


@dataclass(frozen=True)
class SpecEE(_Lossy):
    """Leave where a predictor fires and the whole head's best token is a candidate."""

    part: Part = None
    """Folder of predictors fitted for this model. None is what selfspec ships for it."""
    threshold: float = 0.5
    """A predictor fires at this chance or above. Higher leaves later, and changes less."""
    candidates: str | None = None
    """The drafter that names candidates: recycle, ngram, hybrid, draft-head or quantised, whose
    copy runs for every token. None is the one that the predictors were fitted with."""
    head: Part = None
    """Folder of the head that names candidates, with candidates="draft-head". None is the one that
    selfspec ships for this model. Of layers that a token skipped it reads the state that the token
    left with."""
    layers: tuple[int, ...] = ()
    """Leave after these numbers of layers only. () allows all that have a predictor."""
    schedule: Level = "both"
    """Where to look: all, offline (where exits were frequent), online (near the last exits), both
    (their union)."""
    offline: float = 0.5
    """Offline: the fewest layers that hold this share of all exits seen when fitting."""
    last: int = 5
    """Online: of so many last tokens of a text the exits count."""
    near: int = 2
    """Online: layers up to so far from one of these exits are looked at."""
    fill: Fill = "caught-up"
    """Keys and values of skipped layers: caught-up (computed beside the next token that goes
    there), state (from the state that the token left with), holes (as published: none)."""
    tree: int = 0
    """Guess trees of so many tokens and let each path leave as one (T3); 0 says one token a pass.
    Who names candidates guesses them, or hybrid beside a first look. Needs fill="state"."""

    def __post_init__(self) -> None:
        self._check()
        if self.tree < 0:
            raise OptionError(f"tree={self.tree} is no number of guesses; use 0 or more")
        if self.tree and self.fill != "state":
            raise OptionError(
                f"tree={self.tree} with fill={self.fill!r}: nodes of a tree that left are not "
                "caught up, and later tokens would read what is not there; use fill='state'"
            )

    def schedule_of(self) -> Schedule:
        return Schedule(self.schedule, self.offline, self.last, self.near)

    def source(self, rule: Rule) -> str:
        return self.candidates or rule.source

    def rule(self, model: LayeredModel) -> Rule:
        found = find_predictors(self.part, model, Wanted(layers=self.layers))
        return Predicted(model, found, self.threshold)


@dataclass(frozen=True)
class Confidence(_Lossy):
    """CALM's rule: leave where the whole head's best token is likely enough."""

    threshold: float = 0.9
    """The probability that lets a token leave."""
    layers: tuple[int, ...] = ()
    """Leave after these numbers of layers only. () allows all but the last."""
    fill: Fill = "state"
    """Keys and values of skipped layers, as `SpecEE` has it. The published one is state."""

    def __post_init__(self) -> None:
        self._check()

    def rule(self, model: LayeredModel) -> Rule:
        return Confident(model, self.threshold, self.layers)


@dataclass(frozen=True)
class AdaInfer(_Lossy):
    """AdaInfer's rule: a linear SVM over the whole head's best probability and its lead."""

    part: Part = None
    """Folder of predictors that were fitted with --adainfer."""
    layers: tuple[int, ...] = ()
    """Leave after these numbers of layers only. () allows all that were fitted."""
    fill: Fill = "state"
    """Keys and values of skipped layers, as `SpecEE` has it."""

    def __post_init__(self) -> None:
        self._check()

    def rule(self, model: LayeredModel) -> Rule:
        return Separated(model, find_predictors(self.part, model, Wanted(layers=self.layers)))
