"""The folder behind what a user names: the demo, a folder, a GGUF file or a hub name.

It knows which files a model has and how to ask a hub for them, but not what is in them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub

from selfspec.errors import OptionError, Unavailable, UnsupportedModel, nearest

from ...core.door import shown
from ..compute.grouped import STORED
from .checkpoint import INDEX, WEIGHTS, first_line, read_json
from .config import require_files
from .demo import demo_folder, demo_gguf
from .gguf_file import converted
from .gguf_stored import stored_folder

DEMO = "demo"
_LONGEST = 4000  # characters of a path

# all but the weights of a hub repository
_SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")


@dataclass(frozen=True)
class Source:
    """A folder with at least a model's small files.

    `hub` says how to ask for the rest, if the folder belongs to the hub's cache.
    """

    name: str
    folder: Path
    trust: bool
    hub: dict[str, Any] | None = None
    blocks: bool = False
    """Whether the weights are in a GGUF file, and the folder says where."""
    notes: tuple[str, ...] = ()
    """What is to be said of how the weights are stored."""

    def fetch_weights(self, one: str | None = None) -> None:
        """Download a hub model's weights into its cache folder: all of them, or `one` file."""
        if self.hub is None:
            return
        index = self.folder / INDEX
        shards = read_json(index).get("weight_map", {}) if index.is_file() else {}
        named = {Path(str(shard)).name for shard in shards.values()}
        wanted = [one] if one else sorted(named) or [WEIGHTS]
        _snapshot(self.name, wanted, self.hub)
        missing = [file for file in wanted if not (self.folder / file).is_file()]
        # without a network, or without the file, the hub library raises nothing
        if missing:
            raise Unavailable(
                f"{self.name} is cached without {missing[0]} and it could not be fetched. Without "
                f"a network, run `hf download {self.name}` where there is one and make that cache "
                "visible here with the environment variable HF_HOME. If the repository has its "
                "weights as pickles only, convert it first: selfspec reads safetensors."
            )


def refuse_revision(revision: str | None, kind: str) -> None:
    if revision is not None:
        raise OptionError(
            f"revision={revision!r} names a version on the hub, and {kind} has none. Leave it out."
        )


def locate(
    model: str | os.PathLike[str],
    revision: str | None,
    token: str | bool | None,
    trust: bool,
    weights: str | None = None,
) -> Source:
    """The demo, a folder, a GGUF file or a hub name, in this order. A path is not a hub name.

    `weights`: how our kernels are to store the weights, if they run the model. Then a GGUF file is
    not expanded, unless float32 is asked for.
    """
    if not isinstance(model, str | os.PathLike):
        raise OptionError(
            f"a model is {DEMO!r}, a folder, a hub name, a transformers PreTrainedModel or a PEFT "
            f"model, not a {type(model).__name__}."
        )
    name, path = os.fspath(model), Path(model).expanduser()
    if "\0" in name or len(name) > _LONGEST:
        raise OptionError(
            f"the model's name {shown(name)} holds a zero byte, or is longer than any path. Name "
            f"{DEMO!r}, a folder or a hub name (owner/name)."
        )
    if not name:
        raise OptionError(
            f"the model's name is empty. Name {DEMO!r}, a folder or a hub name (owner/name)."
        )
    if name == DEMO and isinstance(model, str):
        refuse_revision(revision, "the demo model")
        if weights == STORED:
            return _gguf(name, demo_gguf(), trust, weights)
        return Source(name, demo_folder(), trust)
    if path.is_dir():
        refuse_revision(revision, "a folder")
        require_files(path)
        return Source(name, path, trust)
    is_gguf = path.suffix.lower() == ".gguf"
    if is_gguf and path.is_file():
        refuse_revision(revision, "a GGUF file")
        return _gguf(name, path, trust, weights)
    if path.is_file():
        raise OptionError(
            f"{path} is a file. Pass the folder that holds config.json and the weights, or a .gguf "
            "file."
        )
    if is_gguf:
        raise OptionError(f"there is no file {path}.")
    looks_like_a_path = path.is_absolute() or name.startswith(("~", ".")) or name.count("/") > 1
    if looks_like_a_path or not isinstance(model, str):
        raise OptionError(
            f"there is no folder {path}. A model is {DEMO!r}, a folder with config.json, or a hub "
            "name (owner/name)."
        )
    hub = {"revision": revision, "token": token}
    patterns = [*_SMALL_FILES, *(["*.py"] if trust else [])]
    return Source(name, _snapshot(name, patterns, hub), trust, hub)


def _gguf(name: str, path: Path, trust: bool, weights: str | None) -> Source:
    """A GGUF file, as it is or expanded."""
    if weights in (None, "float32"):
        return Source(name, converted(path), trust)
    folder, why = stored_folder(path)
    if not why:
        return Source(name, folder, trust, blocks=True)
    if weights == STORED:
        raise UnsupportedModel(
            f"{path} cannot be run as it is stored: {why}. Leave weights at 'auto', which expands "
            "it to float32, or use another quantisation of the model (Q4_K_M, Q8_0)."
        )
    note = f"{path.name} was expanded to float32: {why}"
    return Source(name, converted(path, why), trust, notes=(note,))


def _snapshot(name: str, patterns: list[str], hub: dict[str, Any]) -> Path:
    """The cached folder of a hub model with these files. Works from the cache without a network."""
    from huggingface_hub import errors as hub_errors  # here: a folder needs no network library

    options = {"allow_patterns": patterns, "ignore_patterns": ["*/*"], **hub}
    try:
        return Path(huggingface_hub.snapshot_download(name, **options))
    except hub_errors.HFValidationError as error:
        raise OptionError(
            f"{name!r} is no folder and cannot be a hub name ({error}); {nearest(name, [DEMO])}"
        ) from error
    except hub_errors.RevisionNotFoundError as error:
        raise OptionError(
            f"{name} has no revision {hub['revision']!r} on the hub. Name a branch, tag or commit."
        ) from error
    except hub_errors.RepositoryNotFoundError as error:  # a gated one too
        raise Unavailable(
            f"{name} is not on the hub, or is private or gated for you, and is not cached. Check "
            "the name, accept its terms, and log in (`hf auth login`) or pass token=."
        ) from error
    # httpx's or requests' error, by version
    except (OSError, RuntimeError, hub_errors.HTTPError) as error:  # type: ignore[attr-defined]
        revision = f" --revision {hub['revision']}" if hub["revision"] else ""
        raise Unavailable(
            f"{name} could not be fetched from the hub ({first_line(error)}) and is not cached in "
            f"full. Where there is a network run `hf download {name}{revision}`, and make that "
            "cache visible here with the environment variable HF_HOME. "
            f"{DEMO!r} is the built-in model."
        ) from error


def cached_folder(name: str) -> Path | None:
    """Where a hub model's small files are, if they are cached already."""
    from huggingface_hub import errors as hub_errors

    options: dict[str, Any] = {"allow_patterns": list(_SMALL_FILES), "local_files_only": True}
    try:
        return Path(huggingface_hub.snapshot_download(name, **options))
    except (hub_errors.LocalEntryNotFoundError, hub_errors.HFValidationError):
        return None
