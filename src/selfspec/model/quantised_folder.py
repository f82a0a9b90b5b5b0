"""A folder that `selfspec quantise` wrote: a model in a kind of few bits, ready to run.

`selfspec-quantised.json` says what was rounded, how, and what else a load needs to know.
`quantised.safetensors` holds the rounded products, output by output so that every processor can
read them, and norms, biases and embeddings as they were. The folder is loaded without transformers'
model and without weights in float32. How it is written is in quantising.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core.files import is_there
from ..errors import BrokenCheckpoint, OptionError, UnsupportedModel
from .compute.cpu import large_pages
from .compute.cpu.packs import Shelf
from .compute.cpu.portable import PORTABLE, to_panels
from .from_transformers import from_transformers
from .layered import LayeredModel
from .load.checkpoint import AGAIN, QUANTISED, read_header, read_json, sha256
from .load.words import tokenizer_by
from .plain import plain_model
from .probing import probe_logits
from .remembered import place_of

TENSORS = "quantised.safetensors"
FORMAT = 1
_SOME, _NEAR = (64, 1e-3)  # how many logits are compared with those at writing, and how closely


@dataclass(frozen=True)
class QuantisedModel:
    """What such a folder gives."""

    layered: LayeredModel
    tokenizer: Any
    generation_config: Any


def is_quantised(model: Any) -> bool:
    """Whether it names a folder that `selfspec quantise` wrote."""
    if isinstance(model, str | Path):
        return is_there(Path(model).expanduser() / QUANTISED)
    return False


def described(folder: Path) -> dict[str, Any]:
    """What such a folder says of itself, if it can be loaded here."""
    facts = read_json(folder / QUANTISED)
    form, kind = facts.get("format"), facts.get("kind")
    if (isinstance(form, int) and form > FORMAT) or kind not in PORTABLE:
        raise UnsupportedModel(
            f"{folder} was written by a newer selfspec (format {form}, weights {kind!r}), and this "
            f"one reads format {FORMAT} with weights {', '.join(PORTABLE)}. Update selfspec, or "
            "quantise the model again: selfspec quantise MODEL"
        )
    if missing := {"facts", "products", "fingerprint", "config", "probe"} - facts.keys():
        raise BrokenCheckpoint(f"{folder / QUANTISED} lacks {', '.join(sorted(missing))}. {AGAIN}")
    for name in ("config.json", TENSORS):
        if not (folder / name).is_file():
            raise BrokenCheckpoint(f"{folder / name} is missing. {AGAIN}")
    return facts


def load_quantised(folder: Path, kernel: str, weights: str) -> QuantisedModel:
    """The model of such a folder. Outputs are those of its kind on the original, bit for bit."""
    said = described(folder)
    kind = said["kind"]
    if weights not in ("auto", kind):
        raise OptionError(
            f"{folder} was quantised to {kind} and holds no other weights, so weights={weights!r} "
            f"cannot be had from it; leave it at 'auto', or load {said.get('model')}"
        )
    if kernel not in ("auto", "native"):
        raise OptionError(
            f"{folder} is quantised for our own kernels, and kernel={kernel!r} cannot read it; "
            "leave it at 'auto'"
        )
    shelf = _shelf_of(folder, said)
    place = place_of(folder, kernel, kind)
    known = place.read()
    plain: Any = plain_model(folder, said["facts"])
    layered = from_transformers(
        plain,
        kernel="native",
        weights=kind,
        check=False,
        row_stable=known["row_stable"] if known else None,
        packs=place.packs,
        shelf=shelf,
    )
    if known is None:  # the first time on this machine
        _compare(probe_of(layered), torch.tensor(said["probe"]), folder)
        place.write({"row_stable": layered.row_stable})
    tokenizer = tokenizer_by(folder, said["facts"]["tokenizer"])
    return QuantisedModel(layered, tokenizer, plain.generation_config)


def probe_of(layered: LayeredModel) -> Tensor:
    """Some logits of a fixed prompt, by which a model is recognised."""
    logits = probe_logits(layered)[-1].flatten()
    return logits[:: max(1, len(logits) // _SOME)].clone()


class _FolderShelf(Shelf):
    """The products of a folder."""

    def __init__(self, path: Path, products: list[list[Any]], tensors: Any) -> None:
        super().__init__()
        self._path, self._products, self._tensors, self._next = path, products, tensors, 0

    def take(self, kind: str, outputs: int, inputs: int) -> Tensor:
        number, self._next = self._next, self._next + 1
        found = self._products[number] if number < len(self._products) else None
        if found != [kind, outputs, inputs]:
            raise _another(self._path, f"product {number} is {found} there, not {kind} of "
                                       f"{outputs} x {inputs}")  # fmt: skip
        return large_pages.moved(to_panels(kind, self._tensors.get_tensor(product_name(number))))

    def close(self) -> None:
        self._tensors = None  # the file need not stay mapped
        super().close()


def product_name(number: int) -> str:
    """The name of a product in the file."""
    return f"product.{number}"


def _shelf_of(folder: Path, said: dict[str, Any]) -> Shelf:
    from safetensors import safe_open  # no part of a mere import of LLM

    path = folder / TENSORS
    read_header(path)  # whole?
    tensors: Any = safe_open(path, "pt")
    if (tensors.metadata() or {}).get("fingerprint") != said["fingerprint"]:
        raise _another(path, "its fingerprint is another")
    if sha256(folder / "config.json") != said["config"]:
        raise _another(folder / "config.json", "it was changed or replaced")
    return _FolderShelf(path, said["products"], tensors)


def _another(path: Path, reason: str) -> BrokenCheckpoint:
    return BrokenCheckpoint(
        f"{path} does not belong to the model that {QUANTISED} beside it describes: {reason}. Was "
        "it copied from another folder? Quantise the model again: selfspec quantise MODEL"
    )


def _compare(ours: Tensor, theirs: Tensor, folder: Path) -> None:
    distance = float((ours - theirs).norm() / theirs.norm()) if ours.shape == theirs.shape else 1.0
    if not distance < _NEAR:
        raise BrokenCheckpoint(
            f"{folder} computes something else here than when it was written: logits differ by "
            f"{distance:.2%}, and rounding explains {_NEAR:.2%}. Its files are damaged, or were "
            "mixed with those of another model. Copy it, or quantise the model, again."
        )
