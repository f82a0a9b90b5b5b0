"""Which few layers to look at: chosen one after another on samples, and what each choice leaves.

A schedule that keeps the layers where exits are frequent keeps neighbours, which find the same
tokens. So layers are added by what they save: the average of layers, and of looks at a price. And
deeper predictors, for SpecEE's Figure 8a. Does not decode.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from selfspec.train.exit_fitting import Split, features, first_of, right, scores
from selfspec.train.exit_samples import Samples

PRICE = 0.4  # layers' worth of time of a look
MOST = 8  # layers to choose
NETS = ("first.weight", "first.bias", "second.weight", "second.bias")


def looked(
    tensors: dict[str, Tensor],
    samples: Samples,
    layers: int,
    chosen: Sequence[int],
    threshold: float,
) -> dict[str, float]:
    """What looking after these numbers of layers alone gives."""
    places = [layer - first_of(samples, layers) for layer in chosen]
    some = {name: samples[name][:, places] for name in ("logits", "top", "same")}
    nets = {name: tensors[name][places] for name in NETS}
    chances = scores(nets, features(some)).T
    leaves = (chances >= threshold) & (some["top"] >= 0)
    gone, first = leaves.any(1), leaves.int().argmax(1)
    exits = torch.where(gone, torch.tensor(chosen)[first], layers)
    same = some["same"].gather(1, first[:, None])[:, 0]
    return {
        "layers": float(exits.float().mean()),
        "looks": float(torch.where(gone, first + 1, len(chosen)).float().mean()),
        "agreement": float((same | ~gone).float().mean()),
    }


def few_looks(
    tensors: dict[str, Tensor], parts: Split, layers: int, threshold: float
) -> list[dict[str, Any]]:
    """All layers, then the best one, the best one beside it, and so on: chosen on what was fitted
    to, and what that leaves of what was held out."""
    every, chosen = list(range(first_of(parts.fit, layers), layers)), list[int]()
    found: list[dict[str, Any]] = [
        {"at": "all", **looked(tensors, parts.held_out, layers, every, threshold)}
    ]
    for _ in range(min(MOST, len(every))):
        tried = {
            layer: looked(tensors, parts.fit, layers, sorted([*chosen, layer]), threshold)
            for layer in every
            if layer not in chosen
        }
        best = min(tried, key=lambda layer: tried[layer]["layers"] + PRICE * tried[layer]["looks"])
        chosen = sorted([*chosen, best])
        held = looked(tensors, parts.held_out, layers, chosen, threshold)
        found.append({"at": ",".join(map(str, chosen)), **held})
    return found


class _Deep(torch.nn.Module):
    """A predictor for every layer, of so many linear maps."""

    def __init__(self, count: int, sizes: Sequence[int]) -> None:
        super().__init__()
        pairs = list(itertools.pairwise(sizes))
        self.weights = torch.nn.ParameterList(
            torch.empty(count, *pair).uniform_(-1, 1) * pair[0] ** -0.5 for pair in pairs
        )
        self.biases = torch.nn.ParameterList(torch.zeros(count, 1, out) for _, out in pairs)

    def forward(self, x: Tensor) -> Tensor:
        """(layers, samples, inputs) -> (layers, samples)."""
        last = len(self.weights) - 1
        for at, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = torch.baddbmm(bias, x, weight)
            x = x if at == last else x.relu()
        return x[..., 0]


def by_depth(
    fit: Samples, held_out: Samples, hidden: int, depths: Sequence[int], epochs: float
) -> list[dict[str, float]]:
    """Figure 8a: predictors of 1, 2, 3 linear maps, each fitted with the same samples."""
    found = []
    x, labels = features(fit), right(fit).float().T.contiguous()
    mean, spread = x.mean(1, keepdim=True), x.std(1, keepdim=True).clamp(min=1e-3)
    held = (features(held_out) - mean) / spread
    wanted = right(held_out).T
    for depth in depths:
        torch.manual_seed(0)
        net = _Deep(len(x), [x.shape[-1], *[hidden] * (depth - 1), 1])
        optimiser = torch.optim.AdamW(net.parameters(), 1e-3, weight_decay=0.01)
        for _ in range(round(epochs * x.shape[1] / 128)):
            some = torch.randint(x.shape[1], (128,))
            loss = F.binary_cross_entropy_with_logits(
                net((x[:, some] - mean) / spread), labels[:, some]
            )
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        with torch.no_grad():
            accuracy = float(((net(held) >= 0) == wanted).float().mean())
        weights = sum(each.numel() for each in net.parameters()) / len(x)
        found.append({"depth": float(depth), "accuracy": accuracy, "weights": weights})
    return found
