"""Trained parts: small things trained for a frozen model, which draft for it. A folder with
safetensors and JSON.

`part.json` says what the part is, how it is built and on which model it was trained.
`part.safetensors` holds its tensors. Rows of the head and embeddings are the model's own, named by
token ids, not stored again.

With a part of another model the text would still be right, but the drafts useless. So the model is
recognised by what it computes: some numbers of its hidden states after a fixed text, which kernels
and precision change within rounding. Unless a part is named, it is looked for in the folders inside
the model's own, then among those of the package. Does not know how a part drafts or learns.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import safetensors
import torch
from safetensors.torch import load_file, save
from torch import Tensor

from ..core.door import shown
from ..core.files import is_there, write_whole
from ..core.json_text import from_json
from ..core.schema import Unfit, made
from ..errors import BrokenCheckpoint, OptionError, nearest
from ..model.layered import LayeredModel
from ..model.opening import folder_of
from ..model.operations import for_guesses
from ..model.partial_head import PartialHead, head_over
from .kinds import KINDS, Described, command_for

SCHEMA = 1
DESCRIPTION, TENSORS = "part.json", "part.safetensors"
SHIPPED = Path(__file__).parent / "shipped"  # a folder for each part that comes with the package
T = TypeVar("T")
# Relative distance of two signatures of one model: bfloat16 gives 0.01, the demo in 8 bits 0.11 and
# in 4 bits 0.05 to 0.08; another model gives about 1.
_NEAR = 0.2
_SIZES = ("family", "layers", "width", "vocabulary")  # of a model, in its signature
_DESCRIBED = ("base", "settings", "facts")  # of a part, in its description
_NAMED = ("schema", "kind")


@dataclass(frozen=True, eq=False)
class TrainedPart:
    """A trained part as it lies on the disk."""

    kind: str
    base: Mapping[str, Any]
    """What `signature` said of the model that it was trained on."""
    settings: Mapping[str, Any]
    """How it is built; what that means is the kind's business."""
    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Where it comes from: command, data, what was measured."""

    def require(self, kind: str, model: LayeredModel) -> None:
        """Raise unless this is a part of that kind for that model."""
        if self.kind != kind:
            raise OptionError(f"this part is of kind {self.kind!r}; name the folder of a {kind!r}")
        if difference := unlike(self.base, signature(model)):
            raise OptionError(
                f"this {kind} was trained on another model ({difference}), so its drafts would be "
                f"useless; make one for this model: {command_for(kind)}"
            )

    def save(self, folder: Path, eight_bits: bool = False) -> None:
        """Write the folder; the tensors first, so that a description never lacks them. `eight_bits`
        halves the size: each row of a matrix as whole numbers of up to 127 times a scale."""
        described: dict[str, Any] = {"schema": SCHEMA, "kind": self.kind}
        described |= {name: dict(getattr(self, name)) for name in _DESCRIBED}
        stored = {name: tensor.contiguous() for name, tensor in _stored(self.tensors, eight_bits)}
        write_whole(folder / TENSORS, save(stored))
        write_whole(folder / DESCRIPTION, (json.dumps(described, indent=1) + "\n").encode())


def load_part(folder: str | os.PathLike[str]) -> TrainedPart:
    """The part in a folder."""
    path = Path(folder).expanduser()
    if not is_there(path / DESCRIPTION):
        shipped = nearest(str(folder), [path.name for path in shipped_parts()])
        raise OptionError(
            f"{folder} is no part: it has no {DESCRIPTION}. Name a folder that `selfspec train` "
            f"wrote, or a part that comes with selfspec ({shipped})"
        )
    try:
        said = from_json((path / DESCRIPTION).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _unreadable(folder, error) from error
    version, kind = (said.get(name) if isinstance(said, dict) else None for name in _NAMED)
    if version != SCHEMA or not isinstance(kind, str) or kind not in KINDS:
        raise OptionError(
            f"the part in {folder} is of schema {shown(version)} and kind {shown(kind)}; this "
            f"version reads schema {SCHEMA} and {', '.join(KINDS)}. Train it again, or use the "
            "version that wrote it"
        )
    if not is_there(path / TENSORS):  # a pipe would be waited for
        raise BrokenCheckpoint(f"the part in {folder} has no file {TENSORS}; copy it again")
    try:
        described = made(Described, said)
        tensors = _restored(load_file(path / TENSORS))
        KINDS[kind].check(described, tensors)
    except Unfit as error:
        raise BrokenCheckpoint(
            f"the part in {folder} is no {kind}: {error}; copy or train it again"
        ) from error
    except (OSError, ValueError, KeyError, safetensors.SafetensorError) as error:
        raise _unreadable(folder, error) from error
    return TrainedPart(kind, vars(described.base), described.settings, tensors, described.facts)


def _unreadable(folder: object, error: Exception) -> BrokenCheckpoint:
    return BrokenCheckpoint(
        f"the part in {folder} cannot be read ({error}); copy or train it again"
    )


_WHOLE, _SCALE = ".whole", ".scale"  # after the name of a matrix that is stored in eight bits


def _stored(tensors: Mapping[str, Tensor], eight_bits: bool) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors.items():
        if eight_bits and tensor.dim() == 2 and tensor.is_floating_point():
            scale = (tensor.float().abs().amax(1) / 127).clamp(min=1e-8)
            yield name + _WHOLE, (tensor.float() / scale[:, None]).round().to(torch.int8)
            yield name + _SCALE, scale
        else:
            yield name, tensor


def _restored(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    restored = {}
    for name, tensor in tensors.items():
        plain = name.removesuffix(_WHOLE)
        if plain != name:
            scale = tensors[plain + _SCALE]
            if tensor.dim() != 2 or scale.shape != tensor.shape[:1]:
                raise Unfit(f"the tensor {name!r} and its scales are no matrix of eight bits")
            restored[plain] = (tensor.float() * scale[:, None]).half()
        elif not name.endswith(_SCALE):
            restored[name] = tensor
    return restored


def shipped_parts() -> list[Path]:
    """The parts that come with the package."""
    return sorted(path.parent for path in SHIPPED.glob(f"*/{DESCRIPTION}"))


def find_part(
    source: str | os.PathLike[str] | TrainedPart | None, kind: str, model: LayeredModel
) -> TrainedPart:
    """The part of that folder or shipped name. None: the one that comes with this model."""
    if source is None:
        part = shipped_part(kind, model)
        if part is None:
            raise OptionError(
                f"no {kind} for this model comes with selfspec or lies in a folder inside the "
                f"model's own, so it needs part=FOLDER; make one: {command_for(kind)}"
            )
        return part
    if isinstance(source, TrainedPart):
        source.require(kind, model)
        return source
    if not isinstance(source, str | os.PathLike):
        raise OptionError(
            f"part={shown(source)} is neither a folder nor the name of a part; give one of them"
        )
    return _loaded(part_folder(source), kind, model)


def part_folder(source: str | os.PathLike[str]) -> Path:
    """The folder of a part: that of a shipped name, or the one that is named."""
    shipped = SHIPPED / source
    named = isinstance(source, str) and is_there(shipped / DESCRIPTION)
    return shipped if named else Path(source)


def _loaded(folder: Path, kind: str, model: LayeredModel) -> TrainedPart:
    """The part in a folder, read and compared with the model once for each time it was written."""
    description = folder.expanduser() / DESCRIPTION
    written = description.stat().st_mtime_ns if is_there(description) else 0

    def read() -> TrainedPart:
        part = load_part(folder)
        part.require(kind, model)
        return part

    return model.once((load_part, str(description), kind, written), read)


def shipped_part(kind: str, model: LayeredModel) -> TrainedPart | None:
    """The part of that kind that comes with this model or, for this model, with selfspec. Looked
    for once."""

    def look() -> TrainedPart | None:
        own: dict[str, Any] | None = None
        home = folder_of(model)
        beside = sorted(home.glob(f"*/{DESCRIPTION}")) if home else []
        for folder in (*(path.parent for path in beside), *shipped_parts()):
            said = _described(folder)
            if said is not None and said.kind == kind:
                own = own or signature(model)
                if not unlike(vars(said.base), own):
                    return _loaded(folder, kind, model)
        return None

    return model.once((shipped_part, kind), look)


def _described(folder: Path) -> Described | None:
    """What a folder says of itself; None if it is no part of ours."""
    if not is_there(folder / DESCRIPTION):  # a pipe would be waited for
        return None
    try:
        return made(Described, from_json((folder / DESCRIPTION).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None


def ready(
    part: TrainedPart, model: LayeredModel, make: Callable[[TrainedPart, LayeredModel], T]
) -> T:
    """`make(part, model)`, made once for a model and kept as long as that."""
    return model.once((make, part), lambda: make(part, model))


def partial_head_of(part: TrainedPart, model: LayeredModel) -> PartialHead:
    """The rows of the model's head that the part can say."""
    ops = for_guesses(model.ops, model.dtype, model.device)
    return head_over(model, part.tensors["vocabulary"].to(model.device).long(), ops)


# ------------------------------------------------------------------------------- recognising a base


@torch.inference_mode()
def signature(model: LayeredModel) -> dict[str, Any]:
    """What tells a model from others: its sizes, and some of what it computes."""
    shape = model.shape
    tokens = torch.arange(1, 9, device=model.device) * 7 % shape.vocabulary
    cache = model.new_cache(1, len(tokens))
    layout = cache.layout([len(tokens)])
    x = model.run(model.embed(tokens), model.full_plan, cache, layout)
    x = model.states(x)[1:].float()
    some = (x / x.pow(2).mean(-1, keepdim=True).sqrt()).flatten()[:: max(1, x.numel() // 48)][:48]
    sizes = {name: getattr(shape, name) for name in _SIZES}
    return {**sizes, "values": [round(value, 5) for value in some.tolist()]}


def unlike(one: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """In what two signatures differ; None if they are of one model."""
    for name in _SIZES:
        if one.get(name) != other.get(name):
            return f"its {name} was {one.get(name)}, this one's is {other.get(name)}"
    a, b = torch.tensor(one["values"]), torch.tensor(other["values"])
    distance = float((a - b).norm() / b.norm().clamp(min=1e-6)) if a.shape == b.shape else 1.0
    if distance < _NEAR:
        return None
    return f"of the same shape, with other weights: hidden states differ by {distance:.0%}"
