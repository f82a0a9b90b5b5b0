"""What the first load of a folder found out, kept for the next ones.

transformers takes seconds to import a model's code, and the self-check needs that model. Both are
needed once: the first load keeps where the weights belong, the numbers that are in no file (eps,
frequencies), and that the check was passed. A later load of the same folder reads the weights by
that, as modules of the same names, and leaves transformers' model out. Whatever could change a bit
is in the key: files, sources, versions, processor, options. What is unusual is not kept and goes
through transformers every time. Does not know how a model is run.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from ..core.files import is_named, whole_file
from ..core.user_cache import cache_root
from .compute.cpu.packs import Packs
from .compute.rope import RopeTable
from .families import family_of
from .layered import LayeredModel
from .load.checkpoint import bytes_while_loading, require_memory, weight_files
from .load.gguf_stored import places_of, stored_bytes
from .load.placement import parse_device
from .load.source import DEMO, locate
from .load.words import tokenizer_by, words_of
from .operations import operations_for
from .plain import Plain, plain_model
from .shaping import shape_of
from .weights import module, stored_blocks

_FROM_CODE = ("eps", "variance_epsilon", "scaling")  # numbers of modules that we read
_ROPES = ("default", "linear", "llama3", "yarn")  # whose frequencies are the same for all texts
_KEPT = 50  # folders
_ROTATED = 8192  # positions that are compared
NATIVE = "native"
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Place:
    """Where a folder's facts are kept, and what they hold for."""

    file: Path
    key: str
    packs: Packs

    def read(self) -> dict[str, Any] | None:
        """The facts, if there are some and nothing has changed since."""
        try:
            facts = json.loads(self.file.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # none yet, or damaged: they are found out again
            return None
        same = isinstance(facts, dict) and facts.get("key") == self.key
        return facts if same else None

    def write(self, facts: dict[str, Any]) -> None:
        """Keep the facts, of the last folders only. A cache that cannot be written keeps none."""
        with suppress(OSError):
            with whole_file(self.file) as file:
                file.write(json.dumps({**facts, "key": self.key}).encode())
            others = sorted(self.file.parent.glob("*.json"), key=lambda file: -file.stat().st_mtime)
            for old in others[_KEPT:]:
                old.unlink()


def place_of(folder: Path, kernel: str, weights: str) -> Place:
    """Where the facts about a folder are, for these options."""
    folder = folder.resolve()
    files = [(file.name, file.stat()) for file in sorted(folder.iterdir()) if file.is_file()]
    sizes = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in files]
    asked = [str(folder), kernel, weights]
    made_of = [str(folder), sizes, _here()]
    packs = Packs(f"{folder.name[:40]}-{_digest(str(folder))[:12]}", _digest(made_of))
    key = _digest([asked, made_of, torch.get_num_threads()])
    return Place(cache_root() / "loaded" / f"{_digest(asked)[:16]}.json", key, packs)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


@cache
def _here() -> list[str]:
    """What besides folder and options decides about bits: sources, versions, processor."""
    room = Path(__file__).parent
    sources = [file for file in sorted(room.rglob("*")) if file.suffix in (".py", ".cpp", ".h")]
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in sources)).hexdigest()
    versions = [metadata.version(name) for name in ("torch", "transformers", "safetensors")]
    info = Path("/proc/cpuinfo")
    lines = set(info.read_text().splitlines()) if info.exists() else set[str]()
    processor = sorted(each for each in lines if each.startswith(("model name", "flags", "Feat")))
    return [digest, *versions, *processor]


@dataclass(frozen=True)
class Recalled:
    """A folder's model, tokenizer and name, loaded by what was kept of an earlier load."""

    model: Any  # a `Plain`, which stands for a PreTrainedModel
    tokenizer: Any
    name: str
    row_stable: bool
    packs: Packs


def recall(
    model: Any, device: str | torch.device | Mapping[str, Any], kernel: str, weights: str
) -> Recalled | None:
    """A folder that was loaded before, or the demo. None: it has to be loaded in the usual way."""
    if not isinstance(model, str | os.PathLike) or parse_device(device).type != "cpu":
        return None
    if model != DEMO and not is_named(Path(model).expanduser()):
        return None
    if operations_for(kernel, torch.float32, CPU, "", weights).kernel != NATIVE:
        return None
    source = locate(model, None, None, False, weights)
    place = place_of(source.folder, kernel, weights)
    facts = place.read()
    if facts is None or source.notes:
        return None
    whole = None if source.blocks else bytes_while_loading(source.folder, torch.float32)
    require_memory(whole or stored_bytes(source.folder), CPU, source.name)
    tokenizer = tokenizer_by(source.folder, facts["tokenizer"])
    plain = plain_model(source.folder, facts)
    return Recalled(plain, tokenizer, source.name, facts["row_stable"], place.packs)


def keeping(
    model: Any, tokenizer: Any, folder: Path
) -> Callable[[LayeredModel, str, str], None] | None:
    """What keeps the facts about a folder, to be called once its model has passed all checks."""
    facts = facts_of(model, tokenizer, folder)
    if facts is None:
        return None

    def keep(layered: LayeredModel, kernel: str, weights: str) -> None:
        if layered.ops.kernel == NATIVE:
            place = place_of(folder, kernel, weights)
            place.write({**facts, "row_stable": layered.row_stable})

    return keep


def facts_of(model: Any, tokenizer: Any, folder: Path) -> dict[str, Any] | None:
    """What a later load needs to know, or None if something about the model is unusual.

    Every weight and every angle that would be read by it is compared with the model's own.
    """
    config, family = model.config, family_of(model.config)
    rope = getattr(config, "rope_parameters", None) or {}
    usual = family is not None and family.rotary is not None and rope.get("rope_type") in _ROPES
    plain = set(model.state_dict()) == {name for name, _ in _parameters(model)}
    if family is not None and (family.recurrent is not None or "{}" in str(family.rotary)):
        return None  # what its recurrent modules hold, or several rotary ones, is not kept
    if not usual or not plain or model.dtype != torch.float32 or model.device.type != "cpu":
        return None
    assert family is not None and family.rotary is not None
    kept = json.loads(json.dumps(config.to_dict(), default=str))
    try:
        same = shape_of(SimpleNamespace(**kept), family) == shape_of(config, family)
    except AttributeError:
        return None
    blocks = stored_blocks(model)
    files = [] if blocks else weight_files(folder)
    modules, stored = _modules(model, family.rotary), _stored(model, files)
    stored = {} if blocks else stored
    words = words_of(tokenizer, folder)
    if not same or modules is None or stored is None or words is None:
        return None
    generation = model.generation_config
    said = {
        name: getattr(generation, name, None) for name in ("eos_token_id", "repetition_penalty")
    }
    facts = {"config": kept, "generation": said, "head": family.head, "modules": modules,
             "files": stored, "tokenizer": words}  # fmt: skip
    if blocks:
        facts["blocks"] = places_of(model, folder)
    again = plain_model(folder, facts)
    return facts if _same_weights(model, again) and _same_angles(model, again, family) else None


def _modules(model: Any, rotary: str) -> dict[str, tuple[str, dict[str, Any]]] | None:
    """What stands at each path. None: something other than linears, embeddings and norms."""
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    for path, part in model.named_modules():
        own = dict(part.named_parameters(recurse=False))
        numbers = {name: vars(part)[name] for name in _FROM_CODE if name in vars(part)}
        kind = "linear" if type(part) is nn.Linear else ""
        kind = "embedding" if isinstance(part, nn.Embedding) else kind
        if path == rotary:
            kind = "rotary"
            frequencies = part.inv_freq.float().tolist()
            numbers = {"frequencies": frequencies, "scaling": part.attention_scaling}
        elif not kind and any(weight.dim() != 1 for weight in own.values()):
            return None
        if path:
            found[path] = kind, numbers
    return found


def _stored(model: Any, files: list[Path]) -> dict[str, dict[str, list[str]]] | None:
    """For each file its tensors, and the places of each: two where weights are tied."""
    from safetensors import safe_open

    places: dict[int, list[str]] = {}
    for name, weight in _parameters(model):
        places.setdefault(id(weight), []).append(name)
    stored: dict[str, dict[str, list[str]]] = {}
    for file in files:
        with safe_open(file, "pt") as tensors:
            names = set(tensors.keys())
        stored[file.name] = {}
        for key, wanted in list(places.items()):
            if held := [name for name in wanted if name in names]:
                stored[file.name][held[0]] = places.pop(key)
    return None if places else stored  # the rest has other names there


def _parameters(model: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
    return model.named_parameters(remove_duplicate=False)


def _same_weights(model: Any, again: Plain) -> bool:
    ours = dict(_parameters(again))
    theirs = dict(_parameters(model))
    return ours.keys() == theirs.keys() and all(
        torch.equal(weight, ours[name].float()) for name, weight in theirs.items()
    )


def _same_angles(model: Any, again: Plain, family: Any) -> bool:
    context = min(model.config.max_position_embeddings, _ROTATED)
    tables = []
    for each in (model, again):
        table = RopeTable(module(each, family.rotary), context, CPU)
        table.reserve(context)
        tables.append(table.tables)
    ours, theirs = tables
    same = torch.equal(ours.cosines, theirs.cosines) and torch.equal(ours.sines, theirs.sines)
    return same and not family.interleaved
