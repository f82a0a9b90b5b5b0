"""`scripts/bench sibling`: a small second model with a model's vocabulary, for the baseline of two
models.

Speculative decoding as most people know it drafts with a smaller sibling of the same tokenizer.
Where none is to be had, as for the demo, this trains one from scratch, on text that the large model
wrote itself (`selfspec data`): what is asked of it is that model's next token. Does not measure
anything; `scripts/bench suite` does, with the folder as `draft-model:model=FOLDER`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import AutoConfig, AutoTokenizer

from benchmarks.command import Model, Threads, run_command
from benchmarks.models import folder_of
from selfspec.errors import OptionError
from selfspec.train.data import DataOptions
from selfspec.train.recipe import Recipe
from selfspec.train.run import TrainOptions, train

HEAD_SIZE, HEADS = 64, 3  # of an attention; the width is their product


def smaller(folder: Path, to: Path, layers: int) -> None:
    """The tokenizer of a model and a smaller configuration of its kind, without weights."""
    config = AutoConfig.from_pretrained(folder)
    if not {"num_hidden_layers", "intermediate_size"} <= vars(config).keys():
        raise OptionError(f"--model: {config.model_type} is no model that can be made smaller here")
    config.num_hidden_layers, config.hidden_size = layers, HEADS * HEAD_SIZE
    config.num_attention_heads, config.num_key_value_heads = HEADS, 1
    config.head_dim, config.intermediate_size = HEAD_SIZE, 8 * HEADS * HEAD_SIZE // 3
    config.tie_word_embeddings = True
    config.save_pretrained(to)
    AutoTokenizer.from_pretrained(folder).save_pretrained(to)


def sibling(
    model: Model = "demo",
    *,
    data: Annotated[list[Path], typer.Option(help="What the model wrote, from `selfspec data`.")],
    folder: Annotated[Path, typer.Option(help="Where the small model goes.")] = Path("sibling"),
    layers: Annotated[int, typer.Option(min=1, help="Its layers.")] = 4,
    steps: Annotated[int, typer.Option(min=1, help="Training steps of 8 blocks.")] = 500,
    rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 2e-3,
    threads: Threads = 2,
) -> None:
    """Train a small second model of the same vocabulary. A run that was stopped goes on.

    Example: scripts/bench sibling --data own.jsonl --folder sibling
    """
    torch.set_num_threads(threads)
    shape = folder / "shape"
    smaller(folder_of(model), shape, layers)
    options = TrainOptions(
        steps=steps,
        batch=8,
        learning_rate=rate,
        precision="bfloat16",
        from_scratch=True,
        plot=False,
    )
    text, plain = DataOptions(train_on_prompts=True, length=256), Recipe().variant("plain")
    report = train(str(shape), data, folder, recipe=plain, options=options, data=text)
    last = report.exits["after"][-1]
    typer.echo(json.dumps({"folder": folder.name, "tokens": report.tokens, **last.as_dict()}))


if __name__ == "__main__":
    run_command(sibling)
