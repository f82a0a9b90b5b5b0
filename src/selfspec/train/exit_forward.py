"""The forward of training: transformers' own decoder, layer dropout, and the early-exit loss.

`forward` of the model object is replaced while training, so that DDP, FSDP, PEFT and mixed
precision, which all work around a model's forward, see the loss as they see any model's. States are
picked up behind each layer, and put through the model's own last norm and head. Knows no trainer:
it is told the step, the micro-batch and what to divide by.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from ..errors import OptionError, SelfCheckFailed
from ..model.shaping import shape_of
from ..model.weights import module
from .balance import Balance
from .candidates import Candidates, candidates
from .data import IGNORED
from .exit_loss import LIVE_LOGITS, Exit, Finish, exit_loss
from .layer_dropout import LayerDropout, counted_generator, draw_keep, one_tensor
from .recipe import Recipe
from .supported import trainable_family


@dataclass(frozen=True)
class Moment:
    """Where the run is."""

    step: int
    steps: int
    micro: int = 0  # micro-batch of the step
    tokens: Tensor | float | None = None  # trained in the whole step; None: those of this batch


class ExitForward:
    """The recipe on one causal language model of transformers (not on a PEFT model around it)."""

    def __init__(
        self, model: PreTrainedModel, recipe: Recipe, seed: int = 0, live: int = LIVE_LOGITS
    ) -> None:
        family = trainable_family(model.config)
        self.model, self.recipe, self.seed, self.live = model, recipe, seed, live
        self.layers: list[nn.Module] = list(module(model, family.layers).children())
        shape = shape_of(model.config, family)
        self.depth = shape.layers
        self._finish = Finish(shape.scales.logits, shape.scales.logit_cap)
        recipe.check(self.depth)
        self._decoder = module(model, family.layers.rpartition(".")[0])
        self._norm = module(model, family.final_norm)
        self._head = _plain_head(module(model, family.head))
        self.dropout = LayerDropout(self.layers)
        self.balance = Balance(self.layers, family, model.config)
        self.moment = Moment(0, 1)
        # of the last forward: each exit's mean cross entropy, detached
        self.sums: dict[int, Tensor] = {}
        self._wanted: frozenset[int] = frozenset()
        self._states: dict[int, Tensor] = {}

    @contextmanager
    def installed(self) -> Iterator[None]:
        """The model's forward is ours within this block, and its own after it."""
        before = vars(self.model).get("forward")

        def catch(index: int, layer: nn.Module, given: Any, output: Any) -> None:
            if index in self._wanted:
                self._states[index] = one_tensor(output)

        hooks = [
            layer.register_forward_hook(partial(catch, index))
            for index, layer in enumerate(self.layers)
        ]

        def forward(_: Any, input_ids: Tensor, labels: Tensor, **given: Any) -> CausalLMOutput:
            return CausalLMOutput(loss=self.loss(input_ids, labels, given.get("attention_mask")))

        try:
            with self.dropout.installed(), self.balance.installed():
                self.model.forward = MethodType(forward, self.model)
                yield
        finally:
            for hook in hooks:
                hook.remove()
            # accelerate keeps what it wraps under the second name
            for name in ("forward", "_original_forward"):
                vars(self.model).pop(name, None)
            if before is not None:
                self.model.forward = before

    def loss(
        self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None
    ) -> Tensor:
        """J of this batch at this moment. Out of training, the last layer's loss alone."""
        training, now = self.model.training, self.moment
        weights = {self.depth - 1: 1.0}
        if training:
            weights = self.recipe.exit_weights(self.depth, now.step, now.steps)
        input_ids, labels, attention_mask = _without_tail(input_ids, labels, attention_mask)
        drop = training and self.recipe.dropout
        self.dropout.set(self.draw(len(input_ids)) if drop else None, input_ids.device)
        states = self._run(input_ids, attention_mask, frozenset(weights))
        following = labels[:, 1:].reshape(-1)
        trained = (following != IGNORED).nonzero()[:, 0]
        among = self._among(input_ids) if training and len(weights) > 1 else None
        exits, scales = [], []
        for layer, weight in weights.items():
            early = layer != self.depth - 1
            at = self._some(trained) if early and training else trained
            picked = states[layer][:, :-1].reshape(len(following), -1)[at]
            if early:  # the decoder has put the last layer's states through the norm
                picked = self._norm(picked)
            scales.append(len(trained) / max(1, len(at)))  # a share stands for all positions
            scale = self._scale(weight * scales[-1], len(trained), picked)
            exits.append(Exit(picked, following[at], scale, among if early else None))
        total, sums = exit_loss(exits, self._head.weight, self._head.bias, self.live, self._finish)
        if training and self.balance.weight:
            total = total + self._balance(input_ids, attention_mask, len(trained))
        count = max(1, len(trained))
        self.sums = {layer: sums[i] * scales[i] / count for i, layer in enumerate(weights)}
        return total

    def _balance(self, ids: Tensor, mask: Tensor | None, trained: int) -> Tensor:
        """The loss that keeps experts busy: this batch's share of the step's."""
        flat = mask if mask is not None and mask.dim() == 2 else torch.ones_like(ids)
        found = self.balance.loss(flat, self.dropout.kept)
        return found * self._scale(self.balance.weight * trained, trained, found)

    def draw(self, rows: int) -> Tensor:
        """Which of these samples pass through which layer at this moment."""
        now = self.moment
        rates = self.recipe.dropout_rates(self.depth, now.step, now.steps)
        return draw_keep(rates, rows, seed=self.seed, step=now.step, micro=now.micro)

    def _run(
        self, input_ids: Tensor, attention_mask: Tensor | None, wanted: frozenset[int]
    ) -> dict[int, Tensor]:
        self._wanted, self._states = wanted, {}
        try:
            with self.balance.looking():
                last = self._decoder(
                    input_ids=input_ids, attention_mask=attention_mask, use_cache=False
                ).last_hidden_state
        finally:
            self._wanted = frozenset()
        states, self._states = {**self._states, self.depth - 1: last}, {}
        hidden = torch.is_grad_enabled() and not all(states[at].requires_grad for at in wanted)
        if hidden and self.model.is_gradient_checkpointing:
            raise OptionError(
                "reentrant gradient checkpointing hides the layers' states from the early-exit "
                "loss; set gradient_checkpointing_kwargs={'use_reentrant': False}"
            )
        return states

    def _some(self, trained: Tensor) -> Tensor:
        """The positions at which early exits are trained now."""
        if self.recipe.share == 1:
            return trained
        count = math.ceil(self.recipe.share * len(trained))
        generator = self._generator("positions")
        chosen = torch.randperm(len(trained), generator=generator)[:count].sort().values
        return trained[chosen.to(trained.device)]

    def _among(self, input_ids: Tensor) -> Candidates | None:
        """The tokens that early exits choose among now: those of the batch, and some others."""
        others = self.recipe.exit_others
        generator, size = self._generator("others"), self._head.weight.shape[0]
        return candidates(input_ids.unique(), size, others, generator) if others else None

    def _generator(self, use: str) -> torch.Generator:
        return counted_generator(use, self.seed, self.moment.step, self.moment.micro)

    def _scale(self, weight: float, trained: int, like: Tensor) -> Tensor:
        kind = torch.float64 if like.dtype == torch.float64 else torch.float32
        tokens = max(1, trained) if self.moment.tokens is None else self.moment.tokens
        return weight / torch.as_tensor(tokens, dtype=kind, device=like.device)

    @torch.no_grad()
    def check(self, probe: Tensor) -> None:
        """Raise unless norm, head, scale and cap as used here give the model's own logits."""
        modules = [part for part in self.model.modules() if part.training]
        self.model.eval()
        try:
            expected = self.model(input_ids=probe[None], use_cache=False).logits[0].float()
            last = self._decoder(input_ids=probe[None], use_cache=False).last_hidden_state[0]
        finally:
            for part in modules:
                part.training = True
        gap = (self._finish(self._head(last).float()) - expected).abs().max().item()
        if not gap <= 2e-2 * max(expected.abs().max().item(), 1e-3):  # also refuses NaN
            raise SelfCheckFailed(
                "the head as the early-exit loss would use it differs from this "
                f"{self.model.config.model_type} model's own logits by {gap:.3g}; this family "
                "cannot be trained yet"
            )


def _without_tail(
    ids: Tensor, labels: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Without the columns behind the last one that is trained in any row. They have no effect on
    what precedes them."""
    trained = (labels[:, 1:] != IGNORED).any(0).nonzero()
    end = int(trained[-1]) + 2 if len(trained) else labels.shape[1]
    cut = mask[:, :end] if mask is not None and mask.dim() == 2 else mask
    return ids[:, :end], labels[:, :end], cut


def _plain_head(head: nn.Module) -> nn.Linear:
    if not isinstance(head, nn.Linear):
        raise OptionError(
            f"the head is a {type(head).__name__}, and exits need a plain linear; leave it out of "
            "LoRA and of quantisation"
        )
    return head
