"""PEFT adapters, merged into the base that they name, and refused where they do not fit. Tiny random models; needs peft."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from selfspec.errors import OptionError, Unavailable, UnsupportedModel
from selfspec.model.adapter import LayeredModel
from selfspec.model.loading import load
from selfspec.testing import tiny_model, tiny_tokenizer

TEXT = torch.arange(40)[None] + 5


@pytest.fixture
def saved(tmp_path):
    """A base with its tokenizer, an adapter of it, and the logits that peft computes with it."""
    peft = pytest.importorskip("peft")
    base = tiny_model("llama")
    base.save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    base.name_or_path = str(tmp_path / "base")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        adapted = peft.get_peft_model(base, config).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    with torch.inference_mode():
        return tmp_path, adapted(input_ids=TEXT).logits[0]


def test_an_adapter_gives_its_base_with_the_adapter_in_it(saved):
    """The base alone, the adapter twice, or a merge that our forward does not see."""
    folder, expected = saved
    loaded = load(folder / "adapter")
    ours = LayeredModel(loaded.model, owned=loaded.owned)
    cache = ours.new_cache(1, 64)
    logits = ours.forward(TEXT[0], cache, cache.place([40]))
    assert torch.allclose(logits, expected, atol=2e-4, rtol=1e-4)
    plain = load(folder / "base").model(input_ids=TEXT).logits[0]
    assert (plain - expected).abs().max() > 0.1, "the adapter does nothing, so merging it shows nothing"
    assert loaded.name == str(folder / "adapter") and loaded.owned and loaded.tokenizer is not None


def test_adapters_that_do_not_fit_are_refused(saved):
    """An adapter of another model, of which peft would leave out what has no place."""
    folder, _ = saved
    path = folder / "adapter" / "adapter_model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if "layers.3." in name)
    for changed, says in (
        ({**tensors, name.replace("layers.3.", "layers.9."): tensors[name].clone()}, "1 weights without a place in its base"),
        ({key: value for key, value in tensors.items() if key != name}, "1 weights missing from its file"),
        ({**tensors, name: torch.zeros(3, 5)}, "cannot be merged into.*size mismatch"),
    ):
        save_file(changed, path)
        with pytest.raises(UnsupportedModel, match=f"{says}(?s:.*)another base model"):
            load(folder / "adapter")


def test_what_an_adapter_needs_is_said(saved, monkeypatch):
    """A missing package or a pickle as a stray error; a base that is looked for in the adapter's own folder, for ever."""
    folder, _ = saved
    with monkeypatch.context() as patched, pytest.raises(Unavailable, match="pip install peft"):
        patched.setitem(sys.modules, "peft", None)
        load(folder / "adapter")
    config = folder / "adapter" / "adapter_config.json"
    content = json.loads(config.read_text())
    for base in (None, str(folder / "adapter")):
        config.write_text(json.dumps({**content, "base_model_name_or_path": base}))
        with pytest.raises(UnsupportedModel, match="nothing to put the adapter on"):
            load(folder / "adapter")
    config.write_text(json.dumps(content))
    (folder / "adapter" / "adapter_model.safetensors").rename(folder / "adapter" / "adapter_model.bin")
    with pytest.raises(UnsupportedModel, match="safetensors only"):
        load(folder / "adapter")


def test_a_live_adapter_is_not_read_through():
    """The base's weights taken from under an adapter: the text of another model, if the adapter changes little."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny_model("llama"), peft.LoraConfig(r=4, target_modules=["up_proj"])).get_base_model()
    with pytest.raises(UnsupportedModel, match=r"mlp\.up_proj is a Linear.*merge adapters"):
        LayeredModel(model.eval())


@pytest.mark.parametrize("wrap", ["class", "integers", "tensor subclass"])
def test_quantised_weights_are_refused_by_name(wrap):
    """Codes read as if they were weights."""
    model = tiny_model("llama")
    linear = model.model.layers[2].mlp.down_proj
    if wrap == "integers":
        linear.weight = torch.nn.Parameter(torch.zeros(64, 96, dtype=torch.int8), requires_grad=False)
    elif wrap == "class":
        other = torch.nn.Module()
        other.weight, other.bias = linear.weight, None
        model.model.layers[2].mlp.down_proj = other
    else:
        subclass = type("Quantised", (torch.Tensor,), {})
        linear.weight = torch.nn.Parameter(torch.zeros(64, 96).as_subclass(subclass), requires_grad=False)
    with pytest.raises(UnsupportedModel, match=r"mlp\.down_proj is a .*dequantize"):
        LayeredModel(model, check=False)


@pytest.mark.parametrize("device", ["balanced", {"": "cpu"}, {"model.layers": 0, "lm_head": "cpu"}])
def test_device_maps_are_refused(device):
    """A mistyped device, where a map was meant; or a model silently put on one of its places."""
    with pytest.raises(OptionError, match="whole on one"):
        load("demo", device=device)
