"""Writes a model in a kind of few bits as a folder that loads in a second (quantised_folder.py).

The folder is made beside its place and moved there when it is whole. Does not know a command line.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import OptionError, ResourceError, UnsupportedModel, nearest
from .compute.cpu.linear import PackedLinear
from .compute.cpu.packs import Shelf
from .compute.cpu.portable import PORTABLE, to_rows
from .compute.memory import gigabytes
from .families import family_of
from .from_transformers import from_transformers
from .load.checkpoint import INDEX, QUANTISED, sha256
from .load.source import locate
from .opening import opened
from .plain import Plain, plain_model
from .quantised_folder import FORMAT, TENSORS, is_quantised, probe_of, product_name
from .remembered import place_of

BESIDE = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "LICENSE*", "README*")
_LEFT = (QUANTISED, INDEX, "selfspec.json")


def quantise(
    model: str | os.PathLike[str],
    to: str,
    out: Path | None = None,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Path:
    """Round a model's weights to a kind and write them as a folder, which is returned.

    `out`: the folder, by default MODEL-KIND here. `progress` is told products done and all.
    """
    if to not in PORTABLE:
        raise OptionError(f"no folder can be written in weights {to!r}; {nearest(to, PORTABLE)}")
    if is_quantised(model):
        raise OptionError(
            f"{model} is quantised already, and rounding twice only loses more; quantise the "
            "original"
        )
    out = out or Path(f"{Path(os.fspath(model)).name or 'model'}-{to}")
    if out.exists():
        raise OptionError(f"{out} is there already and is not replaced; name another --out")
    source, facts = _facts(model, to)
    plain: Any = plain_model(source, facts)
    rest, shapes = _sorted(plain, facts)
    shelf = _Made()
    layered = from_transformers(
        plain, owned=True, weights=to, check=False, row_stable=True, shelf=shelf
    )
    said: dict[str, Any] = {
        "format": FORMAT,
        "kind": to,
        "model": str(model),
        "config": sha256(source / "config.json"),
        "probe": probe_of(layered).tolist(),
        "products": [[kind, each.outputs, each.inputs] for kind, each in shelf.made],
        "facts": {**facts, "files": {TENSORS: rest[1]}, "shapes": shapes},
    }
    for each in ("key", "row_stable"):
        said["facts"].pop(each, None)
    with making(out, sum(each.memory.nbytes for _, each in shelf.made)) as work:
        _write(work, source, said, shelf.made, rest[0], progress)
    return out


class _Made(Shelf):
    """Keeps what was made."""

    def close(self) -> None:
        return None


def _facts(model: str | os.PathLike[str], to: str) -> tuple[Path, dict[str, Any]]:
    """A model's folder, and what a load without transformers needs to know; the model is loaded and
    checked in the kind first, unless it was before."""
    source = locate(model, None, None, False)
    place = place_of(source.folder, "auto", to)
    facts = place.read()
    if facts is None:
        how: dict[str, Any] = {"revision": None, "token": None, "trust_remote_code": False}
        how |= {"dtype": "auto", "device": "cpu", "tokenizer": None, "adapter": "auto"}
        opened(model, kernel="auto", weights=to, long_context=False, **how)
        place = place_of(source.folder, "auto", to)
        facts = place.read()
    if facts is None:
        raise UnsupportedModel(
            f"{model} cannot be written as a quantised folder: something about it (its experts, "
            "adapter, rotation or tokenizer) needs transformers' own model at every load, or "
            f"nothing can be kept in {place.file.parent}. Load it with weights={to!r} instead."
        )
    return source.folder, facts


def _sorted(
    plain: Plain, facts: dict[str, Any]
) -> tuple[tuple[dict[str, Tensor], dict[str, list[str]]], list[tuple[list[str], list[int]]]]:
    """What is not rounded, by name, with the places of each; places and shapes of the matrices that
    are."""
    family = family_of(plain.config)
    assert family is not None
    named = dict(plain.named_parameters(remove_duplicate=False))
    embedding = f"{family.embedding}.weight"
    kept: dict[str, Tensor] = {}
    places: dict[str, list[str]] = {}
    shapes = []
    for group in (group for tensors in facts["files"].values() for group in tensors.values()):
        weight = named[group[0]]
        if weight.dim() == 1 or group == [embedding]:
            kept[group[0]], places[group[0]] = weight.detach().clone().contiguous(), group
        else:
            shapes.append((group, list(weight.shape)))
    return (kept, places), shapes


def _write(
    work: Path,
    source: Path,
    said: dict[str, Any],
    made: list[tuple[str, PackedLinear]],
    rest: dict[str, Tensor],
    progress: Callable[[int, int], None],
) -> None:
    from safetensors.torch import save_file

    tensors, digest = dict(rest), hashlib.sha256(json.dumps(said["facts"]).encode())
    for number, (kind, linear) in enumerate(made):
        rows = to_rows(kind, linear.memory, linear.outputs)
        digest.update(rows.numpy().data)
        tensors[product_name(number)] = rows
        progress(number + 1, len(made))
    said["fingerprint"] = digest.hexdigest()
    save_file(tensors, work / TENSORS, {"fingerprint": said["fingerprint"], "format": "pt"})
    (work / TENSORS).chmod(0o644)
    for file in {file for pattern in BESIDE for file in source.glob(pattern)}:
        if file.name not in _LEFT:
            shutil.copy(file, work / file.name)
    (work / QUANTISED).write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")


@contextmanager
def making(out: Path, needed: int) -> Iterator[Path]:
    """A folder beside `out` that takes its place once it is whole."""
    work = out.parent / f".making-{out.name}-{uuid.uuid4().hex[:8]}"
    full = f"writing {out} needs about {gigabytes(needed)}"
    remedy = "Free some space, or name a folder on another disk with --out."
    try:
        work.mkdir(parents=True)
        if (free := shutil.disk_usage(work).free) < needed:
            raise ResourceError(f"{full}, and {gigabytes(free)} are free there. {remedy}")
        yield work
        os.replace(work, out)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ResourceError(f"{full}, and the disk filled up. {remedy}") from error
        raise OptionError(f"{out} cannot be written ({error}); name another --out") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
