"""`selfspec export`: the early exit as a draft model of other engines. `model/` writes it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from . import common, options


def export(
    name: options.Model,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            help="vllm (a Hugging Face folder, and its speculative_config) or llama.cpp (a GGUF "
            "file of MODEL, which has to be one too).",
        ),
    ],
    layer: Annotated[
        int | None, typer.Option("--layer", help="Layers that draft. Without it a quarter of them.")
    ] = None,
    tokens: Annotated[
        int, typer.Option("--tokens", min=1, help="How many tokens to draft in a round.")
    ] = 5,
    out: Annotated[
        Path | None,
        options.output("--out", help="The folder to write. Without it MODEL-draft, here."),
    ] = None,
) -> None:
    """Write the early exit of a model as a draft model for vLLM or llama.cpp.

    These engines verify what it drafts with the whole model. It has weights and a cache of its own
    there. Only a model that was trained for early exits drafts well with it (selfspec exits shows
    how well). draft.json in the folder says what the engine has to be told.

    Example:  selfspec export ./my-model --to vllm --layer 8 && cat my-model-draft/draft.json
    """
    from ..model.exporting import export as write

    common.quiet_bars()
    told = write(name, to, layer, out, tokens)
    typer.echo(f"the first {told['layers']} of {told['of_layers']} layers as a draft model:")
    typer.echo(shlex.join(told["command"]))
