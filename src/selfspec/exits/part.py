"""Predictors as a file: how they are found, and what they are once they are ready to run.

One for each layer after which a token may leave: features -> hidden numbers -> one number, which is
positive where the answer is there (12-512-1 for four candidates). All are in one trained part
(trained/files.py): safetensors, a description, and the signature of the model. Does not know what
follows from what they say.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..core.door import shown
from ..errors import OptionError
from ..model.layered import LayeredModel
from ..model.partial_head import PartialHead, head_over
from ..trained.files import TrainedPart, find_part, ready

KIND = "exit-predictors"
PICKLED = {".pt", ".pth", ".pkl", ".pickle", ".bin", ".ckpt"}

Source = str | os.PathLike[str] | TrainedPart | None


class Predictors:
    """A part's predictors, ready to run."""

    def __init__(self, part: TrainedPart, model: LayeredModel) -> None:
        settings = part.settings
        self.layers: tuple[int, ...] = tuple(settings["layers"])
        """After how many layers a token may leave, ascending."""
        self.count: int = settings["candidates"]
        self.source: str = settings["source"]
        """Who named the candidates when they were fitted: a drafter's name."""
        self.exits: tuple[float, ...] = tuple(settings["exits"])
        """Of each of the layers, the share of tokens that left there when all were looked at."""
        self._place = {layer: place for place, layer in enumerate(self.layers)}

        def on_device(name: str) -> Tensor:
            return part.tensors[name].to(model.device, torch.float32).contiguous()

        names = ("first.weight", "first.bias", "second.weight", "second.bias")
        tensors = [on_device(name) for name in names]
        self.bytes = sum(part.tensors[name].nbytes for name in names)
        """How large they are as stored."""
        self._nets = list(zip(*(tensor.unbind() for tensor in tensors), strict=True))
        self.pool: PartialHead | None = None
        """The tokens of which a first look names candidates, if they were fitted so."""
        if "vocabulary" in part.tensors:
            ids = part.tensors["vocabulary"].to(model.device, torch.long)
            self.pool = head_over(model, ids)
        self.svm: tuple[Tensor, Tensor] | None = None
        """AdaInfer's: of each of the layers the weights of its features, (layers, 2), and a
        bias."""
        if "svm.weight" in part.tensors:
            self.svm = on_device("svm.weight"), on_device("svm.bias")

    def place(self, layer: int) -> int:
        """Where a layer's predictor stands."""
        return self._place[layer]

    def score(self, layer: int, features: Tensor) -> Tensor:
        """(texts, features) -> (texts,): the logit of "the answer is here". Sums run over one text
        alone, so that no bit depends on its neighbours."""
        into, into_bias, out, out_bias = self._nets[self._place[layer]]
        hidden = (features[:, :, None] * into).sum(1).add_(into_bias).relu_()
        logits: Tensor = hidden.mul_(out).sum(-1).add_(out_bias)
        return logits


@dataclass(frozen=True)
class Wanted:
    """What a user says about predictors beside where they are; None is what the part says."""

    candidates: int | None = None
    layers: Sequence[int] | None = None


def find_predictors(
    source: Source, model: LayeredModel, wanted: Wanted | None = None
) -> Predictors:
    """The predictors of that folder or shipped name. None: those that come with selfspec for this
    model."""
    model.needs_layers("exits that differ from token to token")
    if isinstance(source, str | os.PathLike):
        _refuse_pickles(source)
    made = ready(find_part(source, KIND, model), model, Predictors)
    if wanted is not None:
        _check(made, wanted)
    return made


def _check(found: Predictors, wanted: Wanted) -> None:
    if wanted.candidates not in (None, found.count):
        raise OptionError(
            f"candidates={wanted.candidates}, and these predictors were fitted with {found.count}: "
            f"they could read nothing else; leave it out, or fit others: selfspec fit-exits MODEL "
            f"--candidates {wanted.candidates}"
        )
    if lacking := sorted({*(wanted.layers or ())}.difference(found.layers)):
        raise OptionError(
            f"layers: there is no predictor after layer {lacking[0]}; these were fitted after "
            f"{shown(list(found.layers))}; choose among those, or fit others: selfspec fit-exits"
        )


def _refuse_pickles(source: str | os.PathLike[str]) -> None:
    """Other people's predictors come as pickles, which run code when they are read."""
    path = Path(source).expanduser()
    if path.suffix.lower() in PICKLED:
        raise OptionError(
            f"{source} is a pickled file, which may run any code when it is read, so it is not "
            "opened; name a folder with part.json and part.safetensors: selfspec fit-exits writes "
            "one for your model in minutes"
        )
