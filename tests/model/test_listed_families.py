"""Families that differ from a known one in a line or a field: a shorter conformance suite.

The operations are proven by test_conformance.py. Here each family's entry is compared with
transformers, and its drafts with its own text.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from test_conformance import TEXT, layers_of, read
from transformers.integrations.bitnet import replace_with_bitnet_linear
from variants import SHORT, build

from selfspec import LLM
from selfspec.model.compute.cache import RowSpan, TokenLayout
from selfspec.model.compute.plan import LayerPlan
from selfspec.model.families import FAMILIES, family_of
from selfspec.model.from_transformers import from_transformers
from selfspec.model.weights import is_plain
from selfspec.testing import tiny_model


@pytest.fixture(scope="module", params=SHORT)
def pair(request):
    """A Hugging Face model and ours, made from it."""
    model = build(request.param)
    return model, from_transformers(model)


def test_logits_are_those_of_transformers_with_each_kernel(pair):
    """A wrong norm, activation, order of a projection, window, bias or head."""
    model, ours = pair
    theirs = model(input_ids=torch.tensor([TEXT]), use_cache=False).logits[0]
    assert theirs.abs().max() > 1, "the probe model says nothing, so agreement would mean nothing"
    assert ours.ops.kernel == "native"
    for layered in (ours, from_transformers(model, kernel="plain", check=False)):
        mine, _ = read(layered, TEXT)
        gap = (mine - theirs).abs().max()
        assert torch.allclose(mine, theirs, atol=2e-4, rtol=1e-4), f"{layered.ops.kernel}: {gap}"


def test_bits_do_not_depend_on_how_a_text_is_read(pair):
    """Sums that depend on the number of rows, or a tree whose nodes see a sibling."""
    _, ours = pair
    assert ours.row_stable
    whole, _ = read(ours, TEXT)
    pieces, cache = read(ours, TEXT[:60], 7)
    assert torch.equal(whole[:60], pieces)
    tokens = torch.tensor([5, *TEXT[60:63]])
    tree = ours.forward(tokens, cache, cache.layout([4], [[-1, -1, 1, 2]]))
    assert torch.equal(tree[1:], whole[60:63])


def test_a_tree_crosses_the_end_of_a_chunk():
    """A node in a new chunk that still sees the old one, or one in the old chunk that no longer
    does."""
    ours = from_transformers(build("llama4"))
    whole, _ = read(ours, TEXT)
    for first in range(68, 73):  # chunks of 24 end at 72
        _, cache = read(ours, TEXT[:first])
        parents = [-1, -1, 1, 2, 3, 0, 5, 6]
        path = TEXT[first : first + 4]
        tokens = torch.tensor([5, *path, 7, 8, 9])
        tree = ours.forward(tokens, cache, cache.layout([8], [parents]))
        assert torch.equal(tree[1:5], whole[first : first + 4])
        other, _ = read(ours, [*TEXT[:first], 5, 7, 8, 9])
        assert torch.equal(tree[[0, 5, 6, 7]], other[first:])


def test_greedy_text_is_that_of_generate_with_drafts(pair):
    """Drafts by some layers that change the text, or positions that drift while it is written."""
    model, ours = pair
    llm, prompt = LLM(ours, None, "tiny"), TEXT[:30] + TEXT[:10]
    expected = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, 40, dtype=torch.long),
        max_new_tokens=20,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )[0, 40:].tolist()
    for draft in (None, "hybrid", "early-exit", "layer-skip"):
        found = llm.generate(prompt, max_new_tokens=20, eos=[], draft=draft)
        assert found.tokens == expected, draft
        assert draft is None or found.stats.drafted > 0


def test_early_exit_is_what_transformers_computes_with_fewer_layers(pair):
    """A last norm that is another one, or none. The reference is the same model, cut."""
    theirs, ours = pair
    cache = ours.new_cache(1, 128)
    layout = TokenLayout.chains([RowSpan(0, 0, len(TEXT))])
    x = ours.run(ours.embed(torch.tensor(TEXT)), LayerPlan(0, 2), cache, layout)
    holder, name = layers_of(theirs)
    layers = getattr(holder, name)
    setattr(holder, name, layers[:2])
    try:
        expected = theirs(input_ids=torch.tensor([TEXT]), use_cache=False).logits[0]
    finally:
        setattr(holder, name, layers)
    assert torch.allclose(ours.head(x), expected, atol=2e-4, rtol=1e-4)


def test_numbers_that_other_modules_read_are_left_to_them():
    """gpt-oss in MXFP4, or with other limits, read as if its experts were plain numbers."""
    config = build("gpt_oss").config
    unless = FAMILIES["gpt_oss"].unless
    assert not unless(config)
    for name, value in (
        ("quantization_config", SimpleNamespace(dequantize=False)),
        ("swiglu_limit", 5.0),
        ("swiglu_alpha", 1.0),
    ):
        assert unless(SimpleNamespace(**{**vars(config), name: value}))
    assert not unless(SimpleNamespace(quantization_config=SimpleNamespace(dequantize=True)))
    linear = torch.nn.Linear(4, 4)
    assert is_plain(linear)
    linear.weight.data = linear.weight.data.to(torch.float8_e4m3fn)
    assert not is_plain(linear)


def test_bitnets_own_linears_do_the_rounding():
    """A Linear that rounds what it reads to 8 bits and its weights to three values, read as if it
    were a plain one."""
    model = build("bitnet")
    plain = model(input_ids=torch.tensor([TEXT]), use_cache=False).logits[0]
    replace_with_bitnet_linear(
        model,
        ["lm_head"],
        SimpleNamespace(
            linear_class="autobitlinear",
            quantization_mode="online",
            use_rms_norm=False,
            rms_norm_eps=1e-6,
        ),
    )
    weights = build("bitnet").state_dict()
    model.load_state_dict(weights, assign=True)
    model.eval()
    assert not is_plain(model.model.layers[0].mlp.down_proj)
    with torch.compiler.set_stance("force_eager"), torch.inference_mode():
        with pytest.warns(UserWarning, match="AutoBitLinear"):
            ours = from_transformers(model)
        theirs = model(input_ids=torch.tensor([TEXT]), use_cache=False).logits[0]
        mine, _ = read(ours, TEXT, 20)
    # a last bit may round to the next of 256 steps
    assert (mine - theirs).norm() < 0.02 * theirs.norm()
    assert (plain - theirs).norm() > 0.2 * theirs.norm(), "nothing was rounded"


def test_a_familys_own_linear_is_plain():
    """Falcon's, which multiplies in another order, left to its modules."""
    assert is_plain(build("falcon").transformer.h[0].mlp.dense_h_to_4h)


def test_experts_of_older_versions_are_left_to_their_modules(monkeypatch):
    """Experts that an older transformers keeps one by one, looked for where a newer one has
    them."""
    config = build("granitemoe").config
    assert family_of(config) is not None
    monkeypatch.delattr("transformers.models.granitemoe.modeling_granitemoe.GraniteMoeExperts")
    assert family_of(config) is None


def test_borrowed_keys_of_older_versions_are_left_to_the_model(monkeypatch):
    """Layers that read other keys without a cache than with one, so that no check can be passed."""
    config = build("gemma3n-three-streams").config
    assert family_of(config) is not None
    monkeypatch.delattr(type(config), "kv_sharing_modes")
    assert family_of(config) is None


@pytest.mark.filterwarnings("ignore:models of type")
@pytest.mark.filterwarnings("ignore:this .* model is run whole")
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("bloom", {"apply_residual_connection_post_layernorm": True}),
        ("opt", {"do_layer_norm_before": False}),
    ],
)
def test_what_an_entry_does_not_describe_is_left_to_the_model(family, changes):
    """A clamp that is forgotten, or a model refused that its own modules can run."""
    model = tiny_model(family, **changes)
    assert FAMILIES[family].unless(model.config)
    ours = from_transformers(model)
    assert ours.ops.kernel in ("modules", "floor")
    theirs = model(input_ids=torch.tensor([TEXT]), use_cache=False).logits[0]
    assert torch.allclose(read(ours, TEXT, 30)[0], theirs, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("kernel", ["plain", "static"])
@pytest.mark.parametrize(
    "variant",
    [
        *("bloom", "ministral3-window", "mpt-clamp", "hunyuan_v1_dense", "apertus"),
        *("bitnet", "falcon-alibi", "modernbert"),
    ],
)
def test_every_kernel_knows_what_is_new_in_attention(variant, kernel):
    """A bias, a clamp, a norm or a temperature that only our kernels apply; positions of a tree's
    nodes taken for their slots."""
    model = build(variant)
    ours = from_transformers(model, kernel=kernel, check=False)
    theirs = model(input_ids=torch.tensor([TEXT]), use_cache=False).logits[0]
    found, cache = read(ours, TEXT[:60], 20)
    assert torch.allclose(found, theirs[:60], atol=2e-4, rtol=1e-4)
    tokens = torch.tensor([5, *TEXT[60:63]])
    tree = ours.forward(tokens, cache, cache.layout([4], [[-1, -1, 1, 2]]))
    assert torch.allclose(tree[1:], theirs[60:63], atol=2e-4, rtol=1e-4)
