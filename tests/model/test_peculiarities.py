"""What each family does differently is seen by the conformance suite: taken away, the logits are
plainly others.

The suite compares tiny random models with transformers. It would pass by luck if a soft cap never
bent anything or a window was longer than the text; so here every peculiarity is removed from the
table, one by one.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_conformance import TEXT, read
from variants import SHORT, VARIANTS, build

from selfspec import LLM
from selfspec.errors import OptionError, PromptError, SelfCheckFailed
from selfspec.model import block
from selfspec.model import from_transformers as opening
from selfspec.model import latent as readings
from selfspec.model import weights as parts
from selfspec.model.compute import ops, rope
from selfspec.model.compute.cpu.operations import NativeOps
from selfspec.model.compute.norms import NormKind
from selfspec.model.compute.ops import Temperature, TorchOps
from selfspec.model.compute.windows import Chunks
from selfspec.model.families import FAMILIES
from selfspec.model.family import Scales
from selfspec.model.family_parts import rope_in_windows
from selfspec.model.from_transformers import from_transformers
from selfspec.testing import tiny_model

NO_HEAD_NORMS = {"query_norm": None, "key_norm": None}
NO_AFTER = {"attention_after": None, "mlp_after": None}
BEFORE = {"attention_norm": "post_attention_layernorm", "mlp_norm": "post_feedforward_layernorm"}
_SERIES = tuple(2 ** (-8 * n / 6) for n in range(1, 7))  # of six heads, as if that were a power
_OF_FALCON = FAMILIES["falcon"].as_configured


def _without_slopes(config):
    """Of Falcon with ALiBi."""
    return {**_OF_FALCON(config), "slopes": lambda config: ()}


WITHOUT = {  # what is removed: the variant and what its table entry becomes
    "qwen3: head norms": ("qwen3", NO_HEAD_NORMS),
    "gemma: 1 + w": ("gemma", {"norms": NormKind(wide=True)}),
    "gemma2: norms after the halves": ("gemma2", NO_AFTER),
    "gemma2: norm before the MLP": ("gemma2", {"mlp_norm": "post_attention_layernorm"}),
    "gemma3: head norms": ("gemma3", NO_HEAD_NORMS),
    "gemma3: local rope": ("gemma3", {"ropes": lambda config: ("full_attention",) * 4}),
    "gemma3: global rope": ("gemma3", {"ropes": lambda config: ("sliding_attention",) * 4}),
    "gemma4: norms of values": ("gemma4", {"value_norm": None}),
    "gemma4: the stream scaled behind each layer": ("gemma4", {"stream": None}),
    "gemma4: head norms": ("gemma4", NO_HEAD_NORMS),
    "gemma4: norms after the halves": ("gemma4", NO_AFTER),
    "gemma4: no 1 + w": ("gemma4", {"norms": NormKind(offset=1.0, wide=True)}),
    "gemma3n: norms of values": ("gemma3n", {"value_norm": None}),
    "gemma3n: head norms": ("gemma3n", NO_HEAD_NORMS),
    "gemma3n: no 1 + w": ("gemma3n", {"norms": NormKind(offset=1.0, wide=True)}),
    "gemma4: numbers of the token": ("gemma4-small", {"as_configured": lambda config: {}}),
    "gemma4: global rope": ("gemma4", {"ropes": lambda config: ("sliding_attention", None) * 2}),
    "smollm3: layers without rope": ("smollm3", {"ropes": lambda config: ("",) * 4}),
    "olmo2: head norms": ("olmo2", NO_HEAD_NORMS),
    "olmo2: norms after, not before": ("olmo2", {**NO_AFTER, **BEFORE}),
    "cohere: parallel halves": ("cohere", {"parallel": False}),
    "cohere: centred norms": ("cohere", {"norms": NormKind(wide=True)}),
    "cohere: interleaved rotary pairs": ("cohere", {"interleaved": False}),
    "cohere: head norms": ("cohere", NO_HEAD_NORMS),
    "bitnet: a norm within attention": ("bitnet", {"attention_inner": None}),
    "bitnet: a norm within the MLP": ("bitnet", {"mlp_inner": None}),
    "falcon: biases of positions": ("falcon-alibi", {"as_configured": _without_slopes}),
    "afmoe: gates of heads": ("afmoe", {"gated_attention": False, "qkv": FAMILIES["llama"].qkv}),
    "afmoe: layers without rope": ("afmoe", {"ropes": lambda config: ("",) * 4}),
    "afmoe: norms after the halves": ("afmoe", NO_AFTER),
    "hy_v3: head norms": ("hy_v3", NO_HEAD_NORMS),
    "phimoe: shares among the near": ("phimoe", {"expert_scores": "softmax"}),
    "cohere2_moe: layers without rope": ("cohere2_moe", {"ropes": lambda config: ("",) * 4}),
    "cohere2_moe: dense layers rotate": ("cohere2_moe-sigmoid", {"ropes": rope_in_windows}),
    "cohere2_moe: softmax of the chosen": (
        "cohere2_moe",
        {"as_configured": lambda config: {"norms": NormKind(centred=True, wide=True)}},
    ),
    "modernbert: a product before the head": ("modernbert", {"as_configured": lambda config: {}}),
    "modernbert: norm of the embeddings": ("modernbert", {"embedding_norm": None}),
    "cohere2: layers without rope": ("cohere2", {"ropes": lambda config: ("",) * 4}),
    "gpt_neox: parallel halves": ("gpt-neox", {"parallel": False}),
    "gpt_neox: parallel only if its config says so": ("gpt-neox-in-sequence", None),
    "gpt_neox: fused by head": ("gpt-neox", {"by_head": False}),
    "gpt_neox: centred norms": ("gpt-neox", {"norms": NormKind(wide=True)}),
    "gpt2: learned positions": ("gpt2", {"positions": None}),
    "xglm: a table of positions": ("xglm", {"positions": None}),
    "opt: the first position": ("opt", {"first_position": 0}),
    "nanochat: norm of the embeddings": ("nanochat", {"embedding_norm": None}),
    "nanochat: pairs that turn backwards": ("nanochat", {"backwards": False}),
    "nanochat: head norms without weights": ("nanochat", NO_HEAD_NORMS),
    "olmo: norms without weights are centred": ("olmo", {"norms": NormKind()}),
    "glm4: interleaved pairs in half of a head": ("glm4", {"interleaved": False}),
    "exaone4: layers without rope": ("exaone4", {"ropes": lambda config: ("",) * 4}),
    "nemotron: 1 + w": ("nemotron", {"norms": NormKind(centred=True, wide=True)}),
    "phi: head norms with biases": ("phi-head-norms", NO_HEAD_NORMS),
    "persimmon: fused by head": ("persimmon", {"by_head": False}),
    "hyperclovax: norms after the halves": ("hyperclovax", {"as_configured": lambda config: {}}),
    "gpt_bigcode: fused by head": ("gpt_bigcode-heads", {"as_configured": lambda config: {}}),
    "ministral3: queries that grow": ("ministral3", {"temperatures": lambda config: ()}),
    "gpt_oss: sinks": ("gpt_oss", {"sinks": None}),
    "gpt_oss: gates and their partners are neighbours": ("gpt_oss", {"experts_interleaved": False}),
    "gpt_oss: another activation": ("gpt_oss", {"activation": "silu"}),
    "llama4: queries that grow": ("llama4", {"temperatures": lambda config: ()}),
    "llama4: queries that grow in some layers": (
        "llama4",
        {"temperatures": lambda config: (Temperature(0.4, 16, 1),) * 4},
    ),
    "llama4: head norms without weights": ("llama4", NO_HEAD_NORMS),
    "llama4: layers without rope": ("llama4", {"ropes": lambda config: ("",) * 4}),
    "llama4: interleaved rotary pairs": ("llama4", {"interleaved": False}),
    "bloom: biases by distance": ("bloom", {"slopes": lambda config: ()}),
    "bloom: norm of the embeddings": ("bloom", {"embedding_norm": None}),
    "bloom: fused by head": ("bloom", {"by_head": False}),
    "mpt: biases by distance": ("mpt", {"slopes": lambda config: ()}),
    "bloom: slopes in another order": ("bloom-six-heads", {"slopes": lambda config: _SERIES}),
    "stablelm: norms of heads": ("stablelm-head-norms", NO_HEAD_NORMS),
    "stablelm: parallel halves": ("stablelm-parallel", {"parallel": False}),
    "stablelm: one norm for parallel halves": (
        "stablelm-parallel",
        {"as_configured": lambda config: {"mlp_norm": None}},
    ),
    "apertus: norms of heads": ("apertus", NO_HEAD_NORMS),
    "codegen: fused by blocks": ("codegen", {"blocks": 1}),
    "gpt_neo: scores as they are": ("gpt_neo", {"unscaled": False}),
    "gpt_neo: windows in its own words": ("gpt_neo", {"windows": lambda config: (None,) * 4}),
    "granitemoeshared: experts beside the MLP": (
        "granitemoeshared",
        {"as_configured": lambda config: {}},
    ),
    "granite_swa: sinks": ("granite_swa", {"sinks": None}),
    "granite_swa: layers without rope": ("granite_swa", {"ropes": lambda config: ("1",) * 4}),
    "granite_swa: frequencies of its own": (
        "granite_swa",
        {"ropes": lambda config: ("1", None, "1", "1")},
    ),
    "flint: sinks": ("flint", {"sinks": None}),
    "flint: layers without rope": ("flint", {"ropes": lambda config: ("",) * 4}),
    "hunyuan_v1_moe: experts beside the MLP": ("hunyuan_v1_moe", {"experts_beside": False}),
    "hunyuan: norms behind the rotation": ("hunyuan_v1_dense", {"norms_behind": False}),
    "gptj: interleaved rotary pairs": ("gptj", {"interleaved": False}),
    "gptj: parallel halves": ("gptj", {"parallel": False}),
    "falcon: fused by head": ("falcon-heads", {"by_head": False}),
    "falcon: fused by groups of heads": ("falcon-new", {"by_head": False}),
    "falcon: parallel halves": ("falcon", {"parallel": False}),
    "falcon: parallel only if its config says so": (
        "falcon-in-sequence",
        {"as_configured": lambda config: {"mlp_norm": "input_layernorm"}},
    ),
    "falcon: a norm for each half": (
        "falcon-new",
        {"as_configured": lambda config: {"attention_norm": "ln_attn", "mlp_norm": "ln_attn"}},
    ),
    "deepseek_v2: interleaved rotary pairs": ("deepseek_v2", {"interleaved": False}),
    "deepseek_v2: experts weighed as they are": ("deepseek_v2", {"experts_normalised": True}),
    "deepseek_v3: sigmoids of experts": ("deepseek_v3", {"expert_scores": "softmax"}),
    "ernie4_5_moe: interleaved rotary pairs": ("ernie4_5_moe", {"interleaved": False}),
    "exaone_moe: layers without rope": ("exaone_moe", {"ropes": lambda config: ("",) * 4}),
    "exaone_moe: head norms": ("exaone_moe", NO_HEAD_NORMS),
    "glm4_moe: head norms": ("glm4_moe", NO_HEAD_NORMS),
    "minimax_m2: norms of whole queries and keys": ("minimax_m2", NO_HEAD_NORMS),
}
SCALES = {  # a number of the config, and what it is without it
    "gemma2: embedding": ("gemma2", {"embedding": 1.0}),
    "gemma2: cap on scores": ("gemma2", {"score_cap": 0.0}),
    "gemma2: cap on logits": ("gemma2", {"logit_cap": 0.0}),
    "gemma3: embedding": ("gemma3", {"embedding": 1.0}),
    "gemma3: cap on logits": ("gemma3-long", {"logit_cap": 0.0}),
    "gemma4: embedding": ("gemma4", {"embedding": 1.0}),
    "gemma4: cap on logits": ("gemma4", {"logit_cap": 0.0}),
    "granite: embedding": ("granite", {"embedding": 1.0}),
    "granite: residual": ("granite", {"residual": 1.0}),
    "granite: logits": ("granite", {"logits": 1.0}),
    "afmoe: embedding": ("afmoe", {"embedding": 1.0}),
    "cohere2_moe: logits": ("cohere2_moe", {"logits": 1.0}),
    "granitemoe: residual": ("granitemoe", {"residual": 1.0}),
    "cohere: logits": ("cohere", {"logits": 1.0}),
    "biogpt: embedding": ("biogpt", {"embedding": 1.0}),
    "nanochat: cap on logits": ("nanochat", {"logit_cap": 0.0}),
    "hyperclovax: logits": ("hyperclovax", {"logits": 1.0}),
    "mpt: clamp": ("mpt-clamp", {"clamp": 0.0}),
    "olmo: clamp": ("olmo-clamp", {"clamp": 0.0}),
    "olmoe: clamp": ("olmoe-clamp", {"clamp": 0.0}),
    "minicpm3: embedding": ("minicpm3", {"embedding": 1.0}),
    "minicpm3: residual": ("minicpm3", {"residual": 1.0}),
    "minicpm3: logits": ("minicpm3", {"logits": 1.0}),
}


def gap(model, **options) -> float:
    """How far our logits are from transformers', next to their size."""
    ours, _ = read(from_transformers(model, check=False, **options), TEXT)
    theirs = model(input_ids=torch.tensor([TEXT]), use_cache=False).logits[0]
    return float((ours - theirs).abs().max() / theirs.abs().max())


def changed(monkeypatch, family, **changes) -> None:
    monkeypatch.setitem(FAMILIES, family, replace(FAMILIES[family], **changes))


@pytest.mark.parametrize("what", WITHOUT)
def test_the_table_entry_matters(what, monkeypatch):
    """A tiny model on which the peculiarity changes nothing, so that the suite would pass without
    it."""
    variant, change = WITHOUT[what]
    model, family = build(variant), {**VARIANTS, **SHORT}[variant][0]
    assert gap(model) < 1e-4
    if change is None:
        # read by us alone, now that the model is made
        monkeypatch.setattr(model.config, "use_parallel_residual", True)
    else:
        changed(monkeypatch, family, **change)
    assert gap(model) > 0.01
    with pytest.raises(SelfCheckFailed):
        from_transformers(model)


CHOICES = [  # a part of how experts are chosen and weighed, and what it is without it
    *((variant, {"favour": None}) for variant in ("deepseek_v3", "ernie4_5_moe", "minimax_m2")),
    *((variant, {"favour": None}) for variant in ("afmoe", "hy_v3")),
    *((variant, {"scale": 1.0}) for variant in ("afmoe", "hy_v3", "cohere2_moe")),
    ("deepseek_v3", {"kept": 4}),
    ("deepseek_v3", {"best": 1}),
    ("deepseek_v3", {"scale": 1.0}),
    ("deepseek_v2", {"kept": 4}),
    ("deepseek_v2", {"scale": 1.0}),
    ("glm4_moe", {"normalised": False}),
    ("gemma4-experts", {"shares": None}),
]


@pytest.mark.parametrize("change", [{"above": None}, {"scale": None}, {"active": 1}])
def test_each_part_of_a_layer_with_streams_matters(change, monkeypatch):
    """Gates that are all left, a scale of 1, a stream that is like the others."""
    model, own = build("gemma3n"), block.streams_layer
    assert gap(model) < 1e-4
    monkeypatch.setattr(block, "streams_layer", lambda *given: replace(own(*given), **change))
    assert gap(model) > 0.01


@pytest.mark.parametrize(("variant", "change"), CHOICES)
def test_each_part_of_choosing_experts_matters(variant, change, monkeypatch):
    """A bias of zeros, groups that are all open, a scale of 1."""
    model, own = build(variant), block.mixture
    assert gap(model) < 1e-4

    def without(*given):
        found = own(*given)
        return None if found is None else replace(found, **change)

    monkeypatch.setattr(block, "mixture", without)
    assert gap(model) > 0.01


LATENT = ["deepseek_v2", "deepseek_v3", "deepseek_v3-yarn", "glm4_moe_lite", "minicpm3", "youtu"]


@pytest.mark.parametrize("variant", LATENT)
def test_each_part_of_latent_attention_matters(variant, monkeypatch):
    """Norms of ones, and rotary pairs of other numbers, which the suite would not see."""
    model, own = build(variant), block.latent
    assert gap(model) < 1e-4

    def with_parts(**made):
        def changed(*given):
            first, found = own(*given)
            return first, replace(found, **{name: make(found) for name, make in made.items()})

        monkeypatch.setattr(block, "latent", changed)
        return gap(model)

    def ones(norm):
        return None if norm is None else replace(norm, weight=torch.ones_like(norm.weight))

    assert with_parts(norm=lambda found: ones(found.norm)) > 0.01
    if "yarn" not in variant:
        assert with_parts(query_norm=lambda found: ones(found.query_norm)) > 0.01
    monkeypatch.setattr(block, "latent", own)
    monkeypatch.setattr(readings, "_turned", lambda rotary, _: torch.arange(rotary).roll(1))
    assert gap(model) > 0.01


def test_the_scale_of_scores_has_yarns_factor_in_it(monkeypatch):
    """1 / sqrt(head size) assumed where a longer context changes it."""
    model = build("deepseek_v3-yarn")
    assert gap(model) < 1e-4
    monkeypatch.setattr(block, "attention_scale", lambda layer, family: 32**-0.5)
    assert gap(model) > 0.01


@pytest.mark.parametrize("what", SCALES)
def test_each_scale_matters(what, monkeypatch):
    """A multiplier of 1, or a cap that no number comes near."""
    variant, change = SCALES[what]
    model, family = build(variant), {**VARIANTS, **SHORT}[variant][0]
    scales: Scales = FAMILIES[family].scales(model.config)
    assert gap(model) < 1e-4
    changed(monkeypatch, family, scales=lambda config: replace(scales, **change))
    assert gap(model) > 0.01


def test_the_attention_scale_is_the_models_own(monkeypatch):
    """1 / sqrt(head size) assumed, where Granite and Gemma have a number of their own."""
    monkeypatch.setattr(block, "attention_scale", lambda layer, family: 16**-0.5)
    assert gap(build("llama")) < 1e-4
    assert all(
        gap(build(variant)) > 0.01
        for variant in ("granite", "gemma2", "gemma3", "gpt2-scaled-by-layer")
    )


def test_scores_far_below_zero():
    """Keys that look away from all queries: beside such scores, what fills a kernel's vector up to
    its end would be the largest."""
    model = tiny_model("llama", num_hidden_layers=2, num_key_value_heads=4, num_attention_heads=4)
    for layer in model.model.layers:
        queries, keys = layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight
        queries.data *= 400 / queries.data.norm()
        keys.data = -queries.data
    x = model.model.embed_tokens(torch.tensor(TEXT[:1])) / 0.02
    looked = model.model.layers[0].self_attn.q_proj(x).norm() ** 2 / 4
    assert looked > 200, "the scores are near zero"
    assert gap(model) < 1e-3


WINDOWED = [
    "mistral",
    "qwen2-windows",
    "mixtral",
    "gemma2",
    "gemma3",
    "phi3-window-partial",
    "gpt_oss",
    "granite_swa",
    "smollm3-windows",
    "cohere2",
]


@pytest.mark.parametrize("variant", WINDOWED)
def test_windows_are_shorter_than_the_text_and_in_the_right_layers(variant, monkeypatch):
    """A window that hides nothing; one in every layer where only some have it, or the other way
    round."""
    model, shape_of = build(variant), opening.shape_of
    windows = shape_of(model.config, FAMILIES[{**VARIANTS, **SHORT}[variant][0]]).windows
    wrong = {
        (None,) * 4,
        windows[1:] + windows[:1],
        tuple(window and window - 1 for window in windows),
    } - {windows}
    assert gap(model) < 1e-4 and len(wrong) > 1
    for other in wrong:
        monkeypatch.setattr(
            opening,
            "shape_of",
            lambda *given, other=other: replace(shape_of(*given), windows=other),
        )
        assert gap(model) > 0.01, f"{other} instead of {windows}"


def test_chunks_are_shorter_than_the_text_and_in_the_right_layers(monkeypatch):
    """A chunk that hides nothing, one read as a sliding window, or in every layer."""
    model, shape_of = build("llama4"), opening.shape_of
    windows = shape_of(model.config, FAMILIES["llama4_text"]).windows
    chunks = Chunks(24)
    assert gap(model) < 1e-4 and windows == (chunks, None, chunks, None)
    for other in (None, 24, Chunks(23)):
        changed = tuple(window and other for window in windows)
        monkeypatch.setattr(
            opening,
            "shape_of",
            lambda *given, changed=changed: replace(shape_of(*given), windows=changed),
        )
        assert gap(model) > 0.01, f"{other} instead of {chunks}"


@pytest.mark.parametrize(
    "variant", ["qwen3-moe", "qwen3-moe-weights-as-they-are", "mixtral", "gpt_oss", "llama4"]
)
def test_the_router_decides(variant, monkeypatch):
    """Experts that are all alike, weights that are not those of the router, or normalised where the
    model does not."""
    model, own = build(variant), block.mixture

    def turned_round(router):
        return NativeOps().linear([-router.rows(torch.arange(router.outputs))], [None])

    for change in (
        lambda found: replace(found, normalised=not found.normalised),
        lambda found: replace(found, chosen=found.chosen - 1),
        lambda found: replace(found, router=turned_round(found.router)),
        lambda found: replace(found, out=[found.out[1], found.out[0], *found.out[2:]]),
        lambda found: replace(found, of_inputs=not found.of_inputs),
    ):

        def changed(*given, change=change):
            found = own(*given)
            return found and change(found)

        monkeypatch.setattr(block, "mixture", changed)
        assert gap(model) > 0.01


def test_each_number_of_xielu_matters(monkeypatch):
    """A curve that is the same in every layer, or on both sides of zero."""
    model, own = build("apertus"), parts.xielu
    assert gap(model) < 1e-4
    for which in range(3):

        def other(found, which=which):
            curve = own(found)
            curve[which] += 0.5
            return curve

        monkeypatch.setattr(block, "xielu", other)
        assert gap(model) > 0.01


@pytest.mark.parametrize("name", ["router.bias", "gate_up_proj_bias", "down_proj_bias"])
def test_each_bias_of_the_experts_matters(name):
    """The router's, or those of an expert's products, left out."""
    model, other = build("gpt_oss"), build("gpt_oss")
    for each, parameter in other.named_parameters():
        if each.endswith(name):
            parameter.zero_()
    ours, _ = read(from_transformers(other), TEXT)
    theirs = model(input_ids=torch.tensor([TEXT]), use_cache=False).logits[0]
    assert gap(model) < 1e-4 and (ours - theirs).abs().max() > 0.01 * theirs.abs().max()


def test_the_gates_of_gpt_oss_are_clamped(monkeypatch):
    """Gates and their partners so small that no limit is ever met."""
    model = build("gpt_oss")
    for layer in model.model.layers:
        layer.mlp.experts.gate_up_proj *= 6
    assert gap(model) < 1e-4 and gap(model, kernel="plain") < 1e-4
    monkeypatch.setattr(ops, "LIMIT", 100.0)
    assert gap(model, kernel="plain") > 0.01


def test_a_longrope_model_ends_where_its_frequencies_change():
    """Past that length transformers reads the whole text again with other frequencies; keys made
    before would be wrong."""
    model = build("phi3-longrope")
    with pytest.warns(UserWarning, match="end at 128 tokens here, not at 512"):
        ours = from_transformers(model)
    assert ours.shape.context == 128 < model.config.max_position_embeddings
    text = torch.arange(128) + 3
    cache = ours.new_cache(1, 128)
    logits = ours.forward(text, cache, cache.layout([128]))
    theirs = model(input_ids=text[None], use_cache=False).logits[0]
    assert torch.allclose(logits, theirs, atol=2e-4, rtol=1e-4)
    longer = model(input_ids=torch.arange(129)[None] + 3, use_cache=False).logits[0]
    assert (longer[:128] - theirs).abs().max() > 0.1, (
        "the frequencies do not change, so the limit would be for nothing"
    )
    with pytest.raises(PromptError, match=r"context is 128.*long_context=True"):
        ours.check_length(128)


@pytest.mark.parametrize("kernel", ["native", "plain"])
def test_a_longrope_model_for_long_texts(kernel, monkeypatch):
    """Short texts' frequencies in a long text, or a table whose later pieces turn otherwise than
    its first."""
    monkeypatch.setattr(rope, "CHUNK", 64)  # shorter than the switch, as 1024 is in real models
    model = build("phi3-longrope", max_position_embeddings=2048)
    ours = from_transformers(model, kernel=kernel, long_context=True)
    assert ours.shape.context == 2048
    text = torch.randint(3, 259, (1100,), generator=torch.Generator().manual_seed(0))
    cache = ours.new_cache(1, 1100)
    logits = torch.cat(
        [ours.forward(piece, cache, cache.layout([len(piece)])) for piece in text.split(550)]
    )
    assert torch.allclose(
        logits, model(input_ids=text[None], use_cache=False).logits[0], atol=2e-4, rtol=1e-4
    )
    prompt = text[:140].tolist()
    options = {
        "attention_mask": torch.ones(1, 140).long(),
        "max_new_tokens": 20,
        "eos_token_id": None,
    }
    expected = model.generate(text[None, :140], **options)[0, 140:].tolist()
    llm = LLM(ours, None, "long")
    assert llm.generate(prompt, max_new_tokens=20, eos=[]).tokens == expected
    with pytest.raises(OptionError, match="phi3 model has one set"):
        from_transformers(build("phi3"), long_context=True)


@pytest.mark.parametrize("variant", ["llama", "gemma2", "olmo2", "cohere"])
def test_norms_round_where_the_family_rounds(variant):
    """In half precision: the weight multiplied before rounding to it, or after, as the family
    does."""
    model, family = build(variant).to(torch.bfloat16), FAMILIES[{**VARIANTS, **SHORT}[variant][0]]
    name = family.attention_norm or family.attention_after
    layer = parts.module(model, family.layers)[0]
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    ours = TorchOps().norm(x, parts.norm(layer, name, family.norms, 64))
    assert torch.equal(ours, parts.module(layer, name)(x))
    other = replace(family.norms, wide=not family.norms.wide)
    assert not torch.equal(ours, TorchOps().norm(x, parts.norm(layer, name, other, 64))), (
        "rounding here or there is the same"
    )
