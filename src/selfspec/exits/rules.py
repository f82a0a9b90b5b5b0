"""Rules that say when a token may leave: by predictors, by confidence, or by a linear SVM.

A judge looks at the states of some texts after a layer and names those that leave, with what the
whole head said of them. `Predicted` is SpecEE's: a predictor fires on the candidates' features,
then the whole head checks that its best token is a candidate. `Confident` is CALM's (Schuster et
al. 2022), `Separated` AdaInfer's (Fan et al. 2024): both need the whole head at every look, which
is what SpecEE is there to avoid. Does not know what is done with a token that left.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import OptionError
from ..model.compute.cpu.choosing import likeliest
from ..model.layered import LayeredModel
from ..model.partial_head import PartialHead
from .features import features_of, shares_of
from .first_look import Named, rows_of
from .part import Predictors


@dataclass
class Counts:
    """What looking cost."""

    tokens: int = 0
    looks: int = 0
    """How often a predictor, or another rule, was asked."""
    fired: int = 0
    """How often it said that a token may leave, and the whole head was asked."""
    left: int = 0
    """How often the token left."""
    rule_seconds: float = 0.0
    """In predictors and their features, or what stands for them."""
    head_seconds: float = 0.0
    """In the whole head, at looks."""


class Judge(ABC):
    """A rule at work on one token of each of some texts, numbered from 0."""

    def __init__(self, model: LayeredModel, counts: Counts) -> None:
        self._model, self.counts = model, counts

    def may_look(self, text: int) -> bool:
        """Whether there is anything to go by."""
        return True

    def look(self, layer: int, texts: Sequence[int], x: Tensor) -> Mapping[int, Tensor]:
        """Those of the texts whose token leaves after so many layers, each with the head's logits,
        (1, vocabulary). x: their states, (texts, width)."""
        counts = self.counts
        begin, checked = time.perf_counter(), counts.head_seconds
        left = self._look(layer, texts, x)
        counts.looks += len(texts)
        counts.left += len(left)
        counts.rule_seconds += time.perf_counter() - begin - (counts.head_seconds - checked)
        return left

    @abstractmethod
    def _look(self, layer: int, texts: Sequence[int], x: Tensor) -> Mapping[int, Tensor]: ...

    def _head(self, x: Tensor) -> Tensor:
        begin = time.perf_counter()
        logits = self._model.head(x)
        self.counts.fired += len(x)
        self.counts.head_seconds += time.perf_counter() - begin
        return logits


class Rule(ABC):
    """Makes judges."""

    candidates = 0
    """How many candidates it wants to be named for each token."""
    source = ""
    """Who names them by default: a drafter's name."""
    layers: Sequence[int] = ()
    """After which layers it can look."""
    exits: Sequence[float] = ()
    """Of each of them, the share of exits that was seen there."""

    pool: PartialHead | None = None
    """The tokens of which a first look names candidates, if there are any."""

    def shares(self, layers: Sequence[int]) -> list[float]:
        """Of these layers, the shares of exits."""
        known = dict(zip(self.layers, self.exits, strict=True))
        return [known[layer] for layer in layers]

    @abstractmethod
    def judge(self, named: Sequence[Named], counts: Counts) -> Judge:
        """For the next token of each of some texts. `named`: its candidates."""


def need_share(name: str, value: float) -> float:
    """A chance that something has to reach."""
    if not 0 < value < 1:
        raise OptionError(
            f"{name}={value} is no chance that could be reached and missed; use more than 0 and "
            "less than 1"
        )
    return value


# ----------------------------------------------------------------------------------------- SpecEE


class Predicted(Rule):
    """SpecEE's."""

    def __init__(self, model: LayeredModel, found: Predictors, threshold: float) -> None:
        need_share("threshold", threshold)
        self._model, self._found = model, found
        self._least = math.log(threshold / (1 - threshold))
        self.candidates, self.source = found.count, found.source
        self.layers, self.exits, self.pool = found.layers, found.exits, found.pool

    def judge(self, named: Sequence[Named], counts: Counts, drafts: bool = False) -> PathJudge:
        """`drafts`: somebody verifies what is said, so where there are pools these are asked in
        place of the whole head."""
        pools = [each for each in named if isinstance(each, PartialHead)] if drafts else []
        return PathJudge(self._model, self._found, self._least, named, counts, pools)


class PathJudge(Judge):
    """The two halves of a look can be had alone, for trees whose paths decide as one."""

    def __init__(
        self,
        model: LayeredModel,
        found: Predictors,
        least: float,
        named: Sequence[Named],
        counts: Counts,
        asked: Sequence[PartialHead] = (),
    ) -> None:
        super().__init__(model, counts)
        begin = time.perf_counter()
        self._found, self._least, self._asked = found, least, asked
        self._rows = rows_of(model, named, found.count)
        self._before: dict[int, Tensor] = {}  # of texts that were looked at: their shares then
        counts.rule_seconds += time.perf_counter() - begin

    def may_look(self, text: int) -> bool:
        return self._rows.known[text]

    def _look(self, layer: int, texts: Sequence[int], x: Tensor) -> Mapping[int, Tensor]:
        fired = [at for at, yes in enumerate(self._fires(layer, texts, x)) if yes]
        if not fired:
            return {}
        return self._checked(
            [texts[at] for at in fired], x if len(fired) == len(texts) else x[fired]
        )

    def fires(self, layer: int, texts: Sequence[int], x: Tensor) -> list[bool]:
        """Of which texts the predictor says that the answer is here, all in one product."""
        begin = time.perf_counter()
        found = self._fires(layer, texts, x)
        self.counts.looks += len(texts)
        self.counts.rule_seconds += time.perf_counter() - begin
        return found

    def check(self, texts: Sequence[int], x: Tensor) -> Mapping[int, Tensor]:
        """Those of the texts of which the whole head says a candidate, with its logits."""
        found = self._checked(texts, x)
        self.counts.left += len(found)
        return found

    def _fires(self, layer: int, texts: Sequence[int], x: Tensor) -> list[bool]:
        found: list[bool] = (
            self._found.score(layer, self.features(texts, x)) >= self._least
        ).tolist()
        return found

    def _checked(self, texts: Sequence[int], x: Tensor) -> Mapping[int, Tensor]:
        logits = self._of_pools(texts, x) if self._asked else self._head(x)
        best = likeliest(logits)[:, 0].tolist()
        return {
            text: row
            for text, token, row in zip(texts, best, logits.split(1), strict=True)
            if self._rows.names(text, token)
        }

    def _of_pools(self, texts: Sequence[int], x: Tensor) -> Tensor:
        """Logits of the whole vocabulary, -inf but for each text's pool."""
        begin = time.perf_counter()
        whole = torch.full((len(x), self._model.shape.vocabulary), -torch.inf, device=x.device)
        for at, text in enumerate(texts):
            pool = self._asked[text]
            whole[at, pool.tokens] = pool(x[at : at + 1])[0].float()
        self.counts.fired += len(x)
        self.counts.head_seconds += time.perf_counter() - begin
        return whole

    def features(self, texts: Sequence[int], x: Tensor) -> Tensor:
        """(texts, 3 * candidates). The shares are kept for the next look."""
        logits, filled = self._rows.logits(texts, x), self._rows.filled
        shares = shares_of(logits, filled)
        own = [shares] if len(texts) == 1 else shares.split(1)
        last = [self._before.get(text, now) for text, now in zip(texts, own, strict=True)]
        self._before.update(zip(texts, own, strict=True))
        before = last[0] if len(last) == 1 else torch.cat(last)
        return features_of(logits, shares, before, filled)


# -------------------------------------------------------------------------------------- baselines


class Confident(Rule):
    """CALM's softmax rule: leave where the whole head is sure enough."""

    def __init__(self, model: LayeredModel, threshold: float, layers: Sequence[int] = ()) -> None:
        self._model, self._least = model, need_share("threshold", threshold)
        self.layers = tuple(layers) or tuple(range(1, model.layers))
        self.exits = [0.0] * len(self.layers)

    def judge(self, named: Sequence[Named], counts: Counts) -> Judge:
        return _ByTheHead(self._model, counts, self._sure)

    def _sure(self, layer: int, logits: Tensor) -> Tensor:
        return logits.float().softmax(-1).amax(-1) >= self._least


class Separated(Rule):
    """AdaInfer's: a linear SVM a layer over the best token's chance and its lead."""

    def __init__(self, model: LayeredModel, found: Predictors) -> None:
        if found.svm is None:
            raise OptionError(
                "these predictors came without AdaInfer's; fit them with it: selfspec fit-exits "
                "MODEL --adainfer (needs pip install 'selfspec[exits]')"
            )
        self._model, self._found, self._svm = model, found, found.svm
        self.layers, self.exits = found.layers, found.exits

    def judge(self, named: Sequence[Named], counts: Counts) -> Judge:
        return _ByTheHead(self._model, counts, self._says)

    def _says(self, layer: int, logits: Tensor) -> Tensor:
        at = self._found.place(layer)
        return (chance_and_lead(logits) * self._svm[0][at]).sum(-1) + self._svm[1][at] >= 0


def chance_and_lead(logits: Tensor) -> Tensor:
    """AdaInfer's features of the whole vocabulary: the best token's probability, and how far it is
    ahead of the next. (texts, vocabulary) -> (texts, 2)."""
    best = logits.float().softmax(-1).topk(2).values
    return torch.stack([best[:, 0], best[:, 0] - best[:, 1]], -1)


class _ByTheHead(Judge):
    """Asks the whole head at every look."""

    def __init__(
        self, model: LayeredModel, counts: Counts, says: Callable[[int, Tensor], Tensor]
    ) -> None:
        super().__init__(model, counts)
        self._says = says

    def _look(self, layer: int, texts: Sequence[int], x: Tensor) -> Mapping[int, Tensor]:
        logits = self._head(x)
        leave = self._says(layer, logits).tolist()
        rows = zip(texts, leave, logits.split(1), strict=True)
        return {text: row for text, leaves, row in rows if leaves}
