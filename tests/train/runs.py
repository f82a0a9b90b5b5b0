"""A short training run on a tiny model, as a function for tests and as a script for several ranks
(see test_trainer.py)."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import TrainingArguments

from selfspec.model.families import FAMILIES
from selfspec.testing import tiny_model
from selfspec.train.data import Blocks
from selfspec.train.recipe import Recipe
from selfspec.train.trainer import LayerSkipTrainer

RECIPE = Recipe(dropout=0.5, dropout_time="exponential", curriculum="gradual", share=0.6)


def trainable(family: str, **changes: Any) -> Any:
    """A tiny model without dropout of its own, which would make two computations of the same loss
    differ."""
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} if family == "gpt2" else {}
    model = tiny_model(family, **{**still, **changes})
    if FAMILIES[family].experts:  # products by group know no float64
        model.set_experts_implementation("eager")
    return model


def blocks(count: int = 24, length: int = 12, seed: int = 0) -> Blocks:
    """Random tokens; some rows are trained in part, so that ranks and micro-batches differ in how
    many tokens count."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 250, (count, length), generator=generator, dtype=torch.int32)
    trained = torch.rand(count, 1, generator=generator) * length > torch.arange(length)[None]
    trained[:, :3] = True
    return Blocks(ids, trained)


def trainer(
    folder: Path, steps: int, recipe: Recipe = RECIPE, model: Any = None, **changes: Any
) -> LayerSkipTrainer:
    if model is None:
        # torch's own generator has to resume too
        model = tiny_model(seed=7, attention_dropout=0.1).requires_grad_(True)
    settings = {
        "max_steps": steps,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "cosine",
        "save_steps": 1000,
        "logging_steps": 1000,
        "seed": 3,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    arguments = TrainingArguments(str(folder), **{**settings, **changes})
    return LayerSkipTrainer(model, arguments, recipe, train_dataset=blocks())


def weights(run: LayerSkipTrainer) -> dict[str, torch.Tensor]:
    return {
        name: value.detach().clone()
        for name, value in run.recipe_forward.model.state_dict().items()
    }


def run_plainly(folder: Path, steps: int, batch: int, tile: int = 1) -> dict[str, torch.Tensor]:
    """Plain SGD, because Adam makes rounding errors as large as the learning rate where a gradient
    is almost zero. With `tile` a mask is drawn for one rank's rows and repeated, as if so many
    ranks had drawn it."""
    model = tiny_model(seed=7).requires_grad_(True)
    recipe = Recipe(dropout=0.6, dropout_depth="constant", curriculum="all")
    # clipping would hide a wrong divisor
    settings = {"optim": "sgd", "save_strategy": "no", "max_grad_norm": 0.0}
    run = trainer(folder, steps, recipe, model, per_device_train_batch_size=batch, **settings)
    if tile > 1:
        own = run.recipe_forward.draw
        run.recipe_forward.draw = lambda rows: own(rows // tile).repeat(1, tile)  # type: ignore[method-assign]
    run.train()
    return weights(run)


if __name__ == "__main__":
    torch.set_num_threads(1)
    target = Path(sys.argv[1])
    found = run_plainly(target, int(sys.argv[2]), int(sys.argv[3]))
    if os.environ["RANK"] == "0":
        save_file(found, target / "end.safetensors")
    torch.distributed.destroy_process_group()
