"""The options of drafters that run layers and may stop where exit predictors say so.

Does not know what predictors look at.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TypeVar

from ..errors import OptionError
from ..exits.part import find_predictors
from ..exits.stop import StopRule
from ..model.layered import LayeredModel
from ..trained.files import TrainedPart
from .base import Drafter
from .chain import ChainSession

S = TypeVar("S", bound=ChainSession)


@dataclass(frozen=True)
class StoppingDrafter(Drafter):
    """A drafter whose drafts end where predictors doubt them."""

    sure: float | None = field(default=None, kw_only=True)
    """End a draft behind a token that is the model's with less than this chance, as exit predictors
    see it. None does not ask them."""
    predictors: str | os.PathLike[str] | TrainedPart | None = field(default=None, kw_only=True)
    """Folder of predictors fitted for this model, with `sure`. None is what comes with it."""

    def stopping(self, session: S, model: LayeredModel, layers: int) -> S:
        """The session with its stop rule, if there is one, for drafts that run so many layers."""
        if self.sure is not None:
            found = find_predictors(self.predictors, model)
            session.stop = StopRule(found, layers, self.sure)
        elif self.predictors is not None:
            raise OptionError(
                "predictors say where to stop from a chance on, and none was given; add sure=0.5, "
                "or leave them out"
            )
        return session
