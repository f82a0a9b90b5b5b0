"""What a config.json may say: kinds and ranges of what is read from it before transformers reads
it. It is somebody else's file. Does not know families."""

from __future__ import annotations

import stat
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ...core.schema import Unfit, made
from ...errors import BrokenCheckpoint
from .checkpoint import AGAIN

_Size = int | list[int] | None


@dataclass(frozen=True)
class Config:
    """The entries that are looked at here. All others are left to transformers."""

    model_type: str | None = None
    architectures: list[str] | None = None
    auto_map: dict[str, Any] | None = None
    quantization_config: dict[str, Any] | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    eos_token_id: _Size = None
    vocab_size: _Size = None
    hidden_size: _Size = None
    n_embd: _Size = None
    num_hidden_layers: _Size = None
    n_layer: _Size = None
    num_attention_heads: _Size = None
    n_head: _Size = None
    num_key_value_heads: _Size = None
    head_dim: _Size = None
    intermediate_size: _Size = None
    n_inner: _Size = None
    max_position_embeddings: _Size = None
    n_positions: _Size = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            sizes = [value] if isinstance(value, int) else value
            if name == "eos_token_id" or not isinstance(sizes, list):
                continue
            if any(isinstance(each, int) and not 0 < each < 1 << 40 for each in sizes):
                raise Unfit(f"{name} is {value}, and no model has such a size")

    @property
    def layers(self) -> int:
        """How many it promises; 0 where it says so otherwise."""
        said = [each for each in (self.num_hidden_layers, self.n_layer) if isinstance(each, int)]
        return max(said, default=0)


_READ = tuple(each.name for each in fields(Config))


def checked(raw: dict[str, Any], path: Path) -> Config:
    """The entries of a config.json, or BrokenCheckpoint."""
    try:
        return made(Config, {name: raw[name] for name in _READ if name in raw}, path.name)
    except Unfit as error:
        raise BrokenCheckpoint(f"{path} cannot be a model's: {error}. {AGAIN}") from error


def require_files(folder: Path) -> None:
    """Raise if the folder holds a pipe or a device: reading one could wait for ever."""
    for path in folder.iterdir():
        try:
            mode = path.stat().st_mode
        except OSError:  # a link to nothing, which is missed only if it is needed
            continue
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise BrokenCheckpoint(
                f"{path} is a pipe, a socket or a device, and reading it could wait for ever. "
                f"Remove it. {AGAIN}"
            )
