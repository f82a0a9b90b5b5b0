"""LayeredModel: a Hugging Face decoder that runs any part of itself. embed . run(x, plan, cache,
place) . head

HF loads, we run: weights, norms and rotary tables are the model's own, the forward is ours. At load
a self-check compares our logits with the model's on a probe prompt and refuses if they disagree.
Does not know tokenizers, sampling or drafting.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import PromptError
from .block import Block, Change, own_block
from .compute.cache import KVCache, TokenLayout
from .compute.cuda.steps import StepRunner
from .compute.cuda.storage import StaticCache, StoragePool
from .compute.hidden_states import StateCollector
from .compute.linear import Linear, kind_of, without_low_rank
from .compute.plan import LayerPlan
from .compute.rope import RopeTable
from .families import Family, checked_switch, family_of, shape_of
from .operations import operations_for, why_not_recorded
from .partial_head import PartialHead
from .passes import HalfObserver, Passes
from .self_check import LENGTH, SelfCheck, probe
from .unlisted import WARNING, module_blocks, module_ops, recognised, refusing
from .weights import Part, module, norm, part_of, product, release, release_matrices, table

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PREFILL_CHUNK = 512
_BY_MODULES = (
    "products are left to modules of kind {0}, which keep their own weights; their speed with "
    "several tokens is up to them, and "
    "a token's last bits may depend on what is computed beside it"
)
_SHORTENED = (
    "this model rotates positions by other frequencies once a text is longer than {0} tokens "
    "(longrope), and all of the text "
    "would have to be read again at that point, which selfspec does not do: texts end at {0} "
    "tokens here, not at {1}. For longer "
    "ones load it with long_context=True"
)


class LayeredModel:
    """A decoder as layers that can be run piece by piece on one cache.

    `owned`: the Hugging Face model may be taken apart, each weight released once it is packed, so
    that there is one copy. Otherwise it is left untouched and lives on beside ours.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        owned: bool = False,
        kernel: str = "auto",
        weights: str = "auto",
        check: bool = True,
        long_context: bool = False,
    ) -> None:
        known = family_of(model.config)
        self._switch = checked_switch(model.config, long_context)
        family = known or recognised(model)
        unsure = nullcontext if known else partial(refusing, model.config)
        with unsure():
            self.shape = shape_of(model.config, family, long_context)
        self.dtype, self.device = model.dtype, model.device
        experts = family.experts is not None
        self.ops = (
            operations_for(kernel, self.dtype, self.device, experts, weights)
            if known
            else module_ops(kernel, model.config, weights)
        )
        self._not_recorded = why_not_recorded(self.ops.kernel, self.device, experts)
        self._open_steps()
        self._say_what_is_special(model)
        self.parameters = sum(p.numel() for p in model.parameters())
        wanted = SelfCheck(model, self._probe(), self._switch or 0) if check else None
        self._ropes: dict[str | None, RopeTable] = {}
        self.blocks: list[Block] = []
        if known:
            self._take_own_layers(model, family, owned)
        else:
            self.blocks = module_blocks(model, family, self.shape)
        self._passes = Passes(self.blocks)
        self._take_ends(model, family, owned)
        self._finish: Change = module(model, family.final_norm)
        if known:
            self._finish = partial(self.ops.norm, norm=norm(model, family.final_norm, family.norms))
        self.product_modules = tuple(
            sorted({kind_of(each) for linear in self.linears for each in linear.modules})
        )
        if self.product_modules:
            warnings.warn(_BY_MODULES.format(", ".join(self.product_modules)), stacklevel=2)
            if self._steps and not self._steps.reason:
                self._steps.give_up(
                    f"products are left to modules of kind {', '.join(self.product_modules)}"
                )
        if wanted is not None:
            with unsure():
                wanted.compare(self._read_probe(LENGTH))
                if not known:  # their modules may read our cache otherwise than we think
                    wanted.compare(self._read_probe(5))
        self.row_stable = self._measure_row_stability()
        self._check_recordings()

    def _open_steps(self) -> None:
        self._steps = (
            StepRunner(self.device, self.shape.width, self.dtype)
            if self.ops.kernel == "static"
            else None
        )
        self._pool = (
            StoragePool(self.dtype, self.device, self._steps.forget) if self._steps else None
        )

    @property
    def recorded(self) -> str:
        """Whether steps are replayed as CUDA graphs, or why not."""
        reason = self._steps.reason if self._steps else self._not_recorded
        if reason or self._steps is None:
            return f"no: {reason}"
        return f"yes, as CUDA graphs ({self._steps.recorded} so far)"

    def eagerly(self) -> AbstractContextManager[None]:
        """For measuring: meanwhile steps run as they are written, without recordings."""
        return self._steps.pausing() if self._steps else nullcontext()

    def wait(self) -> None:
        """Until the device has done what it was given; for whoever takes times."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def free_idle(self) -> None:
        """Give back the memory that only waits for the next generation."""
        if self._pool is not None:
            self._pool.clear()

    def _say_what_is_special(self, model: PreTrainedModel) -> None:
        whole = model.config.max_position_embeddings
        self._longer = ""
        if self.shape.context < whole:
            self._longer = ", or load the model with long_context=True"
            warnings.warn(_SHORTENED.format(self.shape.context, whole), stacklevel=3)
        if self.ops.kernel == "modules":
            warnings.warn(WARNING.format(self.shape.family), stacklevel=3)

    def _take_own_layers(self, model: PreTrainedModel, family: Family, owned: bool) -> None:
        shape = self.shape
        if family.rotary is not None:
            rotary, kinds = (
                module(model, family.rotary),
                {kind for kind in shape.ropes if kind is not None},
            )
            where = (rotary, shape.context, self.device)
            self._ropes = {
                kind: RopeTable(*where, kind, family.interleaved, self._switch) for kind in kinds
            }
        for index, layer in enumerate(module(model, family.layers).children()):
            self.blocks.append(
                own_block(
                    layer, index, family, shape, self.ops, self._ropes.get(shape.ropes[index])
                )
            )
            if owned:
                release_matrices(
                    layer, [each for linear in self.blocks[-1].linears for each in linear.modules]
                )

    def _take_ends(self, model: PreTrainedModel, family: Family, owned: bool) -> None:
        """What comes before the first layer and after the last."""
        embedding, head = table(model, family.embedding), self._head_part(model)
        self._positions = table(model, family.positions).detach() if family.positions else None
        scale = torch.tensor(self.shape.scales.embedding)  # rounded as transformers does
        self._embedding_scale = scale.to(embedding.dtype).item()
        self._partial_heads: dict[tuple[int, frozenset[int]], PartialHead] = {}
        self._head: Linear = product([head], self.ops)
        tied = (
            head.weight is not None
            and not head.added
            and embedding.data_ptr() == head.weight.data_ptr()
        )
        self._embedding = None if tied and self._head.readable else embedding.detach()
        if owned:
            release(embedding)
            if head.weight is not None:
                release(head.weight)

    @staticmethod
    def _head_part(model: PreTrainedModel) -> Part:
        found: Any = model.get_output_embeddings()  # not by name: GPT-NeoX's was another once
        return part_of(found, "language-model head")

    # -------------------------------------------------------------------------------------- running

    @property
    def layers(self) -> int:
        return self.shape.layers

    @cached_property
    def full_plan(self) -> LayerPlan:
        return LayerPlan(0, self.layers)

    def new_cache(self, rows: int = 1, capacity: int = 512) -> KVCache:
        shape = self.shape
        sizes = (shape.layers, rows, shape.kv_heads, shape.head_size)
        if self._steps is None or self._pool is None:
            return KVCache(*sizes, capacity, self.dtype, self.device)
        self._steps.follow()
        return StaticCache(self._pool, *sizes, capacity)

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
        layout: TokenLayout,
        observer: HalfObserver | None = None,
        collectors: Sequence[StateCollector] = (),
    ) -> Tensor:
        """Carry hidden states (tokens, width) through the plan's halves; keys and values go to the
        place's slots.

        A plan that starts at layer 0 takes embeddings. `watch(layer, is_attention, before, after)`
        is shown the residual stream around every half; `taps` keep what leaves their layers.
        """
        plan.check(self.layers)
        for rope in self._ropes.values():
            rope.reserve(int(max(span.first + span.count for span in layout.spans)))
        collected = sorted({layer for collector in collectors for layer in collector.layers})
        out = self._run_step(x, plan, cache, layout, collected) if observer is None else None
        if out is None:
            out = self._run_layers(x, plan, cache, layout.on(self.device), collected, observer)
        states = dict(zip(plan.left(collected), out[1:], strict=True))
        for collector in collectors:
            for layer in states.keys() & set(collector.layers):
                collector.put(layer, layout, states[layer])
        cache.advance(layout, plan.attention_layers)
        return out[0]

    def _run_step(
        self,
        x: Tensor,
        plan: LayerPlan,
        cache: KVCache,
        layout: TokenLayout,
        collected: Sequence[int],
    ) -> tuple[Tensor, ...] | None:
        """The same as a step of a fixed shape; None if there are no such steps here or the call is
        none."""
        if self._steps is None or not isinstance(cache, StaticCache):
            return None
        ropes = self._ropes.values()
        # a table that grows moves; a step that was recorded keeps the one it knows, which is long
        # enough
        for rope in ropes:
            rope.reserve(cache.capacity)
        tables = lambda: [(rope.cosines, rope.sines) for rope in ropes]  # noqa: E731
        return self._steps.run(self._run_layers, x, plan, cache, layout, collected, tables)

    def _run_layers(
        self,
        x: Tensor,
        plan: LayerPlan,
        cache: KVCache,
        layout: TokenLayout,
        collected: Sequence[int] = (),
        observer: HalfObserver | None = None,
    ) -> tuple[Tensor, ...]:
        """The plan's halves, one after the other: what comes out, then what left each tapped
        layer."""
        if plan.start == 0 and self._positions is not None:
            x = x + self._positions[layout.positions]
        return self._passes.run(x, plan, cache, layout, collected, observer)

    @torch.inference_mode()
    def head(self, x: Tensor) -> Tensor:
        """Hidden states after any layer -> logits over the vocabulary, through the model's own last
        norm and head."""
        return self.logits(x, (self._head,))

    @property
    def head_product(self) -> Linear:
        """The head itself, of which drafts take rows."""
        return self._head

    def logits(self, x: Tensor, heads: tuple[Linear, ...]) -> Tensor:
        """The last norm, these products side by side, and what the model does to its logits."""
        # those were put together for one request: not worth a step, nor kept for one
        if self._steps is None or len(heads) > 1:
            return self._score(x, heads)
        return self._steps.head(partial(self._score, heads=heads), heads, x)

    def _score(self, x: Tensor, heads: tuple[Linear, ...]) -> Tensor:
        scales, normed = self.shape.scales, self._finish(x)
        logits = (
            heads[0](normed) if len(heads) == 1 else torch.cat([head(normed) for head in heads], -1)
        )
        if scales.logits != 1:
            logits = logits * scales.logits
        return self.ops.soft_cap(logits, scales.logit_cap) if scales.logit_cap else logits

    @cached_property
    def without_adapters(self) -> LayeredModel:
        """This model without what LoRA adapters add beside its weights: a second view of the same
        weights. Both can be used at the same time, each on caches of its own. The model itself if
        there is nothing to leave out."""
        if all(without_low_rank(linear) is linear for linear in self.linears):
            return self
        other = self.with_blocks([block.with_linears(without_low_rank) for block in self.blocks])
        other._head, other._partial_heads = without_low_rank(self._head), {}
        return other

    def with_blocks(self, blocks: Sequence[Block]) -> LayeredModel:
        """A second view of this model, with these blocks in place of its own."""
        other = copy(self)
        other.blocks = list(blocks)
        other._passes = Passes(other.blocks)
        other._open_steps()  # a recording has the blocks' products in it
        if other._steps and self._steps:
            other._steps.reason = self._steps.reason
        return other

    def partial_head(self, size: int, more: Iterable[int] = ()) -> PartialHead:
        """The head over some tokens, for drafting: the `size` most frequent (vocabularies are
        mostly ordered so) and `more`."""
        key = (size, frozenset(more))
        if key not in self._partial_heads:
            chosen = [*range(size), *sorted(token for token in key[1] if token >= size)]
            self._partial_heads[key] = PartialHead(self, torch.tensor(chosen, device=self.device))
        return self._partial_heads[key]

    def forward(
        self, tokens: Tensor, cache: KVCache, layout: TokenLayout, plan: LayerPlan | None = None
    ) -> Tensor:
        """Tokens -> logits of every one of them."""
        return self.head(self.run(self.embed(tokens), plan or self.full_plan, cache, layout))

    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        cache: KVCache,
        observer: HalfObserver | None = None,
        collectors: Sequence[StateCollector] = (),
    ) -> Tensor:
        """Read what the cache does not hold yet of each row's prompt; logits of each row's last
        token only, (rows, vocab).

        Rows are read together, in chunks of at most PREFILL_CHUNK tokens, so that attention scores
        stay small.
        """
        last: list[Tensor] = [torch.empty(0)] * len(prompts)
        while missing := [len(prompt) - cache.length(row) for row, prompt in enumerate(prompts)]:
            if not any(missing):
                return self.head(torch.cat(last))
            room, counts = PREFILL_CHUNK, []
            for count in missing:
                counts.append(min(count, room))
                room -= counts[-1]
            layout = cache.layout(counts)
            pieces = [prompts[s.row][s.first : s.first + s.count] for s in layout.spans]
            tokens = torch.tensor(
                [token for piece in pieces for token in piece], device=self.device
            )
            x, end = (
                self.run(self.embed(tokens), self.full_plan, cache, layout, observer, collectors),
                0,
            )
            for span in layout.spans:
                end += span.count
                if span.first + span.count == len(prompts[span.row]):
                    last[span.row] = x[end - 1 : end]
        raise AssertionError("unreachable")

    # ------------------------------------------------------------------------------------ measuring

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Every product of one pass, in order."""
        return (*(linear for block in self.blocks for linear in block.linears), self._head)

    @property
    def alone(self) -> list[str]:
        """Which halves our kernels cannot take into the one call of a pass, and why, in words."""
        return self._passes.alone

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that one pass reads."""
        return sum(linear.bytes for linear in self.linears)

    @torch.inference_mode()
    def products(self, rows: int = 1) -> float:
        """Seconds that the matrix products of one pass over `rows` tokens take, and nothing
        else."""
        inputs = {
            size: torch.randn(rows, size).to(self.device, self.dtype)
            for size in {linear.inputs for linear in self.linears}
        }
        start = time.perf_counter()
        for linear in self.linears:
            linear(inputs[linear.inputs])
        return time.perf_counter() - start

    # ------------------------------------------------------------------------------------- checking

    def _probe(self) -> Tensor:
        return probe(self.shape.vocabulary, self.shape.context).to(self.device)

    def _read_probe(self, size: int) -> Tensor:
        """Our logits of the probe, read `size` tokens at a time."""
        tokens = self._probe()
        cache = self.new_cache(1, len(tokens))
        return torch.cat(
            [self.forward(piece, cache, cache.layout([len(piece)])) for piece in tokens.split(size)]
        )

    def _check_recordings(self) -> None:
        """Replayed steps give what the same steps give when they just run; else nothing is recorded
        here."""
        if self._steps is None or self._steps.reason:
            return
        with self.eagerly():
            expected = self._read_probe(1).float()
        gap = (self._read_probe(1).float() - expected).abs().max().item()
        if not gap <= 1e-3 * max(expected.abs().max().item(), 1e-3):  # also a NaN
            self._steps.give_up(f"replayed steps gave logits that differ by {gap:.3g}")

    def _measure_row_stability(self) -> bool:
        """Whether the probe's logits have the same bits read at once, in blocks, and token by
        token."""
        results = [self._read_probe(size) for size in (LENGTH, 7, 1)]
        return all(torch.equal(result, results[0]) for result in results)

    def check_length(self, tokens: int) -> None:
        """Raise unless a prompt of that many tokens leaves room for at least one more."""
        if tokens == 0:
            raise PromptError("the prompt is empty; give at least one token")
        if tokens >= self.shape.context:
            raise PromptError(
                f"the prompt has {tokens} tokens, the model's context is {self.shape.context}, so "
                f"nothing could be added; "
                f"shorten the prompt{self._longer}"
            )
