"""Linears that keep their own weights, such as quantised ones: called as modules inside our
forward.

Most tests use stand-ins, which need no library; those of libraries that are here run on tiny models
too.
"""

from __future__ import annotations

import importlib.util
import json
import warnings

import pytest
import torch
from torch import nn

import selfspec
from selfspec import LLM
from selfspec.cli import info as cli_info
from selfspec.errors import OptionError, SelfCheckFailed, Unavailable, UnsupportedModel
from selfspec.model import self_check
from selfspec.model.from_transformers import from_transformers
from selfspec.model.load import quantised
from selfspec.model.load.loading import load
from selfspec.model.measuring import product_modules, product_seconds, weight_bytes
from selfspec.model.partial_head import partial_head
from selfspec.testing import tiny_model, tiny_tokenizer

TEXT = torch.arange(40) + 5
pytestmark = pytest.mark.filterwarnings("ignore:products are left to modules")


class Codes(nn.Module):
    """A linear whose weights are 8-bit codes; `inputs` are rounded to 8 bits too where it is told
    so."""

    def __init__(self, linear, round_inputs=False):
        super().__init__()
        weight = (
            linear.weight.T
            if linear.weight.shape[0] != getattr(linear, "out_features", linear.weight.shape[0])
            else linear.weight
        )
        self.out_features, self.in_features = weight.shape
        self.register_buffer("scale", weight.abs().amax(1, keepdim=True) / 127)
        self.register_buffer("codes", (weight / self.scale).round().to(torch.int8))
        self.bias, self._round_inputs = linear.bias, round_inputs

    def forward(self, x):
        if self._round_inputs:
            step = x.abs().amax(-1, keepdim=True) / 127
            x = (x / step).round() * step
        return nn.functional.linear(x, self.codes * self.scale, self.bias)


def with_codes(family="llama", names=None, round_inputs=False, **changes):
    """A tiny model, its linears (or those called so) replaced."""
    model = tiny_model(family, **changes)
    for parent in [*model.modules()]:
        for name, child in [*parent.named_children()]:
            if isinstance(child, nn.Linear) and (name in names if names else name != "lm_head"):
                setattr(parent, name, Codes(child, round_inputs))
    return model.eval()


def read(layered, size=40):
    cache = layered.new_cache(1, 64)
    return torch.cat(
        [layered.forward(piece, cache, cache.layout([len(piece)])) for piece in TEXT.split(size)]
    )


@torch.inference_mode()
def theirs(model):
    return model(input_ids=TEXT[None]).logits[0]


def close(a, b):
    return torch.allclose(a, b, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("owned", [False, True])
@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("llama", None),
        ("llama", ["k_proj", "down_proj", "lm_head"]),  # some only: a product that is partly ours
        ("phi3", None),
        ("cohere", None),  # outputs of queries and keys are put in another order
        ("gpt_neox", None),  # fused by head
        ("gemma2", None),
    ],
)
def test_modules_multiply_in_our_forward(family, names, owned):
    """Codes read as weights, outputs in the module's order where ours is another, weights released
    that are still in use."""
    model = with_codes(family, names)
    expected = theirs(model)
    layered = from_transformers(model, owned=owned)
    assert product_modules(layered) == ("Codes",)
    for size in (40, 7, 1):
        assert close(read(layered, size), expected)
    if owned:
        assert all(each.codes.numel() for each in model.modules() if isinstance(each, Codes))
        assert not any(
            each.weight.numel() for each in model.modules() if type(each) is nn.Linear
        ), "two copies of plain weights"


def test_bytes_that_a_pass_reads_are_counted_as_they_are_stored():
    """A bandwidth floor computed as if the weights were float32."""
    inside = sum(
        each.codes.numel() + 4 * each.scale.numel()
        for each in with_codes().modules()
        if isinstance(each, Codes)
    )
    model = from_transformers(with_codes())
    assert (
        weight_bytes(model) == inside + 4 * model.shape.vocabulary * model.shape.width
        and product_seconds(model, 2) > 0
    )


@pytest.mark.filterwarnings("ignore:models of type")
def test_families_outside_the_table_have_them_too():
    """Counting products of a quantised model through weights that are not there."""
    model = with_codes("starcoder2")
    for linear in [each for each in model.modules() if isinstance(each, nn.Linear)]:
        linear.weight = nn.Parameter(linear.weight.data)
    assert close(read(from_transformers(model)), theirs(model))


def test_what_it_means_is_said():
    """A slow model whose bits are not promised, without a word; or a word where there is nothing to
    say."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert product_modules(from_transformers(tiny_model("llama"))) == ()
    with pytest.warns(
        UserWarning, match=r"products are left to modules of kind Codes.*last bits may depend"
    ):
        llm = LLM.from_pretrained(with_codes())
    assert (
        llm.info.modules == ["Codes"]
        and cli_info.products(llm.info) == "native (products by Codes)"
    )


def test_text_is_that_of_generate_with_and_without_drafts():
    """Drafters that need what a module does not have, such as rows of a head."""
    model = with_codes(names=["q_proj", "up_proj", "down_proj", "lm_head"])
    llm = LLM.from_pretrained(model, tokenizer=tiny_tokenizer())
    prompt = [5, 6, 7] * 6
    expected = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, 18).long(),
        max_new_tokens=25,
        eos_token_id=None,
    )
    for draft in (None, "auto", "ngram", "layer-skip", "kv-subset"):
        assert (
            llm.generate(prompt, max_new_tokens=25, eos=[], draft=draft).tokens
            == expected[0, 18:].tolist()
        ), draft
    with pytest.raises(
        OptionError, match=r"rows cannot be cut out of this model's head.*ModuleLinear"
    ):
        partial_head(llm.model, 10)


def test_the_self_check_knows_what_last_bits_do_here(monkeypatch):
    """A good model refused because its modules round their inputs to 8 bits, where last bits become
    steps; or, once that is allowed, a model accepted whose norms do something that we do not
    know."""
    options = {"round_inputs": True, "num_hidden_layers": 24, "initializer_range": 0.5}
    from_transformers(with_codes(**options))
    # else the probe is too tame to say anything
    with monkeypatch.context() as patched, pytest.raises(SelfCheckFailed):
        patched.setattr(self_check, "calls_modules", lambda model: False)
        from_transformers(with_codes(**options))
    wrong = with_codes(**options)
    for layer in wrong.model.layers:
        layer.input_layernorm.register_forward_hook(lambda module, inputs, output: output * 1.5)
    with pytest.raises(SelfCheckFailed, match="allowed"):
        from_transformers(wrong)


def test_parts_that_must_be_plain(monkeypatch):
    """An embedding or experts of codes read as if they were numbers; dropout inside modules of a
    model that is being trained."""
    model = tiny_model("llama")
    model.model.embed_tokens.weight = nn.Parameter(
        model.model.embed_tokens.weight.as_subclass(type("Packed", (torch.Tensor,), {}))
    )
    with pytest.raises(
        UnsupportedModel, match=r"embed_tokens is a Embedding.*out of the quantisation"
    ):
        from_transformers(model, check=False)
    model = tiny_model("mixtral")
    experts = model.model.layers[1].mlp.experts
    experts.down_proj = nn.Parameter(experts.down_proj.to(torch.int8), requires_grad=False)
    with pytest.raises(UnsupportedModel, match=r"experts .* are quantised"):
        from_transformers(model, check=False)
    model = tiny_model("llama")
    other = nn.Module()
    other.weight = model.model.layers[2].mlp.down_proj.weight
    model.model.layers[2].mlp.down_proj = other
    with pytest.raises(UnsupportedModel, match=r"mlp\.down_proj is a Module.*dequantize"):
        from_transformers(model, check=False)
    with pytest.raises(OptionError, match=r"training mode.*model\.eval\(\)"):
        from_transformers(with_codes().train())


@pytest.mark.parametrize("method", [*quantised._NEEDS, None])
def test_a_missing_library_is_named_with_its_install_line(method, tmp_path, monkeypatch):
    """A failure in the middle of loading, in words about another package, or only after a
    download."""
    tiny_model("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    # old files of bitsandbytes do not name it
    settings = {"quant_method": method} if method else {"load_in_4bit": True}
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    (tmp_path / "model.safetensors").unlink()  # so that a check that comes later fails otherwise
    monkeypatch.setattr(quantised, "find_spec", lambda name: None)
    packages = quantised._NEEDS[method or "bitsandbytes"][1]
    with pytest.raises(
        Unavailable, match=rf"quantised \({method or 'bitsandbytes'}\).*pip install {packages}`"
    ):
        load(tmp_path)


def library_settings():
    """How each library is asked for; those that are not here are skipped, with the reason."""
    from transformers import BitsAndBytesConfig, QuantoConfig, TorchAoConfig

    def torchao():
        from torchao.quantization import Int8WeightOnlyConfig

        return TorchAoConfig(Int8WeightOnlyConfig())

    def rounded_inputs():
        from torchao.quantization import Int8DynamicActivationInt8WeightConfig

        return TorchAoConfig(Int8DynamicActivationInt8WeightConfig())

    def four_bits():
        from torchao.quantization import IntxWeightOnlyConfig

        return TorchAoConfig(IntxWeightOnlyConfig(weight_dtype=torch.int4))

    return {
        "torchao-int8": ("torchao", torchao),
        "torchao-int8-both": ("torchao", rounded_inputs),
        "torchao-int4": ("torchao", four_bits),
        "bitsandbytes-int8": ("bitsandbytes", lambda: BitsAndBytesConfig(load_in_8bit=True)),
        "bitsandbytes-nf4": (
            "bitsandbytes",
            lambda: BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
            ),
        ),
        "quanto-int8": ("optimum.quanto", lambda: QuantoConfig(weights="int8")),
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", library_settings())
def test_models_of_quantisation_libraries(name, dtype, tmp_path):
    """What the libraries' modules do that stand-ins do not: other dtypes, packed shapes, tensors
    that are not tensors."""
    package, settings = library_settings()[name]
    if importlib.util.find_spec(package.partition(".")[0]) is None:
        pytest.skip(f"{package} is not installed")
    from transformers import AutoModelForCausalLM

    tiny_model("llama", intermediate_size=128).save_pretrained(tmp_path / "plain")
    options = {"quantization_config": settings(), "dtype": dtype, "device_map": "cpu"}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", **options)
    if package != "optimum.quanto":  # which transformers does not save
        # before it is run: bitsandbytes packs its weights for a CPU then
        model.save_pretrained(tmp_path / "saved")
    layered = from_transformers(model)
    expected = theirs(model).float()
    assert (
        product_modules(layered)
        and (read(layered).float() - expected).abs().max() < 0.1 * expected.abs().max()
    )
    plain = from_transformers(tiny_model("llama", intermediate_size=128).to(dtype))
    assert weight_bytes(layered) < 0.8 * weight_bytes(plain)
    llm = LLM.from_pretrained(model)
    plain = llm.generate([5, 6, 7] * 6, max_new_tokens=25, eos=[], draft=None).tokens
    asked = {"attention_mask": torch.ones(1, 18).long(), "max_new_tokens": 5, "eos_token_id": None}
    given = torch.tensor([[5, 6, 7] * 6])
    assert (
        model.generate(given, custom_generate=selfspec.transformers(draft=None), **asked)[
            0, 18:
        ].tolist()
        == plain[:5]
    )
    if llm.info.row_stable:
        assert llm.generate([5, 6, 7] * 6, max_new_tokens=25, eos=[], draft="ngram").tokens == plain
    if package != "optimum.quanto":
        # in float32 our own kernels would run torchao's numbers
        as_modules = {"weights": "float32"} if dtype == torch.float32 else {}
        again = LLM.from_pretrained(tmp_path / "saved", dtype=dtype, **as_modules)
        assert again.info.modules == llm.info.modules
        assert again.generate([5, 6, 7] * 6, max_new_tokens=25, eos=[], draft=None).tokens == plain
