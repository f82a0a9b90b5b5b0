"""From a Hugging Face model to a `LayeredModel`, and the checks before anybody uses it.

HF loads, we run: weights, norms and rotary tables are the model's own, the forward is ours. So our
logits of a probe prompt are compared with the model's own, and a model that disagrees is refused.
Knows no tokenizers.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import OptionError, SelfCheckFailed, UnsupportedModel
from .altup import Gathered, Spread
from .block import Block, Change, NormBy, NormedTwice, own_block
from .compute.cpu.operations import NativeOps
from .compute.cpu.packs import Packs, Shelf
from .compute.grouped import STORED, Matrix
from .compute.linear import Linear
from .compute.ops import Ops
from .compute.rope import RopeTable
from .embedding import Embedding, OfTokens
from .families import checked_switch, family_of
from .family import Family, Shape
from .layered import LayeredModel
from .measuring import product_modules
from .operations import operations_for, why_eager, why_not_recorded
from .probing import check_recordings, is_row_stable, probe, probe_logits
from .recording import EagerSteps, RecordedSteps
from .recurrent import recurrent_size
from .self_check import SelfCheck
from .shaping import context_of, shape_of
from .unlisted import WARNING, module_blocks, module_ops, recognised, refusing
from .weights import (
    linear_weights,
    linear_weights_of,
    module,
    norm,
    parameter_count,
    product,
    release,
    release_matrices,
    stored_blocks,
    table,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_BY_MODULES = (
    "products are left to modules of kind {0}, which keep their own weights; their speed with "
    "several tokens is up to them, and a token's last bits may depend on what is computed beside it"
)
_SHORTENED = (
    "this model rotates positions by other frequencies once a text is longer than {0} tokens "
    "(longrope). selfspec would have to read all of it again and does not, so texts end at {0} "
    "tokens here, not at {1}. For longer ones load it with long_context=True"
)


def from_transformers(
    model: PreTrainedModel,
    *,
    owned: bool = False,
    kernel: str = "auto",
    weights: str = "auto",
    check: bool = True,
    long_context: bool = False,
    row_stable: bool | None = None,
    packs: Packs | None = None,
    shelf: Shelf | None = None,
) -> LayeredModel:
    """The model as layers that run one by one.

    `owned`: the Hugging Face model may be taken apart, each weight released once it is packed, so
    that there is one copy. Otherwise it is left untouched and lives on beside ours. `check`: if
    to compare with the model itself. `row_stable`: what a test of it gave, None to test it.
    `packs`: where packed weights are kept. `shelf`: where products come from otherwise.
    """
    options: dict[str, Any] = {
        "owned": owned,
        "kernel": kernel,
        "weights": weights,
        "check": check,
        "long_context": long_context,
        "row_stable": row_stable,
        "packs": packs,
        "shelf": shelf,
    }
    if family_of(model.config) is not None:
        return _by_layers(model, **options)
    try:
        with refusing(model.config):
            return _by_layers(model, **{**options, "owned": False})  # they keep their modules
    except (UnsupportedModel, SelfCheckFailed) as error:
        reason = getattr(error, "reason", "") or "run by its modules it says something else"
    checked_switch(model.config, long_context)
    from .floor import floor_model  # imports transformers, which takes seconds

    return floor_model(model, reason, weights)


def _by_layers(
    model: PreTrainedModel,
    *,
    owned: bool,
    kernel: str,
    weights: str,
    check: bool,
    long_context: bool,
    row_stable: bool | None,
    packs: Packs | None,
    shelf: Shelf | None,
) -> LayeredModel:
    """The model by our own forward, or outside the table by its modules."""
    config, listed = model.config, family_of(model.config)
    weights = _chosen(weights, model, kernel)
    switch = checked_switch(config, long_context)
    family = listed or recognised(model)
    shape = _with_size(shape_of(config, family, long_context), model, family)
    ops = (
        operations_for(kernel, model.dtype, model.device, why_eager(family), weights)
        if listed
        else module_ops(kernel, config, weights)
    )
    whole = context_of(config)
    if shape.context < whole:
        warnings.warn(_SHORTENED.format(shape.context, whole), stacklevel=2)
    prompt = probe(shape, model.device)
    own = SelfCheck(model, prompt, switch or 0) if check else None
    if packs is not None and shelf is None and ops.weights is not None:
        shelf = packs.shelf(ops.weights)
    layered = _taken_over(model, family, shape, _on_shelf(ops, shelf), switch, owned)
    layered = replace(layered, ops=ops, packs=packs)
    if kinds := ", ".join(product_modules(layered)):
        warnings.warn(_BY_MODULES.format(kinds), stacklevel=2)
        layered.steps.give_up(f"products are left to modules of kind {kinds}")
    if own is not None:
        own.compare(probe_logits(layered), ops.rounding)
        if not listed:  # their modules may read our cache otherwise than we think
            own.compare(probe_logits(layered, at_a_time=5))
    if not listed:
        warnings.warn(WARNING.format(shape.family), stacklevel=4)
    stable = is_row_stable(layered) if row_stable is None else row_stable
    layered = replace(layered, row_stable=stable)
    check_recordings(layered)
    if shelf is not None:
        shelf.close()
    return layered


def _with_size(shape: Shape, model: PreTrainedModel, family: Family) -> Shape:
    """The shape with what its recurrent layers keep, which only their modules tell."""
    if not shape.recurrent:
        return shape
    layers = list(module(model, family.layers).children())
    return replace(shape, recurrent_size=recurrent_size(layers[shape.recurrent[0]], family))


def _on_shelf(ops: Ops, shelf: Shelf | None) -> Ops:
    return ops.on_shelf(shelf) if shelf is not None and isinstance(ops, NativeOps) else ops


def _chosen(weights: str, model: PreTrainedModel, kernel: str) -> str:
    """How to store weights: as the file stores them, unless that is not so or not asked for."""
    stored = bool(stored_blocks(model))
    if weights == STORED and not stored:
        raise OptionError(
            f"weights {STORED!r} runs matrices in few bits as a GGUF, GPTQ, AWQ or torchao "
            "checkpoint stores them, and this model's weights are plain numbers. Leave it at "
            "'auto', or round them here: 'int8' or 'int4'"
        )
    return STORED if weights == "auto" and stored and kernel in ("auto", "native") else weights


def _taken_over(
    model: PreTrainedModel, family: Family, shape: Shape, ops: Ops, switch: int | None, owned: bool
) -> LayeredModel:
    """The model's pieces, ready to run; none of them is checked yet."""
    parameters = parameter_count(model)
    final_norm: Change
    if ops.kernel == "modules":
        ropes: dict[str | None, RopeTable] = {}
        blocks = module_blocks(model, family, shape)
        final_norm = module(model, family.final_norm)
    else:
        ropes = _ropes(model, family, shape, switch)
        blocks = _own_blocks(model, family, shape, ops, ropes, owned)
        final_norm = _before_head(model, family, shape, ops)
    embedding, head = _ends(model, family, shape, ops, owned)
    shortened = shape.context < context_of(model.config)
    positions = _positions(model, family)
    return LayeredModel(
        shape=shape,
        dtype=model.dtype,
        device=model.device,
        ops=ops,
        embedding=embedding,
        positions=positions,
        ropes=tuple(ropes.values()),
        blocks=tuple(blocks),
        final_norm=final_norm,
        head_product=head,
        steps=_steps(model, family, shape, ops, tuple(ropes.values())),
        parameters=parameters,
        of_tokens=_of_tokens(model, family, ops, owned),
        longer=", or load the model with long_context=True" if shortened else "",
    )


def _before_head(model: PreTrainedModel, family: Family, shape: Shape, ops: Ops) -> Change:
    """What stands between the last layer and the head."""
    last, between = norm(model, family.final_norm, family.norms, shape.width), family.before_head
    if shape.streams > 1:
        found = _between_streams(model, "model.altup_unembed_projections", ops)
        return Gathered(ops, found, last)
    if between is None:
        return NormBy(ops, last)
    linear = product([linear_weights(model, between.product)], ops)
    behind = NormBy(ops, norm(model, between.norm, family.norms, shape.width))
    return NormedTwice(NormBy(ops, last), linear, between.activation, behind)


def _between_streams(model: PreTrainedModel, path: str, ops: Ops) -> list[Linear]:
    """Products from one stream to others, or back."""
    each = module(model, path).children()
    return [product([linear_weights_of(linear, path)], ops) for linear in each]


def _of_tokens(model: PreTrainedModel, family: Family, ops: Ops, owned: bool) -> OfTokens | None:
    """What layers read of the tokens themselves, if they do."""
    names = family.of_token
    if names is None:
        return None
    weights = linear_weights(model, names.projection)
    found: Any = module(model, names.table)
    weight, own = table(model, names.table), norm(model, names.norm, family.norms, 0)
    made = OfTokens(
        ops,
        weight.detach().to(model.dtype) if isinstance(weight, Tensor) else ops.table(weight),
        len(weight) if isinstance(weight, Tensor) else weight.outputs,
        torch.as_tensor(found.embed_scale).to(model.dtype).item(),
        product([weights], ops),
        weights.inputs**-0.5,
        own,
    )
    if owned and isinstance(weights.weight, Tensor):
        release(weights.weight)
    return made


def _positions(model: PreTrainedModel, family: Family) -> Tensor | None:
    if family.positions is None:
        return None
    found: Any = module(model, family.positions)
    learned = found if isinstance(found, Tensor) else table(model, family.positions)
    assert isinstance(learned, Tensor)
    return learned.detach()[family.first_position :]


def _steps(
    model: PreTrainedModel, family: Family, shape: Shape, ops: Ops, ropes: Sequence[RopeTable]
) -> EagerSteps:
    if ops.kernel == "static":
        return RecordedSteps(shape.width, model.dtype, model.device, ropes)
    reason = why_not_recorded(ops.kernel, model.device, why_eager(family))
    return EagerSteps(model.dtype, model.device, reason, unread=ops.kernel == "native")


def _ropes(
    model: PreTrainedModel, family: Family, shape: Shape, switch: int | None
) -> dict[str | None, RopeTable]:
    """The rotary tables, one of each kind."""
    if family.rotary is None:
        return {}
    path, by_module = family.rotary, "{}" in family.rotary
    kinds = {kind for kind in shape.ropes if kind is not None}
    return {
        kind: RopeTable(
            module(model, path.format(kind)),
            shape.context,
            model.device,
            "" if by_module else kind,
            family.interleaved,
            switch,
        )
        for kind in kinds
    }


def _own_blocks(
    model: PreTrainedModel,
    family: Family,
    shape: Shape,
    ops: Ops,
    ropes: dict[str | None, RopeTable],
    owned: bool,
) -> list[Block]:
    blocks = []
    for index, layer in enumerate(module(model, family.layers).children()):
        block = own_block(layer, index, family, shape, ops, ropes.get(shape.ropes[index]))
        blocks.append(block)
        if owned:
            release_matrices(layer, [each for linear in block.linears for each in linear.modules])
    return blocks


def _ends(
    model: PreTrainedModel, family: Family, shape: Shape, ops: Ops, owned: bool
) -> tuple[Embedding, Linear]:
    """Embedding and head. Weights that both share are kept once."""
    output: Any = model.get_output_embeddings()  # not by name: GPT-NeoX's was another once
    table_weight = table(model, family.embedding)
    weights = linear_weights_of(output, "language-model head")
    head = product([weights], ops.of_head)
    scale = torch.tensor(shape.scales.embedding)  # rounded as transformers does
    tied = _same(table_weight, weights.weight) and not weights.added
    source: Tensor | Linear
    if tied and head.readable:
        source = head
    else:
        source = (
            table_weight.detach().to(model.dtype)
            if isinstance(table_weight, Tensor)
            else ops.table(table_weight)
        )
    if owned:
        for each in (table_weight, weights.weight):
            if isinstance(each, Tensor):
                release(each)
    change: Change | None = None
    if family.embedding_norm is not None:
        of_tokens = norm(model, family.embedding_norm, family.norms, shape.width)
        change = partial(ops.norm, norm=of_tokens)
    if shape.streams > 1:
        change = Spread(_between_streams(model, "model.altup_projections", ops))
    return Embedding(source, scale.to(model.dtype).item(), change), head


def _same(one: Matrix, other: Matrix | None) -> bool:
    """Whether two weights are one piece of memory, or of a file."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.data_ptr() == other.data_ptr()
    return one is other
