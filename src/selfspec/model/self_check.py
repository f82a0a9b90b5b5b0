"""The self-check at load: a model's own logits of a probe prompt, taken while its weights are still
there, compared with ours.

How far ours may be from them depends on the dtype, and on quantised modules where such multiply.
Some compute in half precision, in ways that depend on a batch's shape. Some round their inputs to 8
bits, and then a last bit can become a whole step in every layer. (SmolLM2 in int8 with rounded
activations: changes of 1e-6 move logits by a tenth of the largest one.) So it is measured there:
the model is asked once more with its embeddings changed in their last bits. Does not know how our
forward works.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import SelfCheckFailed
from .families import FAMILIES
from .weights import calls_modules

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# How far apart logits may be, as shares of the largest logit of the probe.
TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 6e-2, torch.float16: 2e-2}
MODULES = 6e-2  # where modules multiply, which may do so in bfloat16
AT_MOST = 0.5  # in any case: a forward that forgets a norm or a scale is further off
MOVES = 3  # times as far as changed last bits move the logits


class SelfCheck:
    """What the model itself says about the probe. `first`: the position of its first token. Scores
    tell only how far apart two tokens are, but frequencies may depend on how far they are from the
    start."""

    def __init__(self, model: PreTrainedModel, probe: Tensor, first: int = 0) -> None:
        positions = {}
        if first:
            places = torch.arange(first, first + len(probe), device=probe.device)
            positions["position_ids"] = places[None]
        self._family: str = model.config.model_type
        self._expected = _logits(model, input_ids=probe[None], **positions)
        self._scale = self._expected.abs().max().item()
        if not math.isfinite(self._scale):
            raise SelfCheckFailed(
                f"this {self._family} model scores tokens with NaN or infinity on a probe prompt, "
                "in transformers too, so no token could be chosen: its weights are damaged, or too "
                f"large for {model.dtype}. Fetch them again, or load with dtype='float32'"
            )
        self._allowed = TOLERANCE.get(model.dtype, 6e-2) * max(self._scale, 1e-3)
        if calls_modules(model):
            changed = _changed_in_last_bits(model, probe)
            moved = self._gap(_logits(model, inputs_embeds=changed, **positions))
            as_it_moves = min(MOVES * moved, AT_MOST * self._scale)
            self._allowed = max(self._allowed, MODULES * self._scale, as_it_moves)

    def compare(self, ours: Tensor, rounding: float = 0.0) -> None:
        """Raise unless our logits of the probe are the model's. `rounding`: how far rounded weights
        may move all of them together, as a share of their norm."""
        gap, allowed = self._gap(ours), self._allowed
        if rounding:
            apart = (ours.float() - self._expected).norm().item()
            gap, allowed = apart, rounding * self._expected.norm().item()
        if not gap <= allowed:  # also refuses NaN
            raise SelfCheckFailed(
                f"this {self._family} model gives logits that differ from transformers' by "
                f"{gap:.3g} (largest logit {self._scale:.3g}, allowed {allowed:.2g}) on a "
                "probe prompt, so its output would not be the model's own. It has a peculiarity "
                "that selfspec does not know. Please report it. Known families: "
                f"{', '.join(sorted(FAMILIES))}."
            )

    @property
    def vocabulary(self) -> int:
        """How many tokens the model scores."""
        return self._expected.shape[-1]

    def _gap(self, logits: Tensor) -> float:
        return (logits.float() - self._expected).abs().max().item()


def _changed_in_last_bits(model: PreTrainedModel, probe: Tensor) -> Tensor:
    """(1, tokens, width) embeddings of the probe, each number off by about two of its last bits."""
    embed: Callable[[Tensor], Tensor] = model.get_input_embeddings()
    with torch.inference_mode():
        embedded = embed(probe[None])
        noise = torch.randn(embedded.shape, generator=torch.Generator().manual_seed(0)).to(embedded)
        return embedded * (1 + 2 * torch.finfo(embedded.dtype).eps * noise)


@torch.inference_mode()
def _logits(model: PreTrainedModel, **inputs: Any) -> Tensor:
    """The model's own logits, without dropout. A model in training stays as it was."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        if "use_cache" in inspect.signature(model.forward).parameters:
            inputs["use_cache"] = False
        logits: Tensor = model(**inputs).logits[0].float()
        return logits
    finally:
        for module in training:
            module.training = True
