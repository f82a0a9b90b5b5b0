"""Predictors fitted to samples: all layers at once, in seconds, and what they are worth.

A predictor's label at a layer: the best token of the whole head is the answer there, and a
candidate, so that an exit would be let go and be right. The paper's label leaves out the candidate.
Between two looks a schedule may leave out layers, so the change since the last look is taken over
gaps of random size. Does not know where samples come from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import DataError, OptionError
from ..exits.features import PER_CANDIDATE, features_of, shares_of
from .exit_samples import Samples

GAPS = 6  # layers between two looks, at most, as far as fitting goes
FIRST = 0.1  # how often a look is taken as the first one
BATCH = 128
FEWEST = 64  # samples that something can be said from


@dataclass(frozen=True)
class FitOptions:
    """How predictors are fitted."""

    hidden: int = 512
    """Width of a predictor's hidden layer."""
    epochs: float = 30.0
    """How often all samples are gone through."""
    learning_rate: float = 1e-3
    """Learning rate at the beginning. It falls to 0 by a cosine."""
    held_out: float = 0.1
    """Share of the texts that are kept apart, to measure on."""
    seed: int = 0
    """Seed of first weights, of gaps and of the order of samples."""
    adainfer: bool = False
    """Fit AdaInfer's linear SVMs too, to compare with (needs scikit-learn)."""

    def __post_init__(self) -> None:
        if self.hidden < 1:
            raise OptionError(f"hidden={self.hidden} fits nothing; use 1 or more")
        if not 0 < self.epochs < math.inf:
            raise OptionError(f"epochs={self.epochs} fits nothing; use a number above 0")
        if not 0 < self.held_out < 1 or not self.learning_rate > 0:
            raise OptionError(
                f"held_out={self.held_out}, learning_rate={self.learning_rate}: use a share "
                "between 0 and 1 of texts to measure on, and a rate above 0"
            )


@dataclass(frozen=True)
class Split:
    """Samples to fit and to measure on, by texts."""

    fit: Samples
    held_out: Samples


def split(samples: Samples, share: float) -> Split:
    """Every so many texts one is held out."""
    every = max(2, round(1 / share))
    held = samples["text"] % every == every - 1
    parts = [{name: each[where] for name, each in samples.items()} for where in (~held, held)]
    if min(len(part["text"]) for part in parts) < FEWEST:
        raise DataError(
            f"there are {len(samples['text'])} samples of {int(samples['text'].max()) + 1} texts, "
            f"and at least {FEWEST} are needed to fit on and as many to measure on; take more "
            "(--samples, more prompts), or hold out another share"
        )
    return Split(*parts)


def right(samples: Samples) -> Tensor:
    """Where an exit would be let go and be right, (samples, exits)."""
    return samples["same"] & (samples["top"] >= 0)


def oracle(samples: Samples, layers: int) -> Tensor:
    """The earliest layer from which the answer stays, for each sample; all where no candidate is
    the answer."""
    stays = right(samples).flip(1).int().cumprod(1).sum(1)
    return layers - stays


def first_of(samples: Samples, layers: int) -> int:
    """After how many layers samples begin."""
    return layers - samples["logits"].shape[1]


class _Nets(torch.nn.Module):
    """All layers' predictors."""

    def __init__(self, layers: int, inputs: int, hidden: int) -> None:
        super().__init__()
        bound = inputs**-0.5, hidden**-0.5
        self.first = torch.nn.Parameter(torch.empty(layers, inputs, hidden).uniform_(-1, 1))
        self.first.data *= bound[0]
        self.first_bias = torch.nn.Parameter(torch.zeros(layers, 1, hidden))
        self.second = torch.nn.Parameter(torch.empty(layers, hidden, 1).uniform_(-1, 1))
        self.second.data *= bound[1]
        self.second_bias = torch.nn.Parameter(torch.zeros(layers, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """(layers, samples, inputs) -> (layers, samples)."""
        hidden = torch.baddbmm(self.first_bias, x, self.first).relu()
        return torch.baddbmm(self.second_bias, hidden, self.second)[..., 0]


def features(samples: Samples, gaps: Tensor | None = None) -> Tensor:
    """(layers, samples, features). `gaps`: of each sample and layer, how many layers back the look
    before was; none means the layer before. Beyond the first layer there was none."""
    logits = samples["logits"]  # (samples, layers, count)
    shares, places = shares_of(logits), torch.arange(logits.shape[1])
    back = places - (torch.ones(len(logits), 1).long() if gaps is None else gaps)
    before = shares.gather(1, back.clamp(min=0)[..., None].expand_as(shares))
    before = torch.where((back < 0)[..., None], shares, before)
    return features_of(logits, shares, before).transpose(0, 1)


def fit(
    samples: Samples, options: FitOptions, tell: Callable[[int, int, float], None] | None = None
) -> dict[str, Tensor]:
    """A part's tensors. `tell(step, steps, loss)`."""
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
        torch.manual_seed(options.seed)
        return _fitted({name: each.clone() for name, each in samples.items()}, options, tell)


def _fitted(
    samples: Samples, options: FitOptions, tell: Callable[[int, int, float], None] | None
) -> dict[str, Tensor]:
    labels = right(samples).float().T.contiguous()  # (layers, samples)
    plain = features(samples)
    mean, spread = plain.mean(1, keepdim=True), plain.std(1, keepdim=True).clamp(min=1e-3)
    layers, count, inputs = plain.shape
    assert inputs % PER_CANDIDATE == 0
    nets = _Nets(layers, inputs, options.hidden)
    batch = min(BATCH, count)
    steps = math.ceil(options.epochs * -(-count // batch))
    optimiser = torch.optim.AdamW(nets.parameters(), options.learning_rate, weight_decay=0.01)
    falling = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    order = torch.empty(0, dtype=torch.long)
    for step in range(steps):
        if len(order) < batch:
            order = torch.randperm(count)
        some, order = order[:batch], order[batch:]
        chosen = {"logits": samples["logits"][some]}
        x = (features(chosen, _gaps(batch, layers)) - mean) / spread
        loss = F.binary_cross_entropy_with_logits(nets(x), labels[:, some])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        falling.step()
        if tell:
            tell(step + 1, steps, float(loss.detach()))
    first = nets.first.detach() / spread.transpose(1, 2)
    bias = nets.first_bias.detach() - mean @ first
    return {
        "first.weight": first.half(),
        "first.bias": bias[:, 0].half(),
        "second.weight": nets.second.detach()[..., 0].half(),
        "second.bias": nets.second_bias.detach()[:, 0, 0].half(),
    }


def _gaps(samples: int, layers: int) -> Tensor:
    """How many layers back the look before was: mostly one, sometimes more, sometimes never."""
    gaps = torch.randint(1, GAPS + 1, (samples, layers))
    gaps[torch.rand(samples, layers) < 0.5] = 1
    gaps[torch.rand(samples, layers) < FIRST] = layers + 1
    return gaps


def fit_svms(samples: Samples, seed: int = 0) -> dict[str, Tensor]:
    """AdaInfer's: a linear SVM a layer over the whole head's best chance and its lead."""
    try:
        from sklearn.svm import LinearSVC
    except ImportError as error:
        raise OptionError(
            "AdaInfer's SVMs need scikit-learn: pip install 'selfspec[exits]'; or leave out "
            "--adainfer"
        ) from error
    weights, biases = list[list[float]](), list[float]()
    for place in range(samples["same"].shape[1]):
        labels = samples["same"][:, place]
        if bool(labels.all()) or not bool(labels.any()):  # one class: nothing to separate
            weights.append([0.0, 0.0])
            biases.append(1.0 if bool(labels.all()) else -1.0)
            continue
        svm = LinearSVC(random_state=seed).fit(samples["lead"][:, place].numpy(), labels.numpy())
        weights.append([float(each) for each in svm.coef_[0]])
        biases.append(float(svm.intercept_[0]))
    return {"svm.weight": torch.tensor(weights), "svm.bias": torch.tensor(biases)}


# --------------------------------------------------------------------------------- what it is worth


def scores(tensors: dict[str, Tensor], x: Tensor) -> Tensor:
    """(layers, samples, features) -> chances, (layers, samples)."""
    first, bias = tensors["first.weight"].float(), tensors["first.bias"].float()
    hidden = torch.baddbmm(bias[:, None], x, first).relu()
    out = torch.bmm(hidden, tensors["second.weight"].float()[..., None])[..., 0]
    return (out + tensors["second.bias"].float()[:, None]).sigmoid()


def by_layer(tensors: dict[str, Tensor], samples: Samples, layers: int) -> list[dict[str, Any]]:
    """Of each layer: how often a predictor is right, and whether its chances can be believed."""
    chances, labels = scores(tensors, features(samples)), right(samples).T
    found = []
    for place, (chance, label) in enumerate(zip(chances, labels, strict=True)):
        fired, positive = chance >= 0.5, int(label.sum())
        hits = int((fired & label).sum())
        found.append(
            {
                "layer": place + first_of(samples, layers),
                "right": positive / len(label),
                "accuracy": float((fired == label).float().mean()),
                "recall": hits / positive if positive else None,
                "precision": hits / int(fired.sum()) if bool(fired.any()) else None,
                "reliability_error": _reliability_error(chance, label),
            }
        )
    return found


def _reliability_error(chance: Tensor, label: Tensor, bins: int = 10) -> float:
    """How far chances are from what happened, on average over ten bins (ECE)."""
    at, error = (chance * bins).long().clamp(max=bins - 1), 0.0
    for each in at.unique().tolist():
        inside = at == each
        gap = chance[inside].mean() - label[inside].float().mean()
        error += float(gap.abs()) * int(inside.sum()) / len(chance)
    return error


def walked(
    tensors: dict[str, Tensor], samples: Samples, layers: int, threshold: float = 0.5
) -> tuple[Tensor, float]:
    """Where each sample leaves if all layers are looked at, and how many say the answer then."""
    chances = scores(tensors, features(samples)).T  # (samples, exits)
    leaves = (chances >= threshold) & (samples["top"] >= 0)
    first = leaves.int().argmax(1)
    gone = leaves.any(1)
    exits = torch.where(gone, first + first_of(samples, layers), layers)
    same = samples["same"].gather(1, first[:, None])[:, 0]
    return exits, float((same | ~gone).float().mean())


def summary(tensors: dict[str, Tensor], samples: Samples, layers: int) -> dict[str, float]:
    """Layers a token beside the oracle's, and how often the token is the model's."""
    exits, agreement = walked(tensors, samples, layers)
    average, best = float(exits.float().mean()), float(oracle(samples, layers).float().mean())
    return {
        "average_layers": average,
        "oracle_layers": best,
        "saved_of_oracle": (layers - average) / (layers - best) if best < layers else 0.0,
        "agreement": agreement,
        "answer_among_candidates": float((samples["answer"] >= 0).float().mean()),
    }


def exit_shares(tensors: dict[str, Tensor], samples: Samples, layers: int) -> list[float]:
    """Of each layer after which a token may leave: the share that does."""
    exits, _ = walked(tensors, samples, layers)
    looked = range(first_of(samples, layers), layers)
    return [float((exits == layer).float().mean()) for layer in looked]


def curve(
    parts: Split, options: FitOptions, layers: int, shares: Sequence[float]
) -> list[dict[str, float]]:
    """What fewer samples would have given (the paper's Fig. 18)."""
    found = []
    for share in shares:
        count = max(FEWEST, round(share * len(parts.fit["text"])))
        some = {name: each[:count] for name, each in parts.fit.items()}
        tensors = fit(some, options)
        rows = by_layer(tensors, parts.held_out, layers)
        accuracy = sum(row["accuracy"] for row in rows) / len(rows)
        measured = summary(tensors, parts.held_out, layers)
        found.append({"samples": float(count), "accuracy": accuracy, **measured})
    return found
