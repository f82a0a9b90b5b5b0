"""LayerSkipTrainer: transformers' Trainer with the recipe inside.

Accelerate, DDP, FSDP, mixed precision, gradient accumulation, schedules, logging and resuming are
the Trainer's. The recipe adds no state of its own: the curriculum and the dropout are functions of
the global step, which a checkpoint holds. It does not know data files or where models come from.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import Trainer, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME, TRAINING_ARGS_NAME

from ..errors import OptionError, ResourceError, TrainingError
from . import checkpoints
from .exit_forward import ExitForward, Moment
from .lora import base_of
from .recipe import Recipe


class LayerSkipTrainer(Trainer):
    """A Trainer for causal language models, or PEFT models around one, on `input_ids` and `labels`.

    `identity` says in JSON what run this is. A checkpoint of another one is refused. The recipe and
    the number of steps are part of it anyway. Losses by exit appear in the logs as `exit_N`, N
    being the number of layers before the exit.
    """

    def __init__(
        self,
        model: Any,
        args: TrainingArguments,
        recipe: Recipe,
        identity: Mapping[str, Any] | None = None,
        **given: Any,
    ) -> None:
        self.recipe = recipe
        self.recipe_forward = ExitForward(base_of(model), recipe, args.seed)
        if args.n_gpu > 1:
            raise OptionError(
                f"{args.n_gpu} GPUs in one process, where the recipe needs one process for each. "
                f"Start with torchrun --nproc_per_node {args.n_gpu}, or show it one GPU "
                "(CUDA_VISIBLE_DEVICES=0)"
            )
        args.remove_unused_columns = False  # it would look for the columns in our forward
        args.logging_nan_inf_filter = False  # a loss that is not a number ends the run instead
        if recipe.dropout:  # a layer that all samples of a batch skip has no gradients
            args.ddp_find_unused_parameters = True
        super().__init__(model=model, args=args, **given)
        self.model_accepts_loss_kwargs = True  # counts the trained tokens of the whole step for us,
        self.loss_is_scaled_for_ga = True  # and our loss is divided by them
        recipe_fields = {f"recipe.{name}": value for name, value in asdict(recipe).items()}
        self.identity = {**(identity or {}), **recipe_fields, "ranks": args.world_size}
        self._installed = False
        self._micro = (-1, 0)  # step, and how many micro-batches of it are done
        self._by_exit: dict[int, list[Tensor]] = {}
        network = self.recipe_forward.model
        probe = torch.arange(min(8, network.config.vocab_size), device=network.device)
        self.recipe_forward.check(probe)

    @property
    def folder(self) -> Path:
        """Where checkpoints go."""
        assert self.args.output_dir is not None
        return Path(self.args.output_dir)

    # ------------------------------------------------------------------------------------- the step

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """The recipe's loss: the mean over the tokens of the step's micro-batches and ranks."""
        step = self.state.global_step
        micro = self._micro[1] if self._micro[0] == step else 0
        tokens = None
        if model.training and num_items_in_batch is not None:
            ranks = self.accelerator.num_processes if self.args.average_tokens_across_devices else 1
            tokens = num_items_in_batch / ranks  # the count is of all ranks, and DDP averages
        if model.training:
            self._micro = (step, micro + 1)
        self.recipe_forward.moment = Moment(step, max(1, self.state.max_steps), micro, tokens)
        with self._ours():
            outputs = model(**inputs)
        if model.training:
            for layer, value in self.recipe_forward.sums.items():
                self._by_exit.setdefault(layer, []).append(value)
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]

    @contextmanager
    def _ours(self) -> Iterator[None]:
        """The recipe's forward. `train` puts it in place for the run, `evaluate` for a batch."""
        if self._installed:
            yield
            return
        self._installed = True
        try:
            with self.recipe_forward.installed():
                yield
        finally:
            self._installed = False

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        loss = super().training_step(model, inputs, num_items_in_batch)
        if not torch.isfinite(loss):
            self._stop("loss", loss)
        return loss

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        norm: Any = Trainer._get_grad_norm(self, model, grad_norm)
        # a scaler skips such steps by itself
        if self.accelerator.scaler is None and not math.isfinite(float(norm)):
            self._stop("gradient", norm)
        return norm

    def _stop(self, what: str, value: Any) -> None:
        """Stop before the optimizer takes the step, with the weights of the step before."""
        last = checkpoints.latest(self.folder)
        kept = f"the last good checkpoint is {last}" if last else "there is no checkpoint yet"
        raise TrainingError(
            f"the {what} is {float(value)} at step {self.state.global_step + 1}, so training "
            f"stopped before taking it; {kept}. Lower the learning rate (now "
            f"{self._get_learning_rate():.3g}), or look for broken data"
        )

    # -------------------------------------------------------------------------------------- the run

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *more: Any, **given: Any
    ) -> Any:
        """Train. With True from the newest complete checkpoint in the output folder, if any."""
        if resume_from_checkpoint is True:
            start = checkpoints.latest(self.folder)
        else:
            start = Path(resume_from_checkpoint) if resume_from_checkpoint else None
        if start is not None:
            checkpoints.require_same(start, self._whole_identity())
            done = TrainerState.load_from_json(str(start / TRAINER_STATE_NAME))
            if done.global_step >= self.args.max_steps > 0:  # it would take a step before it looks
                self._load_from_checkpoint(str(start))
                self.state = done
                return None
        with self._ours():
            return super().train(str(start) if start else None, *more, **given)

    def _whole_identity(self) -> dict[str, Any]:
        names = ["max_steps", "num_train_epochs", "per_device_train_batch_size"]
        names += ["gradient_accumulation_steps", "seed", "learning_rate", "weight_decay"]
        names += ["max_grad_norm", "bf16", "fp16"]
        return {**self.identity, **{name: getattr(self.args, name) for name in names}}

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        folder = self.folder
        here = folder / f"checkpoint-{self.state.global_step}"
        try:
            # it is not complete while it is written over
            (here / checkpoints.MARK).unlink(missing_ok=True)
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
            if self.is_world_process_zero():
                checkpoints.write_json(here / checkpoints.MARK, self._whole_identity())
        except (OSError, SafetensorError, RuntimeError) as error:
            last = checkpoints.latest(folder)
            raise ResourceError(
                f"the checkpoint of step {self.state.global_step} cannot be written to {folder} "
                f"({error}); is the disk full? {last or 'No earlier one'} is complete: make room "
                "and run the same command again"
            ) from error

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        folder = Path(output_dir) if output_dir else self.folder
        (folder / TRAINING_ARGS_NAME).unlink(missing_ok=True)  # a pickle that nobody reads

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """With the mean loss of each exit since the last log, on this rank."""
        if "loss" in logs:
            for layer, losses in sorted(self._by_exit.items()):
                logs[f"exit_{layer + 1}"] = float(torch.stack(losses).mean())
            self._by_exit.clear()
        super().log(logs, start_time)
