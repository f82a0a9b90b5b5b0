"""Who takes part in `scripts/bench plain`: peers by name, each also with a kind of weights:
`selfspec`, `selfspec:int8`, `xllamacpp:stored`. Starts nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from selfspec.bench.peers import PeerSpec, choose
from selfspec.errors import OptionError, nearest

AUTO, STORED = "auto", "stored"
WEIGHTS = ("bfloat16", "int8", "int4", STORED)


@dataclass(frozen=True)
class Entry:
    """A peer with a kind of weights; `AUTO` is what the run's dtype says."""

    spec: PeerSpec
    weights: str = AUTO

    @property
    def name(self) -> str:
        return self.spec.name if self.weights == AUTO else f"{self.spec.name}:{self.weights}"


def entries(names: Sequence[str], known: Mapping[str, PeerSpec]) -> list[Entry]:
    """Those of these names, each once."""
    found = []
    for text in names:
        name, colon, weights = text.partition(":")
        if colon and weights not in WEIGHTS:
            raise OptionError(f"{text}: unknown weights {weights!r}: {nearest(weights, WEIGHTS)}")
        (spec,) = choose([name], known)
        found.append(Entry(spec, weights or AUTO))
    return list(dict.fromkeys(found))


def source_of(entry: Entry, folder: Path, file: Path | None) -> Path:
    """What it loads: the model's folder, or the GGUF file whose weights are taken as they are."""
    if entry.weights != STORED:
        return folder
    if file is None:
        raise OptionError(
            f"{entry.name} runs a GGUF file as it is, and this model is a folder; name a .gguf "
            "file with --model, or leave it out of --peers"
        )
    return file
