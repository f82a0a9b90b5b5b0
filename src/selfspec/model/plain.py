"""A folder's weights under the names that transformers gives them, without transformers' model.

What `weights.py` reads of a model, and no more: linears, embeddings, norms and their numbers, and a
rotary module. Does not know where the numbers come from (remembered.py).
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from .load.gguf_stored import fill
from .weights import module


class Plain(nn.Module):
    """A model's weights by their usual names. It cannot be called."""

    def __init__(self, config: Any, generation: Any, head: str) -> None:
        super().__init__()
        self.config, self.generation_config, self._head = config, generation, head
        self.dtype, self.device = torch.float32, torch.device("cpu")

    def get_output_embeddings(self) -> nn.Module:
        return module(self, self._head)

    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())


class _Linear(nn.Linear):
    def __init__(self) -> None:
        nn.Module.__init__(self)  # the weights are put in, none are made
        self.register_parameter("bias", None)


class _Embedding(nn.Embedding):
    def __init__(self) -> None:
        nn.Module.__init__(self)


class _Rotary(nn.Module):
    """Cosines and sines as transformers' own rotary modules give them for frequencies that never
    change. That these are the same bits is checked before they are kept."""

    def __init__(self, frequencies: list[float], scaling: float) -> None:
        super().__init__()
        self._frequencies, self._scaling = torch.tensor(frequencies), scaling

    def forward(self, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[..., None].float() * self._frequencies
        both = torch.cat((angles, angles), dim=-1)
        return both.cos() * self._scaling, both.sin() * self._scaling


_KINDS: dict[str, type[nn.Module]] = {"linear": _Linear, "embedding": _Embedding, "": nn.Module}


def plain_model(folder: Path, facts: dict[str, Any]) -> Plain:
    """The model of a folder by its facts, its weights mapped from the files as they are stored."""
    from safetensors import safe_open  # no part of a mere import of LLM

    config, generation = (SimpleNamespace(**facts[each]) for each in ("config", "generation"))
    root = Plain(config, generation, facts["head"])
    parts: dict[str, nn.Module] = {"": root}
    for path, (kind, numbers) in facts["modules"].items():
        parts[path] = _Rotary(**numbers) if kind == "rotary" else _KINDS[kind]()
        above, _, name = path.rpartition(".")
        parts[above].add_module(name, parts[path])
        if kind != "rotary":
            vars(parts[path]).update(numbers)
    for file, tensors in facts["files"].items():
        with safe_open(folder / file, "pt") as stored:
            for name, places in tensors.items():
                data = stored.get_tensor(name)
                if data.dim() == 1:  # matrices become float32 one by one, when they are packed
                    data = data.float()
                weight = nn.Parameter(data, requires_grad=False)
                _put(parts, places, weight)
    for places, shape in facts.get("shapes", ()):  # of weights that come packed
        weight = nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)
        _put(parts, places, weight)
    if "blocks" in facts:
        fill(root, facts["blocks"], folder)
    return root


def _put(parts: dict[str, nn.Module], places: list[str], weight: nn.Parameter) -> None:
    for place in places:
        above, _, last = place.rpartition(".")
        parts[above].register_parameter(last, weight)
