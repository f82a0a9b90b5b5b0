"""A folder that is loaded again: the same bits without transformers' model, and nothing remembered
that no longer holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from selfspec import LLM
from selfspec.errors import BrokenCheckpoint, SelfCheckFailed
from selfspec.model import remembered, self_check
from selfspec.model.load import loading
from selfspec.model.probing import probe_logits
from selfspec.testing import tiny_model
from tests.model.variants import VARIANTS

# families and options that are remembered
SIMPLE = [
    "llama", "llama-tied", "llama-biases", "llama-rope-linear", "llama-rope-llama3",
    "llama-rope-yarn", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi3", "smollm3", "olmo2",
    "granite",
]  # fmt: skip
UNUSUAL = ["gpt2", "mixtral", "llama-rope-dynamic", "cohere", "gemma3n", "gemma4-small"]


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(remembered, "cache_root", lambda: tmp_path / "cache")
    return tmp_path / "cache" / "loaded"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which models were loaded through transformers."""
    names: list[str] = []
    usual = loading._load_weights

    def counted(source: Any, *rest: Any) -> Any:
        names.append(source.name)
        return usual(source, *rest)

    monkeypatch.setattr(loading, "_load_weights", counted)
    return names


def saved(folder: Path, variant: str = "llama", dtype: torch.dtype = torch.float32) -> Path:
    family, options = VARIANTS[variant]
    tiny_model(family, **options).to(dtype).save_pretrained(folder)
    return folder


def bits(llm: LLM, length: int = 40) -> tuple[torch.Tensor, list[int]]:
    return probe_logits(llm.model), list(llm.generate([1, 2, 3], max_new_tokens=length).tokens)


@pytest.mark.parametrize("variant", [*SIMPLE, *UNUSUAL])
def test_the_second_load_gives_the_same_bits(
    variant: str, tmp_path: Path, reads: list[str]
) -> None:
    """A weight, a norm's eps or a frequency that is remembered a little differently."""
    folder = saved(tmp_path / "model", variant)
    first, second = LLM.from_pretrained(folder), LLM.from_pretrained(folder)
    assert len(reads) == (1 if variant in SIMPLE else 2), "not loaded in the way it should be"
    for one, other in zip(bits(first), bits(second), strict=True):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))
    assert first.info == second.info
    assert (first.eos, first.default_sampling) == (second.eos, second.default_sampling)


def test_half_precision_on_disk(tmp_path: Path, reads: list[str]) -> None:
    """Weights read as they are stored, not as float32."""
    folder = saved(tmp_path / "model", dtype=torch.bfloat16)
    first, second = LLM.from_pretrained(folder), LLM.from_pretrained(folder)
    assert len(reads) == 1
    assert torch.equal(bits(first)[0], bits(second)[0])


def test_a_changed_file_is_noticed(tmp_path: Path, reads: list[str]) -> None:
    """Other weights or another configuration in a folder of which the check is remembered."""
    folder = saved(tmp_path / "model")
    LLM.from_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][0] += 1
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    changed = LLM.from_pretrained(folder)
    assert len(reads) == 2, "the old verdict was used"
    assert torch.equal(bits(changed)[0], bits(LLM.from_pretrained(folder))[0])
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config + " ")
    LLM.from_pretrained(folder)
    assert len(reads) == 3
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-10])
    with pytest.raises(BrokenCheckpoint, match="truncated"):
        LLM.from_pretrained(folder)


def test_other_options_or_threads_are_another_load(tmp_path: Path, reads: list[str]) -> None:
    """A verdict about one kind of weights, or one number of threads, used for another."""
    folder = saved(tmp_path / "model")
    before = torch.get_num_threads()
    try:
        for options in ({}, {"weights": "float32"}, {"kernel": "plain"}, {"threads": before + 1}):
            LLM.from_pretrained(folder, **options)
    finally:
        torch.set_num_threads(before)
    assert len(reads) == 4


def test_a_failed_check_is_not_remembered(
    tmp_path: Path, cache: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second load of a model that was refused."""
    folder = saved(tmp_path / "model")
    with monkeypatch.context() as patched:
        patched.setattr(self_check, "TOLERANCE", {torch.float32: -1.0})
        for _ in range(2):
            with pytest.raises(SelfCheckFailed):
                LLM.from_pretrained(folder)
    assert len(reads) == 2
    assert not cache.exists() or not list(cache.iterdir())


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"key": "another"}'])
def test_a_damaged_record_is_made_anew(
    text: str, tmp_path: Path, cache: Path, reads: list[str]
) -> None:
    """A record cut short by a full disk that stops every later load."""
    folder = saved(tmp_path / "model")
    LLM.from_pretrained(folder)
    (record,) = cache.glob("*.json")
    record.write_text(text)
    LLM.from_pretrained(folder)
    LLM.from_pretrained(folder)
    assert len(reads) == 2


def test_a_cache_that_cannot_be_written(tmp_path: Path, cache: Path, reads: list[str]) -> None:
    """An error where only time can be saved."""
    cache.parent.write_text("a file where a folder should be")
    folder = saved(tmp_path / "model")
    LLM.from_pretrained(folder)
    LLM.from_pretrained(folder)
    assert len(reads) == 2


def test_the_tokenizer_is_the_same(demo_path: Path) -> None:
    """Loaded by its class alone, without what transformers would have looked up around it."""
    first, second = LLM.from_pretrained(demo_path), LLM.from_pretrained(demo_path)
    turn = [{"role": "user", "content": "Hello, world!  \n\tñ"}]
    assert first.encode_chat(turn) == second.encode_chat(turn)
    assert type(first.tokenizer) is type(second.tokenizer)
    assert first.tokenizer is not None and second.tokenizer is not None
    assert first.tokenizer.special_tokens_map == second.tokenizer.special_tokens_map
