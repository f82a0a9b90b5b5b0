"""A draft model of another engine is our early exit: the same logits, in a folder that transformers
reads and in a GGUF file."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from selfspec import LLM, OptionError, UnsupportedModel
from selfspec.model.compute.plan import LayerPlan
from selfspec.model.exporting import export
from selfspec.model.from_transformers import from_transformers
from selfspec.model.layered import LayeredModel
from selfspec.testing import tiny_model, tiny_tokenizer
from tests.model.test_gguf import write

TEXT = [5, 70, 81, 5, 70, 9, 200, 33]
FAMILIES = ("llama", "gemma2", "gemma3_text", "smollm3", "qwen3_moe", "gpt_neox", "gpt2")


def our_exit(model: LayeredModel, layers: int) -> torch.Tensor:
    """The logits of our early exit."""
    cache = model.new_cache(1, len(TEXT))
    x = model.embed(torch.tensor(TEXT))
    with torch.inference_mode():
        x = model.run(x, LayerPlan(0, layers), cache, cache.layout([len(TEXT)]))
        return model.head(x).float()


def saved(folder: Path, family: str, **changes: Any) -> LayeredModel:
    model = tiny_model(family, **changes)
    model.save_pretrained(folder, max_shard_size="100KB")
    tiny_tokenizer().save_pretrained(folder)
    return from_transformers(model, check=False)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_folder_is_our_exit(tmp_path: Path, family: str) -> None:
    """A layer too many, the norm of another place, sliding windows of other layers: the draft
    agrees less often, and nobody sees why. Names of weights differ from family to family."""
    model = saved(tmp_path / "model", family)
    told = export(tmp_path / "model", "vllm", 3, tmp_path / "draft", tokens=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        draft = AutoModelForCausalLM.from_pretrained(tmp_path / "draft", dtype=torch.float32)
    assert draft.config.num_hidden_layers == 3
    with torch.inference_mode():
        found = draft.eval()(torch.tensor([TEXT])).logits[0]
    torch.testing.assert_close(found, our_exit(model, 3), atol=2e-4, rtol=1e-3)
    asked = told["speculative_config"]
    assert asked == {
        "method": "draft_model",
        "model": str(tmp_path / "draft"),
        "num_speculative_tokens": 4,
    }
    assert json.loads((tmp_path / "draft" / "draft.json").read_text()) == told
    assert (tmp_path / "draft" / "tokenizer.json").is_file()
    assert not (tmp_path / "draft" / "model.safetensors.index.json").exists()


def test_the_gguf_file_is_our_exit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that are copied wrongly, or a file that promises layers which it does not have."""
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path / "cache"))
    write(tmp_path / "model.gguf", gguf.GGMLQuantizationType.Q8_0, "llama", num_hidden_layers=5)
    told = export(tmp_path / "model.gguf", "llama.cpp", 3, tmp_path / "draft", tokens=6)
    file = Path(told["draft_model"])
    before, after = (gguf.GGUFReader(path) for path in (tmp_path / "model.gguf", file))
    assert after.fields["llama.block_count"].contents() == 3
    assert set(after.fields) == set(before.fields)
    kept = {tensor.name: tensor for tensor in after.tensors}
    assert {name.split(".")[1] for name in kept if name.startswith("blk.")} == {"0", "1", "2"}
    for tensor in before.tensors:
        if tensor.name in kept:
            assert np.array_equal(tensor.data, kept[tensor.name].data)
            assert tensor.tensor_type == kept[tensor.name].tensor_type
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole, draft = (LLM.from_pretrained(path) for path in (tmp_path / "model.gguf", file))
    assert our_exit(draft.model, 3).equal(our_exit(whole.model, 3))
    assert told["command"][-4:] == ["--spec-draft-model", str(file), "--spec-draft-n-max", "6"]


def test_what_cannot_be_exported_says_why(tmp_path: Path) -> None:
    """An exit that is none, a folder that is there, what llama.cpp cannot read."""
    saved(tmp_path / "model", "llama")
    for layer in (0, 4, 1.5):
        with pytest.raises(OptionError, match=r"layer=.*the model has 4 layers"):
            export(tmp_path / "model", "vllm", layer, tmp_path / "draft")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"no export to 'vlm'.*vllm"):
        export(tmp_path / "model", "vlm")
    with pytest.raises(OptionError, match="is no GGUF file"):
        export(tmp_path / "model", "llama.cpp", out=tmp_path / "draft")
    with pytest.raises(OptionError, match="is there already"):
        export(tmp_path / "model", "vllm", out=tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"model_type": "rwkv"}))
    with pytest.raises(UnsupportedModel, match="rwkv"):
        export(tmp_path / "model", "vllm", out=tmp_path / "draft")
    for kind in ("gemma3n_text", "gemma4_text"):
        other = json.dumps(config | {"model_type": kind, "num_kv_shared_layers": 2})
        (tmp_path / "model" / "config.json").write_text(other)
        with pytest.raises(UnsupportedModel, match=r"keys of others.*early-exit"):
            export(tmp_path / "model", "vllm", out=tmp_path / "draft")
    assert not (tmp_path / "draft").exists()
