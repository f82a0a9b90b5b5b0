"""Checkpoints that can be trusted: complete ones only, and of the same run only.

A checkpoint folder is transformers'; we add `selfspec.json`, written last and in one move, which
says what run it belongs to and that everything before it is on the disk. A folder without it is
what a killed process left behind.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..core.whole_files import write_whole
from ..errors import OptionError, ResourceError, TrainingError

MARK = "selfspec.json"
KEPT = 2  # checkpoints; while the next is written there is one more
_NAME = re.compile(r"checkpoint-(\d+)")


def fingerprint(module: nn.Module) -> str:
    """A model's weights in a few letters: names, shapes, and some values of each."""
    digest = hashlib.blake2b(digest_size=8)
    for name, parameter in module.state_dict().items():
        values = parameter.detach().flatten()
        some = values[:: max(1, values.numel() // 64)][:64].to("cpu", torch.float32)
        digest.update(f"{name}{tuple(parameter.shape)}".encode() + some.numpy().tobytes())
    return digest.hexdigest()


def data_fingerprint(*tensors: Tensor) -> str:
    """Integer tensors in a few letters."""
    digest = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        digest.update(f"{tuple(tensor.shape)}".encode() + tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def make_folder(path: Path) -> None:
    """Make a folder and those above it. What stands in the way is said before hours of work."""
    exists = next((place for place in (path, *path.parents) if place.exists()), path)
    if not exists.is_dir():
        raise OptionError(f"{exists} is a file; the output has to be a folder")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(f"{path} cannot be made ({error}); name another folder") from error


def write_json(path: Path, value: Any) -> None:
    """Written whole or not at all."""
    write_whole(path, json.dumps(value, indent=1).encode())


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint in a folder, if there is one."""
    complete = (path for path in reversed(_numbered(folder)) if (path / MARK).is_file())
    return next(complete, None)


def clear_incomplete(folder: Path) -> None:
    """Remove what a killed process left behind, in a folder that is ours alone."""
    for path in _numbered(folder):
        if not (path / MARK).is_file():
            shutil.rmtree(path)


def require_same(folder: Path, identity: Mapping[str, Any]) -> None:
    """Raise unless the checkpoint belongs to a run with these settings."""
    if not (folder / MARK).is_file():
        raise TrainingError(
            f"{folder} has no {MARK}: it is no checkpoint of selfspec, or was cut off while being "
            "written. Choose another"
        )
    require_equal(json.loads((folder / MARK).read_text(encoding="utf-8")), identity, folder)


def require_equal(stored: Mapping[str, Any], identity: Mapping[str, Any], folder: Path) -> None:
    """Raise unless what a checkpoint says of its run is what this run says."""
    wanted: dict[str, Any] = json.loads(json.dumps(dict(identity)))
    differences = [
        f"{name} was {stored.get(name)!r}, is {wanted.get(name)!r}"
        for name in sorted({*stored, *wanted})
        if stored.get(name) != wanted.get(name)
    ]
    if differences:
        raise TrainingError(
            f"the checkpoint {folder} belongs to another run: {'; '.join(differences)}. Going on "
            "would mix two. Repeat the earlier settings, or train into another folder"
        )


def require_room(folder: Path, weights: int, trained: int) -> None:
    """Raise unless the disk holds the trained model and the checkpoints that are kept. Each of them
    has the weights, and two moments of what is trained."""
    needed = (KEPT + 1) * (weights + 2 * trained) + weights
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ResourceError(
            f"{folder} has {free / 1e9:.1f} GB free; {KEPT + 1} checkpoints and the trained model "
            f"need {needed / 1e9:.1f} GB. Make room, choose another folder, or train with LoRA"
        )


def _numbered(folder: Path) -> list[Path]:
    matches = ((_NAME.fullmatch(path.name), path) for path in folder.glob("checkpoint-*"))
    return [path for _, path in sorted((int(match[1]), path) for match, path in matches if match)]
