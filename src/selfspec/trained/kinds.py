"""The kinds of trained parts: what each holds, and which drafter takes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class PartKind:
    """What all parts of one kind have in common."""

    drafter: str
    """The drafter that takes such a part, by name."""
    tensors: tuple[str, ...]
    """Tensors that every such part holds. There may be more, as many as it has blocks or layers."""
    settings: tuple[str, ...]
    """What its settings say."""


KINDS: Mapping[str, PartKind] = {
    "draft-head": PartKind(
        drafter="draft-head",
        tensors=("vocabulary", "enter.weight", "again.weight"),
        settings=("layers", "block"),
    ),
    "exit-adapter": PartKind(
        drafter="early-exit",
        tensors=("vocabulary", "enter.weight"),
        settings=("exit", "blocks", "block"),
    ),
    "draft-lora": PartKind(
        drafter="layer-skip", tensors=("vocabulary",), settings=("attention", "mlp", "rank")
    ),
    "successors": PartKind(
        drafter="recycle",
        tensors=(
            *("tokens.keys", "tokens.successors", "tokens.chances"),
            *("pairs.keys", "pairs.successors", "pairs.chances"),
        ),
        settings=("vocabulary",),
    ),
}
