"""The early exit as a draft model for engines that have no early exit of their own.

The first layers with the model's own norm and head are a smaller model of the same family, so a
config that counts fewer layers and a part of the weights is all there is to it: a folder for vLLM
(or anything that reads Hugging Face folders), a GGUF file for llama.cpp. There the draft has
weights and a cache of its own and reads each prompt again, which our engine saves. Does not know
what drafts are worth.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from ..core.door import whole
from ..errors import BrokenCheckpoint, OptionError, UnsupportedModel, nearest
from .families import FAMILIES
from .load.checkpoint import (
    AGAIN,
    INDEX,
    QUANTISED,
    WEIGHTS,
    first_line,
    read_header,
    read_json,
    weight_files,
)
from .load.demo import demo_gguf
from .load.gguf_file import opened_file
from .load.source import DEMO, locate
from .quantising import BESIDE, making

ENGINES = ("vllm", "llama.cpp")
_COUNTS = ("num_hidden_layers", "n_layer", "num_layers")
_NOTE = "draft.json"


def export(
    model: str | os.PathLike[str],
    to: str,
    layer: int | None = None,
    out: Path | None = None,
    tokens: int = 5,
) -> dict[str, Any]:
    """Write the exit behind a layer as a draft model. What the engine has to be told is returned,
    and lies beside the model in `draft.json`.

    `layer`: None is a quarter of the layers. `tokens`: how many are to be drafted a round.
    """
    if to not in ENGINES:
        raise OptionError(f"there is no export to {to!r}; {nearest(to, ENGINES)}")
    tokens = whole("tokens", tokens, 1, "a round drafts at least 1")
    out = out or Path(f"{Path(os.fspath(model)).stem or 'model'}-draft")
    if out.exists():
        raise OptionError(f"{out} is there already and is not replaced; name another --out")
    if to == "vllm":
        return _folder(model, layer, out, tokens)
    return _gguf(model, layer, out, tokens)


def _exit(layer: int | None, layers: int) -> int:
    """How many layers the draft has."""
    if layers < 2:
        raise OptionError("a model of one layer has no early exit, so there is nothing to export")
    if layer is None:
        return max(1, layers // 4)
    return whole("layer", layer, 1, f"the model has {layers} layers", layers - 1)


# ------------------------------------------------------------------------- a folder of Hugging Face


def _folder(
    model: str | os.PathLike[str], layer: int | None, out: Path, tokens: int
) -> dict[str, Any]:
    source = locate(model, None, None, False)
    if (source.folder / QUANTISED).is_file():
        raise UnsupportedModel(
            f"{model} was written by selfspec quantise, which other engines cannot read; export "
            "the original"
        )
    source.fetch_weights()
    config = read_json(source.folder / "config.json")
    family = FAMILIES.get(config.get("model_type", ""))
    count = next((name for name in _COUNTS if isinstance(config.get(name), int)), None)
    if family is None or count is None:
        raise UnsupportedModel(
            f"{model} is of a family that selfspec does not know ({config.get('model_type')!r}), "
            "so its layers cannot be told apart; selfspec info lists what it knows"
        )
    if config["model_type"] == "gemma3n_text" or (
        config["model_type"] == "gemma4_text"
        and (config.get("hidden_size_per_layer_input", 256) or config.get("num_kv_shared_layers"))
    ):
        raise UnsupportedModel(
            f"{model} has layers that read keys of others, or one table for all layers, so its "
            "first layers are no model of their own; draft here with draft='early-exit'"
        )
    exit_layer = _exit(layer, config[count])
    place = re.compile(rf"(?:^|\.){re.escape(family.layers.rpartition('.')[2])}\.(\d+)\.")
    wanted: dict[Path, list[str]] = {}
    needed = 0
    for file in weight_files(source.folder):
        for name, stored in read_header(file).items():
            found = place.search(name)
            if found is None or int(found[1]) < exit_layer:
                wanted.setdefault(file, []).append(name)
                needed += stored.nbytes
    with making(out, needed) as work:
        _copy_tensors(wanted, work / WEIGHTS)
        for found_file in {each for pattern in BESIDE for each in source.folder.glob(pattern)}:
            if found_file.name not in (INDEX, "selfspec.json", _NOTE):
                shutil.copy(found_file, work / found_file.name)
        cut = shorter(config, count, exit_layer)
        (work / "config.json").write_text(json.dumps(cut, indent=2) + "\n", encoding="utf-8")
        asked = {
            "method": "draft_model",
            "model": str(out.resolve()),
            "num_speculative_tokens": tokens,
        }
        told = _told(model, exit_layer, config[count], {"speculative_config": asked})
        told["command"] = ["vllm", "serve", str(model), "--speculative-config", json.dumps(asked)]
        _write(work, told)
    return told


def shorter(config: dict[str, Any], count: str, layers: int) -> dict[str, Any]:
    """A config of the same family with fewer layers. Lists with an entry for each layer are cut,
    and lists of layers lose those that are gone."""
    before = config[count]
    cut = {**config, count: layers}
    for name, value in config.items():
        if not isinstance(value, list) or "layer" not in name:
            continue
        if name in ("mlp_only_layers",):
            cut[name] = [each for each in value if each < layers]
        elif len(value) == before:
            cut[name] = value[:layers]
    return cut


def _copy_tensors(wanted: dict[Path, list[str]], target: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    tensors: dict[str, Any] = {}
    for file, names in wanted.items():
        with safe_open(file, "pt") as held:
            tensors |= {name: held.get_tensor(name) for name in names}
    save_file(tensors, target, {"format": "pt"})
    target.chmod(0o644)


# ------------------------------------------------------------------------------- a GGUF file


def _gguf(
    model: str | os.PathLike[str], layer: int | None, out: Path, tokens: int
) -> dict[str, Any]:
    path = demo_gguf() if model == DEMO else Path(model).expanduser()
    if not path.is_file() or path.suffix != ".gguf":
        raise OptionError(
            f"{model} is no GGUF file, and llama.cpp reads nothing else; convert the model with "
            "llama.cpp's convert_hf_to_gguf.py and export that file"
        )
    reader = opened_file(path)
    try:
        architecture = reader.fields["general.architecture"].contents()
        layers = int(reader.fields[f"{architecture}.block_count"].contents())
    except (ValueError, KeyError) as error:
        raise BrokenCheckpoint(f"{path} cannot be read ({first_line(error)}). {AGAIN}") from error
    exit_layer = _exit(layer, layers)
    kept = [tensor for tensor in reader.tensors if _block(tensor.name) < exit_layer]
    with making(out, sum(int(tensor.n_bytes) for tensor in kept)) as work:
        file = f"{path.stem}-exit-{exit_layer}.gguf"
        _write_gguf(reader, architecture, layers, exit_layer, kept, work / file)
        draft = str((out / file).resolve())
        told = _told(model, exit_layer, layers, {"model": str(path), "draft_model": draft})
        told["command"] = [
            *("llama-server", "--model", str(path), "--spec-type", "draft-simple"),
            *("--spec-draft-model", draft, "--spec-draft-n-max", str(tokens)),
        ]
        _write(work, told)
    return told


def _block(name: str) -> int:
    """The layer of a tensor, -1 for those of none."""
    found = re.match(r"blk\.(\d+)\.", name)
    return int(found[1]) if found else -1


def _write_gguf(
    reader: Any, architecture: str, layers: int, exit_layer: int, kept: list[Any], target: Path
) -> None:
    """The same file with fewer layers. Blocks are copied as they are."""
    from gguf import GGUFValueType, GGUFWriter

    writer = GGUFWriter(target, architecture, endianess=reader.endianess)
    for name, field in reader.fields.items():
        if name == "general.architecture" or name.startswith("GGUF."):
            continue
        value, kind = field.contents(), field.types[0]
        inner = field.types[-1] if kind == GGUFValueType.ARRAY else None
        if name == f"{architecture}.block_count":
            value = exit_layer
        elif inner and name.startswith(f"{architecture}.") and len(value) == layers:
            value = value[:exit_layer]
        writer.add_key_value(name, value, kind, sub_type=inner)
    for tensor in kept:
        data = tensor.data
        writer.add_tensor_info(tensor.name, data.shape, data.dtype, data.nbytes, tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in kept:
        writer.write_tensor_data(tensor.data, tensor_endianess=reader.endianess)
    writer.close()


def _told(
    model: str | os.PathLike[str], exit_layer: int, layers: int, more: dict[str, Any]
) -> dict[str, Any]:
    return {"of": str(model), "layers": exit_layer, "of_layers": layers, **more}


def _write(work: Path, told: dict[str, Any]) -> None:
    (work / _NOTE).write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
