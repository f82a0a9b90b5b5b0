"""LayeredModel: a Hugging Face decoder that runs any part of itself. embed . run(x, plan, cache, place) . head

HF loads, we run: weights, norms and rotary tables are the model's own, the forward is ours. At load a self-check compares
our logits with the model's on a probe prompt and refuses if they disagree. Does not know tokenizers, sampling or drafting.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import OptionError, PromptError, SelfCheckFailed
from .block import Block, Change, own_block
from .cache import KVCache, Place
from .families import FAMILIES, Family, family_of, shape_of
from .linear import Linear
from .ops import choose_ops
from .parts import module, norm, part
from .plan import LayerPlan
from .rope import RopeTable
from .taps import Taps
from .unlisted import WARNING, module_blocks, module_ops, recognised, refusing

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PREFILL_CHUNK = 512
TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 6e-2, torch.float16: 2e-2}  # of the largest logit of the probe

_SHORTENED = (
    "this model rotates positions by other frequencies once a text is longer than {0} tokens (longrope), and all of the text "
    "would have to be read again at that point, which selfspec does not do: texts end at {0} tokens here, not at {1}"
)

HalfWatch = Callable[[int, bool, Tensor, Tensor], None]


class LayeredModel:
    """A decoder as layers that can be run piece by piece on one cache.

    `owned`: the Hugging Face model may be taken apart, each weight released once it is packed, so that there is one copy.
    Otherwise it is left untouched and lives on beside ours.
    """

    def __init__(self, model: PreTrainedModel, *, owned: bool = False, kernel: str = "auto", check: bool = True) -> None:
        known = family_of(model.config)
        family = known or recognised(model)
        unsure = nullcontext if known else partial(refusing, model.config)
        with unsure():
            self.shape = shape_of(model.config, family)
        self.dtype, self.device = model.dtype, model.device
        self.ops = choose_ops(kernel, self.dtype, self.device) if known else module_ops(kernel, model.config)
        self._say_what_is_special(model)
        self.parameters = sum(p.numel() for p in model.parameters())
        probe = self._probe()
        expected = self._reference(model, probe) if check else None
        self._ropes: dict[str | None, RopeTable] = {}
        self.blocks: list[Block] = []
        if known:
            self._take_own_layers(model, family, owned)
        else:
            self.blocks = module_blocks(model, family, self.shape)
        self._take_ends(model, family, owned)
        self._finish: Change = module(model, family.final_norm)
        if known:
            self._finish = partial(self.ops.norm, norm=norm(model, family.final_norm, family.norms))
        if expected is not None:
            with unsure():
                self._compare(expected, probe)
                if not known:  # their modules may read our cache otherwise than we think
                    self._compare(expected, probe, size=5)
        self.row_stable = self._measure_row_stability()

    def _say_what_is_special(self, model: PreTrainedModel) -> None:
        whole = model.config.max_position_embeddings
        if self.shape.context < whole:
            warnings.warn(_SHORTENED.format(self.shape.context, whole), stacklevel=3)
        if self.ops.kernel == "modules":
            warnings.warn(WARNING.format(self.shape.family), stacklevel=3)

    def _take_own_layers(self, model: PreTrainedModel, family: Family, owned: bool) -> None:
        shape = self.shape
        if family.rotary is not None:
            rotary, kinds = module(model, family.rotary), {kind for kind in shape.ropes if kind is not None}
            self._ropes = {kind: RopeTable(rotary, shape.context, self.device, kind, family.interleaved) for kind in kinds}
        for index, layer in enumerate(module(model, family.layers).children()):
            self.blocks.append(own_block(layer, index, family, shape, self.ops, self._ropes.get(shape.ropes[index])))
            if owned:
                _release_matrices(layer)

    def _take_ends(self, model: PreTrainedModel, family: Family, owned: bool) -> None:
        """What comes before the first layer and after the last."""
        embedding, head = part(model, family.embedding), part(model, family.head)
        self._positions = part(model, family.positions).weight.detach() if family.positions else None
        scale = torch.tensor(self.shape.scales.embedding)  # rounded as transformers does
        self._embedding_scale = scale.to(embedding.weight.dtype).item()
        self._partial_heads: dict[int, PartialHead] = {}
        self._head: Linear = self.ops.linear([head.weight], [head.bias])
        tied = embedding.weight.data_ptr() == head.weight.data_ptr()
        self._embedding = None if tied and self._head.readable else embedding.weight.detach()
        if owned:
            _release(embedding.weight)
            _release(head.weight)

    # ------------------------------------------------------------------------------------------------------- running

    @property
    def layers(self) -> int:
        return self.shape.layers

    @cached_property
    def full_plan(self) -> LayerPlan:
        return LayerPlan(0, self.layers)

    def new_cache(self, rows: int = 1, capacity: int = 512) -> KVCache:
        shape = self.shape
        return KVCache(shape.layers, rows, shape.kv_heads, shape.head_size, capacity, self.dtype, self.device)

    def embed(self, tokens: Tensor) -> Tensor:
        """(tokens,) -> (tokens, width)."""
        x = self._head.rows(tokens) if self._embedding is None else self._embedding[tokens]
        return x if self._embedding_scale == 1 else x * self._embedding_scale

    @torch.inference_mode()
    def run(
        self,
        x: Tensor,
        plan: LayerPlan,
        cache: KVCache,
        place: Place,
        watch: HalfWatch | None = None,
        taps: Sequence[Taps] = (),
    ) -> Tensor:
        """Carry hidden states (tokens, width) through the plan's halves; keys and values go to the place's slots.

        A plan that starts at layer 0 takes embeddings. `watch(layer, is_attention, before, after)` is shown the residual stream
        around every half; `taps` keep what leaves their layers.
        """
        plan.check(self.layers)
        for rope in self._ropes.values():
            rope.reserve(int(max(span.first + span.count for span in place.spans)))
        if plan.start == 0 and self._positions is not None:
            x = x + self._positions[place.positions]
        current, entered = plan.start, x
        for layer, attention in plan.halves:
            if layer != current:
                current, entered = layer, x
            block, before = self.blocks[layer], x
            x = block.attention(x, cache, place) if attention else block.mlp(x, entered)
            if watch:
                watch(layer, attention, before, x)
            for tap in taps:
                if not attention and layer in tap.layers:
                    tap.put(layer, place, x)
        cache.advance(place, plan.attention_layers)
        return x

    @torch.inference_mode()
    def head(self, x: Tensor) -> Tensor:
        """Hidden states after any layer -> logits over the vocabulary, through the model's own last norm and head."""
        return self._logits(x, self._head)

    def _logits(self, x: Tensor, head: Linear) -> Tensor:
        scales, logits = self.shape.scales, head(self._finish(x))
        if scales.logits != 1:
            logits = logits * scales.logits
        return self.ops.soft_cap(logits, scales.logit_cap) if scales.logit_cap else logits

    def partial_head(self, size: int) -> PartialHead:
        """The head over the `size` most frequent tokens, for drafting: byte-pair vocabularies are ordered by frequency."""
        if size not in self._partial_heads:
            self._partial_heads[size] = PartialHead(self, torch.arange(size, device=self.device))
        return self._partial_heads[size]

    def forward(self, tokens: Tensor, cache: KVCache, place: Place, plan: LayerPlan | None = None) -> Tensor:
        """Tokens -> logits of every one of them."""
        return self.head(self.run(self.embed(tokens), plan or self.full_plan, cache, place))

    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        cache: KVCache,
        watch: HalfWatch | None = None,
        taps: Sequence[Taps] = (),
    ) -> Tensor:
        """Read what the cache does not hold yet of each row's prompt; logits of each row's last token only, (rows, vocab).

        Rows are read together, in chunks of at most PREFILL_CHUNK tokens, so that attention scores stay small.
        """
        last: list[Tensor] = [torch.empty(0)] * len(prompts)
        while missing := [len(prompt) - cache.length(row) for row, prompt in enumerate(prompts)]:
            if not any(missing):
                return self.head(torch.cat(last))
            room, counts = PREFILL_CHUNK, []
            for count in missing:
                counts.append(min(count, room))
                room -= counts[-1]
            place = cache.place(counts)
            pieces = [prompts[s.row][s.first : s.first + s.count] for s in place.spans]
            tokens = torch.tensor([token for piece in pieces for token in piece], device=self.device)
            x, end = self.run(self.embed(tokens), self.full_plan, cache, place, watch, taps), 0
            for span in place.spans:
                end += span.count
                if span.first + span.count == len(prompts[span.row]):
                    last[span.row] = x[end - 1 : end]
        raise AssertionError("unreachable")

    # ------------------------------------------------------------------------------------------------------ measuring

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Every product of one pass, in order."""
        return (*(linear for block in self.blocks for linear in block.linears), self._head)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that one pass reads."""
        return sum(linear.bytes for linear in self.linears)

    @torch.inference_mode()
    def products(self, rows: int = 1) -> float:
        """Seconds that the matrix products of one pass over `rows` tokens take, and nothing else."""
        inputs = {
            size: torch.randn(rows, size).to(self.device, self.dtype) for size in {linear.inputs for linear in self.linears}
        }
        start = time.perf_counter()
        for linear in self.linears:
            linear(inputs[linear.inputs])
        return time.perf_counter() - start

    # ------------------------------------------------------------------------------------------------------- checking

    def _probe(self) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(0, self.shape.vocabulary, (min(24, self.shape.context),), generator=generator).to(self.device)

    @staticmethod
    @torch.inference_mode()
    def _reference(model: PreTrainedModel, probe: Tensor) -> Tensor:
        """The model's own logits, without dropout; a live model that is being trained stays as it was."""
        training = [module for module in model.modules() if module.training]
        model.eval()
        try:
            logits: Tensor = model(input_ids=probe[None], use_cache=False).logits[0].float()
            return logits
        finally:
            for module in training:
                module.training = True

    def _compare(self, expected: Tensor, probe: Tensor, size: int | None = None) -> None:
        """Raise unless our logits of the probe, read `size` tokens at a time, are the expected ones."""
        cache = self.new_cache(1, len(probe))
        pieces = [self.forward(piece, cache, cache.place([len(piece)])) for piece in probe.split(size or len(probe))]
        ours = torch.cat(pieces).float()
        gap, scale = (ours - expected).abs().max().item(), expected.abs().max().item()
        if not gap <= TOLERANCE.get(self.dtype, 6e-2) * max(scale, 1e-3):  # also refuses NaN
            raise SelfCheckFailed(
                f"this {self.shape.family} model gives logits that differ from transformers' by {gap:.3g} "
                f"(largest logit {scale:.3g}) on a probe prompt, so its output would not be the model's own. "
                "It has a peculiarity that selfspec does not know; "
                f"please report it. Known families: {', '.join(sorted(FAMILIES))}."
            )

    def _measure_row_stability(self) -> bool:
        """Whether the probe's logits have the same bits read at once, in blocks, and token by token."""
        probe = self._probe()
        results = []
        for size in (len(probe), 7, 1):
            cache = self.new_cache(1, len(probe))
            results.append(torch.cat([self.forward(piece, cache, cache.place([len(piece)])) for piece in probe.split(size)]))
        return all(torch.equal(result, results[0]) for result in results)

    def check_length(self, tokens: int) -> None:
        """Raise unless a prompt of that many tokens leaves room for at least one more."""
        if tokens == 0:
            raise PromptError("the prompt is empty; give at least one token")
        if tokens >= self.shape.context:
            raise PromptError(
                f"the prompt has {tokens} tokens, the model's context is {self.shape.context}, so nothing could be added; "
                "shorten the prompt"
            )


class PartialHead:
    """Some rows of the head as a product of their own: logits of these tokens, which is enough to draft.

    Its argmax is an index into `tokens`.
    """

    def __init__(self, model: LayeredModel, tokens: Tensor) -> None:
        if not model._head.readable:
            raise OptionError(
                f"kernel {model.ops.kernel!r} cannot cut rows out of the head; "
                "draft with the full vocabulary, or use kernel='plain'"
            )
        self._model, self.tokens = model, tokens
        bias = model._head.bias
        self._linear = model.ops.linear([model._head.rows(tokens)], [None if bias is None else bias[tokens]])

    @torch.inference_mode()
    def __call__(self, x: Tensor) -> Tensor:
        """Hidden states -> logits of the chosen tokens, in their order."""
        return self._model._logits(x, self._linear)


def _release(weight: Tensor) -> None:
    """Let go of a parameter's memory; tensors that still share it keep it alive."""
    weight.data = torch.empty(0, dtype=weight.dtype)


def _release_matrices(layer: torch.nn.Module) -> None:
    """Of a layer's parameters, all that were packed; norms and biases were copied."""
    for parameter in layer.parameters():
        if parameter.dim() > 1:
            _release(parameter)
