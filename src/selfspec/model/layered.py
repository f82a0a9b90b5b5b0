"""LayeredModel: a decoder that runs any part of itself. embed . run(x, plan, cache, layout) . head

A value: pieces that never change, and how they are run. `view` makes another value on the same
weights. Where the pieces come from is the business of `from_transformers.py`. Does not know
transformers, tokenizers, sampling or drafting.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..errors import OptionError, PromptError
from .block import Block, Change, NormBy
from .compute.cache import KVCache, TokenLayout
from .compute.call import Call, HalfObserver
from .compute.cpu.packs import Packs
from .compute.gradients import without_gradients
from .compute.hidden_states import StateCollector, hand_out, layers_of
from .compute.linear import Linear, without_low_rank
from .compute.norms import Norm
from .compute.ops import Ops
from .compute.plan import LayerPlan
from .compute.recurrent_cache import LONGEST
from .compute.rope import RopeTable
from .embedding import Embedding, OfTokens, beside
from .family import Shape
from .passes import Passes, WholePass

if TYPE_CHECKING:
    from .recording import EagerSteps

PREFILL_CHUNK = 512
MANY = 64  # tokens of a prompt: from so many on a call for their keys alone pays
T = TypeVar("T")


class Scored(NamedTuple):
    """What the whole model makes of some tokens."""

    states: Tensor
    """What left the last layer, (tokens, width)."""
    logits: Tensor
    best: Sequence[Sequence[int]] | None = None
    """The likeliest tokens at each of them, if they were found on the way."""


@dataclass(frozen=True, eq=False, repr=False)
class LayeredModel:
    """A decoder as layers that can be run piece by piece on one cache."""

    shape: Shape
    dtype: torch.dtype
    device: torch.device
    ops: Ops
    embedding: Embedding
    positions: Tensor | None
    """Learned embeddings of positions, (context, width), for a model that has them."""
    ropes: tuple[RopeTable, ...]
    blocks: tuple[Block, ...]
    final_norm: Change
    head_product: Linear
    """The language-model head, of which drafts take rows."""
    steps: EagerSteps
    """How calls run: as they are written, or recorded and replayed."""
    parameters: int
    """How many numbers the whole model's weights are."""
    row_stable: bool = False
    """Whether a row's bits were seen not to depend on the rows beside it."""
    longer: str = ""
    """What allows longer texts, for a model that was loaded for shorter ones than it knows."""
    packs: Packs | None = None
    """Where its packed weights are kept, if the model is what a folder holds."""
    one_by_one: bool = False  # it reads draft after draft, so that verifying saves nothing
    pass_seconds: Sequence[tuple[int, float]] = ()
    """What passes over so many tokens took at load, if they were measured."""
    of_tokens: OfTokens | None = None
    """What layers read of the tokens themselves, if they do."""
    _made: dict[Hashable, Any] = field(default_factory=dict, init=False)
    _making: threading.RLock = field(default_factory=threading.RLock, init=False)

    @property
    def layers(self) -> int:
        return self.shape.layers

    @cached_property
    def full_plan(self) -> LayerPlan:
        return LayerPlan(0, self.layers)

    @property
    def whole(self) -> bool:
        """Whether it runs only as a whole, by transformers' own forward (floor.py)."""
        return self.ops.kernel == "floor"

    @property
    def chains_only(self) -> bool:
        """Whether it reads no trees, so that drafts become chains."""
        return self.whole or self.shape.chains_only

    @property
    def longest_draft(self) -> int:
        """Tokens behind which it can still return to the first."""
        return LONGEST if self.shape.recurrent else self.shape.context

    def needs_layers(self, what: str) -> None:
        """Raise for what runs some of the layers, if the model runs only as a whole."""
        if self.whole:
            raise OptionError(
                f"{what} runs single layers, and this {self.shape.family} model is run whole by "
                "transformers' own forward; draft with 'auto', 'hybrid', 'ngram', 'recycle', "
                "'jacobi' or 'draft-model'"
            )

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Every product of one pass, in order."""
        first = () if self.of_tokens is None else (self.of_tokens.projection,)
        of_blocks = (linear for block in self.blocks for linear in block.linears)
        return (*first, *of_blocks, self.head_product)

    @property
    def carried(self) -> int:
        """Numbers of a token between layers: its streams, then what layers read of the token."""
        return self._wide + (0 if self.of_tokens is None else self.of_tokens.columns)

    @property
    def _wide(self) -> int:
        """Numbers of a token's state: of all its streams."""
        return self.shape.width * self.shape.streams

    @property
    def alone(self) -> list[str]:
        """Which halves our kernels cannot take into the one call of a pass, and why, in words."""
        return self._passes.alone

    def view(
        self,
        *,
        layers: int | None = None,
        blocks: Sequence[Block] | None = None,
        head: Linear | None = None,
    ) -> LayeredModel:
        """Another model on the same weights: the first `layers` layers alone, these blocks or this
        head in place of its own.

        Both can be used at the same time, each on caches of its own. What is recorded, and what is
        made `once`, belongs to one of them.
        """
        chosen = tuple(self.blocks if blocks is None else blocks)[:layers]
        return replace(
            self,
            shape=self.shape.first_layers(len(chosen)),
            blocks=chosen,
            head_product=self.head_product if head is None else head,
            steps=self.steps.anew(),
            packs=None,
        )

    @cached_property
    def without_adapters(self) -> LayeredModel:
        """The view without LoRA adapters, or the model itself if there are none."""
        if all(without_low_rank(linear) is linear for linear in self.linears):
            return self
        blocks = [block.with_linears(without_low_rank) for block in self.blocks]
        return self.view(blocks=blocks, head=without_low_rank(self.head_product))

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` gives, made once for this key and kept as long as the model."""
        with self._making:
            if key not in self._made:
                self._made[key] = make()
            made: T = self._made[key]
            return made

    def new_cache(self, rows: int = 1, capacity: int = 512) -> KVCache:
        return self.steps.new_cache(self.shape, rows, capacity)

    def embed(self, tokens: Tensor) -> Tensor:
        """(tokens,) -> (tokens, carried)."""
        x = self.embedding(tokens)
        return x if self.of_tokens is None else beside(x, self.of_tokens(tokens, self.states(x)))

    @without_gradients
    def run(
        self,
        x: Tensor,
        plan: LayerPlan,
        cache: KVCache,
        layout: TokenLayout,
        observer: HalfObserver | None = None,
        collectors: Sequence[StateCollector] = (),
    ) -> Tensor:
        """Carry hidden states (tokens, carried) through the plan's halves. Keys and values go to
        the layout's slots.

        A plan that starts at layer 0 takes embeddings. `observer` is shown the residual stream
        around every half. `collectors` keep what leaves their layers.
        """
        self._check(plan, cache, layout)
        self._reserve_angles(layout)
        x, of_tokens = self.streams(x), None if self.of_tokens is None else x[:, self._wide :]
        call = Call(plan, cache, layout, plan.left(layers_of(collectors)), observer, of_tokens)
        out = self.steps.run(self._run_layers, x, call)
        hand_out(collectors, layout, call.collected, map(self.states, out[1:]))
        cache.advance(layout, plan.attention_layers)
        return beside(out[0], of_tokens)

    def _check(self, plan: LayerPlan, cache: KVCache, layout: TokenLayout) -> None:
        """Raise unless the plan fits the model, and who lends keys to a layer has made them."""
        self.shape.check_plan(plan)
        for lender, others in self.shape.borrowers.items():
            if plan.start <= lender or not {*others} & {*plan.attention_layers}:
                continue
            for span in layout.spans:
                assert cache.lengths[span.row, lender] >= span.first + span.count, (
                    f"row {span.row}: layer {lender} has not made the keys that others read"
                )

    def _run_layers(self, x: Tensor, call: Call) -> tuple[Tensor, ...]:
        if call.plan.start == 0 and self.positions is not None:
            x = x + self.positions[call.layout.positions]
        return self._passes.run(x, call)

    @cached_property
    def _passes(self) -> Passes:
        return Passes(self.blocks)

    @without_gradients
    def scored(
        self,
        tokens: Sequence[int],
        cache: KVCache,
        layout: TokenLayout,
        ranks: int = 0,
        collectors: Sequence[StateCollector] = (),
    ) -> Scored:
        """All of the model: embed, run, head. In one call where our kernels can, which finds the
        `ranks` likeliest tokens of each as well."""
        if self.at_once is None:
            x = self.embed(torch.tensor(tokens, device=self.device))
            x = self.run(x, self.full_plan, cache, layout, collectors=collectors)
            return Scored(self.states(x), self.head(x))
        self._reserve_angles(layout)
        own = None
        if self.of_tokens is not None:
            ids = torch.tensor(tokens, device=self.device)
            own = self.of_tokens(ids, self.embedding(ids))
        wanted = layers_of(collectors)
        states, logits, best, behind = self.at_once(
            tokens, self.full_plan, cache, layout, ranks, own, wanted
        )
        if wanted:
            hand_out(collectors, layout, wanted, map(self.states, behind))
        cache.advance(layout, self.full_plan.attention_layers)
        return Scored(states, logits, best if ranks else None)

    @cached_property
    def at_once(self) -> WholePass | None:
        """The model in one call; None where more stands at its ends than our kernels know."""
        if (whole := self.steps.at_once(self.head_product)) is not None:
            return whole
        return self.ends and self._passes.at_once(*self.ends, self.head_product)

    @cached_property
    def ends(self) -> tuple[Tensor | Linear, Norm, tuple[float, float, float]] | None:
        """The embedding's rows, the last norm, and scales of the embedding and of logits with their
        cap; None where more stands there than our kernels know."""
        scales, embedding, norm = self.shape.scales, self.embedding, self.final_norm
        if self.ops.kernel != "native" or not isinstance(norm, NormBy):
            return None
        if embedding.norm is not None or self.positions is not None:
            return None
        return embedding.source, norm.norm, (embedding.scale, scales.logits, scales.logit_cap)

    def _reserve_angles(self, layout: TokenLayout) -> None:
        if self.ropes:
            end = max([span.first + span.count for span in layout.spans])
            for rope in self.ropes:
                rope.reserve(end)

    def streams(self, x: Tensor) -> Tensor:
        """What `embed` or `run` gave, without what goes along."""
        return x if self.of_tokens is None else x[:, : self._wide].contiguous()

    def states(self, x: Tensor) -> Tensor:
        """The first stream alone, which is the only one of most models: (tokens, width)."""
        width = self.shape.width
        return x if x.shape[1] == width else x[:, :width].contiguous()

    @without_gradients
    def head(self, x: Tensor) -> Tensor:
        """Hidden states after any layer -> logits, through the model's own last norm and head."""
        return self.logits(x, (self.head_product,))

    def logits(self, x: Tensor, heads: tuple[Linear, ...]) -> Tensor:
        """The last norm, these products side by side, and what the model does to its logits."""
        return self.steps.head(self._score, heads, x)

    def _score(self, x: Tensor, heads: tuple[Linear, ...]) -> Tensor:
        scales, normed = self.shape.scales, self.final_norm(self.streams(x))
        products = [head(normed) for head in heads]
        logits = products[0] if len(products) == 1 else torch.cat(products, -1)
        if scales.logits != 1:
            logits = logits * scales.logits
        return self.ops.soft_cap(logits, scales.logit_cap) if scales.logit_cap else logits

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
        """Read what the cache does not hold yet of each row's prompt. Logits of each row's last
        token only, (rows, vocab).

        Rows are read together, in chunks of at most PREFILL_CHUNK tokens, so that attention scores
        stay small.
        """
        last: list[Tensor] = [torch.empty(0)] * len(prompts)
        while counts := _next_chunk(prompts, cache):
            layout = cache.layout(counts)
            pieces = [prompts[s.row][s.first : s.first + s.count] for s in layout.spans]
            tokens = [token for piece in pieces for token in piece]
            x = self.embed(torch.tensor(tokens, device=self.device))
            ends = {
                span.row: piece.stop - 1
                for span, piece in layout.pieces
                if span.first + span.count == len(prompts[span.row])
            }
            x = self.read(x, cache, layout, [*ends.values()], observer, collectors)
            for row, state in zip(ends, x.split(1), strict=False):
                last[row] = state
        return self.head(torch.cat(last))

    @without_gradients
    def read(
        self,
        x: Tensor,
        cache: KVCache,
        layout: TokenLayout,
        ends: list[int],
        observer: HalfObserver | None = None,
        collectors: Sequence[StateCollector] = (),
    ) -> Tensor:
        """Run the whole model where only these tokens, each the last of its row, are asked for what
        comes out. The others stop behind the last keys that layers make of them, unless somebody
        looks on."""
        own = self.layers - len(self.shape.keyless) if self.shape.lenders else self.layers
        many = len(x) - len(ends) >= MANY and self.row_stable
        filed = own - 1 if many and own > 1 and self.blocks[own - 1].files_keys else own
        if filed == self.layers or observer is not None or collectors:
            return self.run(x, self.full_plan, cache, layout, observer, collectors)[ends]
        x = self.run(x, LayerPlan(0, filed), cache, layout)
        if filed < own:
            self.blocks[filed].file_keys(self.streams(x), cache, layout)
        for span in layout.spans:
            cache.pass_over(span.row, span.first + span.count, range(filed, self.layers))
        x, rest = x[ends], LayerPlan(filed, self.layers)
        return self.run(x, rest, cache, layout.select(ends)) if ends else x

    def check_length(self, tokens: int) -> None:
        """Raise unless a prompt of that many tokens leaves room for at least one more."""
        if tokens == 0:
            raise PromptError("the prompt is empty; give at least one token")
        if tokens >= self.shape.context:
            raise PromptError(
                f"the prompt has {tokens} tokens, the model's context is {self.shape.context}, so "
                f"nothing could be added; shorten the prompt{self.longer}"
            )

    def wait(self) -> None:
        """Until the device has done what it was given; for whoever takes times."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def free_idle(self) -> None:
        """Give back the memory that only waits for the next generation."""
        self.steps.free_idle()


def _next_chunk(prompts: Sequence[Sequence[int]], cache: KVCache) -> list[int]:
    """How many tokens of each row to read next. Empty if nothing is left to read."""
    room, counts = PREFILL_CHUNK, []
    for row, prompt in enumerate(prompts):
        counts.append(min(len(prompt) - cache.length(row), room))
        room -= counts[-1]
    return counts if any(counts) else []
