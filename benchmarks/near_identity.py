"""A model whose early exit agrees with it often: the late layers of an ordinary one, made to change
little.

Shapes, costs and code paths are the ordinary model's; only how often a draft is kept differs. What
each late half adds to the residual stream is scaled by one factor (its last matrix is), 1 being the
ordinary model and 0 one that equals its own exit. Such a model writes nonsense; it is for comparing
machinery, never for a figure about a real model. Does not know who runs it.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from benchmarks.convert import converted
from selfspec.errors import OptionError, UnsupportedModel

LAST_MATRIX = re.compile(r"model\.layers\.(\d+)\.(self_attn\.o_proj|mlp\.down_proj)\.weight")


def near_identity_folder(folder: Path, layer: int, factor: float) -> Path:
    """The Hugging Face folder of that model, made at first use and kept in the user's cache."""
    layers = json.loads((folder / "config.json").read_text(encoding="utf-8"))["num_hidden_layers"]
    if not 0 < layer < layers:
        raise OptionError(
            f"layer={layer} leaves nothing to damp in this model of {layers} layers; choose 1 to "
            f"{layers - 1}"
        )
    if not 0 <= factor <= 1:
        raise OptionError(
            f"factor={factor} is not a damping; choose 0 (the exit is the whole model) to 1 (the "
            "model as it is)"
        )
    return converted(
        folder,
        f"damped-{layer}-{factor:g}",
        lambda source, target: write_near_identity(source, target, layer, factor),
    )


def write_near_identity(source: Path, target: Path, layer: int, factor: float) -> None:
    """Copy a Llama-like folder with the halves of the layers from `layer` on scaled by `factor`."""
    from safetensors.torch import load_file, save_file

    target.mkdir(parents=True)
    scaled = 0
    for file in sorted(path for path in source.iterdir() if path.is_file()):
        if file.suffix != ".safetensors":
            shutil.copyfile(file, target / file.name)
            continue
        weights = load_file(file)
        for name, weight in weights.items():
            found = LAST_MATRIX.fullmatch(name)
            if found and int(found[1]) >= layer:
                weights[name] = weight * factor
                scaled += 1
        save_file(weights, target / file.name, metadata={"format": "pt"})
    if not scaled:
        raise UnsupportedModel(
            "no o_proj or down_proj of a late layer was found in the folder's safetensors files, "
            "so nothing was damped; "
            "give a model whose layers are named as Llama's are"
        )
