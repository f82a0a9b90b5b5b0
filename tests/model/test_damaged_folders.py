"""Model folders of other people that promise what is not there, point elsewhere or wait for ever:
a clear error in a second, before memory is taken. `tests/test_fuzz.py` damages them by chance."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType

from selfspec import LLM
from selfspec.errors import BrokenCheckpoint, ModelError, OptionError, PromptError
from selfspec.model.exporting import export
from selfspec.model.load import loading, source
from selfspec.model.load.checkpoint import INDEX, WEIGHTS
from selfspec.testing import tiny_model, tiny_tokenizer
from tests.fuzz.doors import in_time
from tests.model.gguf_files import write


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    "changes",
    [
        {"vocab_size": 10**8},
        {"hidden_size": 2**16, "intermediate_size": 2**18},
        {"num_hidden_layers": 4000},
        {"num_hidden_layers": 10**9},
        {"intermediate_size": 10**9},
    ],
    ids=str,
)
def test_a_config_that_promises_too_much(
    folder: Path, changes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """27 GB taken for a file of 1 MB, before shapes were compared; or a model of a thousand million
    layers that is built for hours."""
    edit(folder / "config.json", **changes)
    monkeypatch.setattr(loading, "_load_weights", lambda *_: pytest.fail("memory was taken"))
    begin = time.process_time()
    with pytest.raises(BrokenCheckpoint, match="promises"):
        LLM.from_pretrained(folder)
    assert time.process_time() - begin < 5, "it was looked at for long"


@pytest.mark.parametrize(
    "changes",
    [
        {"num_attention_heads": 0},
        {"num_key_value_heads": 0},
        {"vocab_size": 0},
        {"vocab_size": -5},
        {"hidden_size": 2.5},
        {"hidden_size": True},
        {"num_hidden_layers": "4"},
        {"dtype": "float99"},
        {"dtype": 5},
        {"torch_dtype": []},
        {"architectures": 5},
        {"architectures": [5]},
        {"model_type": ["llama"]},
        {"auto_map": 5},
        {"quantization_config": 5},
        {"eos_token_id": "two"},
        {"hidden_act": "nothing"},
    ],
    ids=str,
)
def test_a_config_that_says_nonsense(folder: Path, changes: dict[str, Any]) -> None:
    """Tracebacks from inside transformers, or a division by zero."""
    edit(folder / "config.json", **changes)
    with pytest.raises(ModelError):
        LLM.from_pretrained(folder).generate([5, 6], max_new_tokens=2)


@pytest.mark.parametrize("value", [0, -1, 1 << 40])
@pytest.mark.parametrize("name", ["num_attention_heads", "vocab_size", "num_hidden_layers"])
def test_a_size_that_no_model_has_is_named(folder: Path, name: str, value: int) -> None:
    """Whatever fails first inside, instead of the entry that is wrong."""
    edit(folder / "config.json", **{name: value})
    with pytest.raises(BrokenCheckpoint, match=f"{name} is {value}, and no model has such a size"):
        LLM.from_pretrained(folder)


@pytest.mark.parametrize(
    "outside", ["../other.safetensors", "/etc/passwd", "below/x.safetensors", "..", ""]
)
def test_an_index_that_points_elsewhere(folder: Path, outside: str) -> None:
    """A file of the user's that somebody else's index names is read."""
    (folder / WEIGHTS).rename(folder.parent / "other.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": outside}}))
    with pytest.raises(BrokenCheckpoint, match=r"not in its folder|lacks 1"):
        LLM.from_pretrained(folder)


def deep(path: Path) -> None:
    path.write_text('{"a":' * 1000 + "1" + "}" * 1000)


def deeper(path: Path) -> None:
    path.write_text("[" * 100_000)


@pytest.mark.parametrize("damage", [deep, deeper])
def test_a_config_nested_too_deep(folder: Path, damage: Callable[[Path], None]) -> None:
    """RecursionError."""
    damage(folder / "config.json")
    with pytest.raises(ModelError):
        LLM.from_pretrained(folder)


@pytest.mark.parametrize("name", ["config.json", WEIGHTS, "tokenizer.json"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_what_is_no_file_is_not_waited_for(folder: Path, name: str, kind: str) -> None:
    """A pipe in the place of a file: the load never ends. A device without an end fills the
    memory."""
    (folder / name).unlink()
    os.mkfifo(folder / name) if kind == "pipe" else (folder / name).symlink_to("/dev/zero")
    with pytest.raises(BrokenCheckpoint, match="pipe, a socket or a device"):
        LLM.from_pretrained(folder)


def test_a_gguf_file_in_capitals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that can be read is answered with: pass the folder."""
    path, asked = tmp_path / "x.GGUF", list[Path]()
    path.write_bytes(b"GGUF")
    monkeypatch.setattr(source, "converted", lambda path: asked.append(path) or tmp_path)
    assert source.locate(path, None, None, False).folder == tmp_path and asked == [path]
    with pytest.raises(OptionError, match="there is no file"):
        source.locate(tmp_path / "y.GGUF", None, None, False)


def test_a_gguf_file_that_calls_itself_by_no_text(tmp_path: Path) -> None:
    """A decoder's own error, when a loader asks the file for its architecture."""
    path = tmp_path / "tiny.gguf"
    write(path, GGMLQuantizationType.Q8_0)
    whole, name = path.read_bytes(), b"general.architecture"
    start = whole.index(name) + len(name) + 4 + 8  # its kind and its length lie between
    path.write_bytes(whole[:start] + b"\xff" + whole[start + 1 :])
    with pytest.raises(BrokenCheckpoint, match="truncated or corrupt"):
        LLM.from_pretrained(path)


def test_a_gguf_file_with_a_list_without_end(tmp_path: Path) -> None:
    """Bytes that are read behind the file's end, each as an empty array, a thousand million
    times."""
    path = tmp_path / "tiny.gguf"
    write(path, GGMLQuantizationType.Q8_0)
    whole, name = path.read_bytes(), b"tokenizer.ggml.tokens"
    start = whole.index(name) + len(name) + 4  # the kind of a list stands before
    words = (0).to_bytes(4, "little") + (1 << 30).to_bytes(8, "little")  # so many bytes
    path.write_bytes(whole[:start] + words + whole[start + 12 :])
    for read in (LLM.from_pretrained, lambda path: export(path, "llama.cpp", 1, tmp_path / "new")):
        with in_time(), pytest.raises(BrokenCheckpoint, match="goes on to byte"):
            read(path)


def test_a_template_that_always_fails(folder: Path) -> None:
    """A model that cannot be loaded since its template raises what no template should: only a
    chat needs it."""
    (folder / "chat_template.jinja").write_text("{{ -[] }}")
    llm = LLM.from_pretrained(folder)
    assert llm.generate([5, 6], max_new_tokens=2).tokens
    with pytest.raises(PromptError, match="bad operand type"):
        llm.chat([{"role": "user", "content": "hi"}])


def test_a_whole_folder_is_loaded(folder: Path) -> None:
    """The checks above refusing everything."""
    llm = LLM.from_pretrained(folder)
    assert llm.generate([5, 6], max_new_tokens=2, draft=None).tokens
    assert llm.model.dtype == torch.float32
