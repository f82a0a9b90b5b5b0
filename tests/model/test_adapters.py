"""PEFT adapters: merged into the base that they name or live beside its weights, and refused where
they do not fit.

Tiny random models; needs peft.
"""

from __future__ import annotations

import json
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from selfspec import LLM
from selfspec.errors import OptionError, Unavailable, UnsupportedModel
from selfspec.model.compute.linear import LowRank
from selfspec.model.from_transformers import from_transformers
from selfspec.model.load.loading import load
from selfspec.model.partial_head import partial_head
from selfspec.testing import tiny_model, tiny_tokenizer

peft = pytest.importorskip("peft")

TEXT = torch.arange(40)[None] + 5


def wrapped(model, seed=0, kind=None, **options):
    """The model in a PEFT model whose new matrices are drawn at random, so that they matter."""
    kind = kind or peft.LoraConfig
    if kind is peft.LoraConfig:
        options = {"r": 4, "init_lora_weights": False, **options}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return peft.get_peft_model(model, kind(task_type="CAUSAL_LM", **options)).eval()


@torch.inference_mode()
def theirs(model):
    return model(input_ids=TEXT).logits[0]


def ours(layered):
    cache = layered.new_cache(1, 64)
    return layered.forward(TEXT[0], cache, cache.layout([40]))


def close(a, b):
    return torch.allclose(a, b, atol=2e-4, rtol=1e-4)


@pytest.fixture
def saved(tmp_path):
    """A base with its tokenizer, an adapter of it, and the logits that peft computes with it."""
    base = tiny_model("llama")
    base.save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    base.name_or_path = str(tmp_path / "base")
    adapted = wrapped(base, target_modules=["q_proj", "down_proj"])
    adapted.save_pretrained(tmp_path / "adapter")
    return tmp_path, theirs(adapted)


@pytest.mark.parametrize("mode", ["auto", "merge", "live"])
def test_an_adapter_gives_its_base_with_the_adapter_in_it(saved, mode):
    """The base alone, the adapter twice, an adapter that our forward does not see, or one merged
    where it should be live."""
    folder, expected = saved
    loaded = load(folder / "adapter", adapter=mode)
    layered = from_transformers(loaded.model, owned=loaded.owned)
    assert close(ours(layered), expected) and layered.row_stable
    assert any(isinstance(linear, LowRank) for linear in layered.linears) == (mode == "live")
    plain = theirs(load(folder / "base").model)
    assert (plain - expected).abs().max() > 0.1, (
        "the adapter does nothing, so loading it shows nothing"
    )
    assert loaded.name == str(folder / "adapter") and loaded.owned and loaded.tokenizer is not None


def test_without_adapters_it_is_the_base_bit_for_bit(saved):
    """A view that shares state with the model it came from: a switch left on or off for the other
    one."""
    folder, _ = saved
    with_it, base = (
        LLM.from_pretrained(folder / "adapter", adapter="live"),
        LLM.from_pretrained(folder / "base"),
    )
    without = with_it.without_adapters()
    assert torch.equal(ours(without.model), ours(base.model))
    options = {"max_new_tokens": 30, "eos": [], "draft": "ngram"}
    before = with_it.generate("abcabc", **options).tokens
    stream = with_it.stream("abcabc", **options)
    next(stream)
    assert (
        without.generate("abcabc", **options).tokens
        == base.generate("abcabc", **options).tokens
        != before
    )
    assert [*before] == [token for _ in [[*stream]] for token in stream.result.tokens], (
        "the view changed its model"
    )
    assert (
        without.without_adapters().model is without.model
        and base.without_adapters().model is base.model
    )
    for size in (16, 259):
        assert torch.equal(
            partial_head(without.model, size).tokens, partial_head(base.model, size).tokens
        )


ALL = {
    "llama": "all-linear",
    "phi3": ["qkv_proj", "gate_up_proj"],  # fused
    "cohere": ["q_proj", "k_proj", "up_proj"],  # rows of queries and keys are put in another order
    "gpt_neox": ["query_key_value", "dense_h_to_4h"],  # fused by head
    "gpt2": ["c_attn", "c_proj"],  # weights on their side
    "starcoder2": ["q_proj", "c_fc"],  # run by its own modules
}


@pytest.mark.filterwarnings("ignore:models of type", "ignore:fan_in_fan_out")
@pytest.mark.parametrize("family", ALL)
def test_a_live_peft_model_is_run_as_it_is(family):
    """Matrices of an adapter put beside the wrong outputs; a user's model merged, switched or taken
    apart."""
    base = tiny_model(family)
    alone = theirs(base)
    adapted = wrapped(base, target_modules=ALL[family])
    expected, before = (
        theirs(adapted),
        {name: each.clone() for name, each in adapted.state_dict().items()},
    )
    loaded = load(adapted)
    layered = from_transformers(loaded.model, owned=loaded.owned)
    assert (
        not loaded.owned and close(ours(layered), expected) and (expected - alone).abs().max() > 0.1
    )
    if family != "starcoder2":
        assert layered.row_stable and close(ours(layered.without_adapters), alone)
    assert all(torch.equal(each, before[name]) for name, each in adapted.state_dict().items())


def test_what_is_active_at_load_counts():
    """The first adapter only, one that is switched off, a scale forgotten, or matrices added twice
    once peft has merged them."""
    adapted = wrapped(tiny_model("llama"), target_modules=["v_proj"], use_rslora=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        second = peft.LoraConfig(
            r=2, lora_alpha=5, target_modules=["q_proj", "v_proj"], init_lora_weights=False
        )
        adapted.add_adapter("second", second)
    seen = []
    for active in (["default"], ["second"], ["default", "second"]):
        adapted.base_model.set_adapter(active)
        seen.append(theirs(adapted))
        assert close(ours(from_transformers(load(adapted).model)), seen[-1])
    assert min((a - b).abs().max() for a in seen for b in seen if a is not b) > 0.05, (
        "adapters that do too little to be told apart"
    )
    with adapted.disable_adapter():
        assert close(ours(from_transformers(load(adapted).model)), theirs(adapted))
    adapted.merge_adapter()
    assert close(ours(from_transformers(load(adapted).model)), seen[-1])


@pytest.mark.parametrize("owned", [False, True])
@pytest.mark.parametrize("kind", ["DoRA", "bias", "IA3"])
def test_what_is_more_than_two_matrices_is_called_as_a_module(kind, owned):
    """Matrices taken out of a layer that does more with them; weights released that such a layer
    still multiplies with."""
    base = tiny_model("llama")
    if kind == "IA3":
        adapted = wrapped(
            base,
            kind=peft.IA3Config,
            target_modules=["k_proj", "down_proj"],
            feedforward_modules=["down_proj"],
        )
        for name, parameter in adapted.named_parameters():
            if "ia3" in name:
                parameter.data.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(0))
    else:
        base.model.layers[0].self_attn.v_proj.bias = torch.nn.Parameter(torch.zeros(32))
        options = (
            {"use_dora": True}
            if kind == "DoRA"
            else {"lora_bias": True, "layers_to_transform": [0]}
        )
        adapted = wrapped(base, target_modules=["v_proj"], **options)
    expected = theirs(adapted)
    with pytest.warns(UserWarning, match="products are left to modules of kind Linear"):
        layered = from_transformers(load(adapted).model, owned=owned)
    assert close(ours(layered), expected)


@pytest.mark.parametrize("kernel", ["native", "plain"])
def test_an_adapter_of_a_tied_head_leaves_the_embedding_alone(kernel):
    """An embedding read from the adapted head; a head over part of the vocabulary that forgets the
    adapter."""
    base = tiny_model("llama", tie_word_embeddings=True)
    adapted = wrapped(base, target_modules=["lm_head"], ensure_weight_tying=False)
    expected = theirs(adapted)
    layered = from_transformers(load(adapted).model, kernel=kernel)
    assert close(ours(layered), expected)
    cache, x = layered.new_cache(1, 64), layered.embed(TEXT[0])
    x = layered.run(x, layered.full_plan, cache, cache.layout([40]))
    assert close(partial_head(layered, 100)(x), expected[:, :100])


def test_kinds_that_selfspec_does_not_run_are_refused():
    """Learned tokens left out before the prompt, an embedding's adapter that is not seen, dropout
    in a model's output."""
    with pytest.raises(UnsupportedModel, match="learned tokens before the prompt"):
        load(wrapped(tiny_model("llama"), kind=peft.PromptTuningConfig, num_virtual_tokens=3))
    for names in (["embed_tokens"], ["gate"]):
        model = tiny_model("llama" if names == ["embed_tokens"] else "mixtral")
        target = (
            {"target_modules": names}
            if names == ["embed_tokens"]
            else {"target_parameters": ["experts.down_proj"]}
        )
        with pytest.raises(UnsupportedModel, match=r"wrapped by an adapter.*merge_and_unload"):
            from_transformers(load(wrapped(model, **target)).model)
    dropping = wrapped(tiny_model("llama"), target_modules=["up_proj"], lora_dropout=0.1).train()
    with pytest.raises(OptionError, match=r"training mode.*model\.eval\(\)"):
        from_transformers(load(dropping).model)


def test_modes_that_would_do_nothing_are_refused(saved):
    """An option that is silently ignored, or a live model merged behind its user's back."""
    folder, _ = saved
    adapted = wrapped(tiny_model("llama"), target_modules=["up_proj"])
    for model, mode, says in (
        (folder / "base", "live", "is no PEFT adapter"),
        (folder / "base", "merge", "is no PEFT adapter"),
        (adapted, "merge", "left as it is"),
        (folder / "adapter", "lve", "live"),
    ):
        with pytest.raises(OptionError, match=says):
            load(model, adapter=mode)
    assert load(adapted, adapter="live").model is adapted.get_base_model()


def test_adapters_that_do_not_fit_are_refused(saved):
    """An adapter of another model, of which peft would leave out what has no place."""
    folder, _ = saved
    path = folder / "adapter" / "adapter_model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if "layers.3." in name)
    for changed, says in (
        (
            {**tensors, name.replace("layers.3.", "layers.9."): tensors[name].clone()},
            "1 weights without a place in its base",
        ),
        (
            {key: value for key, value in tensors.items() if key != name},
            "1 weights missing from its file",
        ),
        ({**tensors, name: torch.zeros(3, 5)}, "cannot be put on.*size mismatch"),
    ):
        save_file(changed, path)
        with pytest.raises(UnsupportedModel, match=f"{says}(?s:.*)another base model"):
            load(folder / "adapter")


def test_what_an_adapter_needs_is_said(saved, monkeypatch):
    """A missing package or a pickle as a stray error; a base that is looked for in the adapter's
    own folder, for ever."""
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
    (folder / "adapter" / "adapter_model.safetensors").rename(
        folder / "adapter" / "adapter_model.bin"
    )
    with pytest.raises(UnsupportedModel, match="safetensors only"):
        load(folder / "adapter")
