"""Reading a tokenizer with transformers: a folder's own, or the one that a caller names."""

from __future__ import annotations

import os

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ...errors import BrokenCheckpoint, OptionError, Unavailable
from .checkpoint import AGAIN, first_line, quiet_transformers
from .source import Source, locate

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
)


def asked_tokenizer(
    given: str | os.PathLike[str] | PreTrainedTokenizerBase | None,
    token: str | bool | None,
    trust: bool,
) -> PreTrainedTokenizerBase | None:
    """The tokenizer a caller asked for, by name or as an object."""
    if given is None or isinstance(given, PreTrainedTokenizerBase):
        return given
    source = locate(given, None, token, trust)
    tokenizer = read_tokenizer(source)
    if tokenizer is None:
        names = ", ".join(_TOKENIZER_FILES)
        raise OptionError(f"tokenizer={str(given)!r}: {source.folder} holds none of {names}.")
    return tokenizer


def read_tokenizer(source: Source) -> PreTrainedTokenizerBase | None:
    """A folder's tokenizer, or None: such a model still runs on token ids."""
    if not any((source.folder / file).is_file() for file in _TOKENIZER_FILES):
        return None
    try:
        with quiet_transformers(bars=True):
            tokenizer = AutoTokenizer.from_pretrained(source.folder, trust_remote_code=source.trust)
    except ImportError as error:
        raise needs_package(f"the tokenizer of {source.name}", error) from error
    except Exception as error:
        raise BrokenCheckpoint(
            f"the tokenizer in {source.folder} cannot be read: {first_line(error)}. {AGAIN}"
        ) from error
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    return tokenizer


def needs_package(name: str, error: ImportError) -> Unavailable:
    return Unavailable(f"{name} needs a package that is not installed: {first_line(error)}")
