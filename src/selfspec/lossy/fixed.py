"""One exit for all tokens.

LayerSkip's second stage ("early exit inference", Tables 2-5 and 10): tokens come from layers 0 to
E - 1 and the model's own norm and head, and nothing checks them. A shallower view of the model does
it, so sampling, stops, batches and log-probabilities are those of `generate`. Knows neither the
engine nor tokenizers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import OptionError
from ..model.layered import LayeredModel
from .result import Generates, LossyResult


def first_layers(model: LayeredModel, layer: int) -> LayeredModel:
    """The model's first `layer` layers, its last norm and its head. All weights are shared."""
    model.needs_layers("early_exit_generate")
    if not 0 < layer < model.layers:
        raise OptionError(
            f"exit layer {layer} is not inside this model of {model.layers} layers; choose 1 to "
            f"{model.layers - 1}, or call generate, which runs them all"
        )
    # once: what is recorded on a view, or made for it, serves the next call too
    return model.once((first_layers, layer), lambda: model.view(layers=layer))


def early_exit_generate(llm: Generates, prompts: Any, layer: int, **options: Any) -> Any:
    """What the first `layer` layers write, unverified: fast, and NOT what the model would write.

    `prompts` and `options` are those of `LLM.generate`. A drafter drafts for the shallow model and
    does not change its tokens. To let these layers draft for the whole model, whose text it stays,
    use `llm.generate(..., draft="early-exit", draft_options={"layer": layer})`.
    """
    results = llm.view(first_layers(llm.model, layer)).generate(prompts, **options)
    if isinstance(results, Sequence):
        return [LossyResult(**vars(result), layer=layer) for result in results]
    return LossyResult(**vars(results), layer=layer)
