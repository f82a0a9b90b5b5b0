"""Families outside the table, run by transformers' own modules: the same logits, said aloud, or a
refusal with its reason."""

from __future__ import annotations

import random
import warnings

import pytest
import torch
import transformers
from packaging import version
from test_conformance import TEXT, a_path, contents, read

from selfspec import LLM
from selfspec.errors import OptionError, UnsupportedModel
from selfspec.model import unlisted
from selfspec.model.families import FAMILIES
from selfspec.model.from_transformers import from_transformers
from selfspec.model.measuring import product_seconds, weight_bytes
from selfspec.testing import tiny_model, tiny_tokenizer

OLD = version.parse(transformers.__version__) < version.parse("5.15")
# norms by other names; norms of heads that have turned; experts; sinks and a window
UNLISTED = {
    "apertus": {},
    "hunyuan_v1_dense": {},
    "granitemoe": {"embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0},
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {},
}
_NO_SCALES = dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling"), 1.0)


@pytest.fixture(scope="module", autouse=True)
def nobody_described_them():
    """The families here as if the table did not have them, so that it may."""
    with pytest.MonkeyPatch.context() as patch:
        for family in (*UNLISTED, "bloom", "xglm", "granite_swa"):
            patch.delitem(FAMILIES, family, raising=False)
        yield


def build(family, **changes):
    return tiny_model(family, **{**UNLISTED.get(family, {}), **changes})


@pytest.fixture(scope="module", params=UNLISTED)
def pair(request):
    """A Hugging Face model and ours, made from it."""
    model = build(request.param)
    with pytest.warns(UserWarning, match=rf"{request.param}.*not in selfspec's table.*slower"):
        return model, from_transformers(model)


def close(ours, theirs):
    return torch.allclose(ours, theirs, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("size", [90, 7, 1])
def test_logits_are_those_of_transformers_however_the_text_is_read(pair, size):
    """Norms guessed in the wrong place, a window forgotten, keys that come back from our cache in
    another order."""
    theirs, ours = pair
    expected = theirs(input_ids=torch.tensor([TEXT]), use_cache=False).logits[0]
    assert expected.abs().max() > 1
    assert close(read(ours, TEXT, size)[0], expected)


def test_greedy_text_is_that_of_generate_with_and_without_drafts(pair):
    """Drafts of some layers only, verified by modules that read a cache which was rolled back."""
    theirs, _ = pair
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        llm = LLM.from_pretrained(theirs, tokenizer=tiny_tokenizer())
    options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = theirs.generate(torch.tensor([TEXT[:30]]), **options)[0, 30:].tolist()
    drafted = llm.generate(
        [TEXT[:30]], max_new_tokens=24, eos=[], draft="early-exit", draft_options={"layer": 2}
    )
    plain = llm.generate([TEXT[:30]], max_new_tokens=24, eos=[], draft=None)
    assert plain[0].tokens == expected == drafted[0].tokens
    assert drafted[0].stats.drafted > 0 and llm.info.kernel == "modules"


def test_trees_and_ragged_batches_see_what_a_chain_sees(pair):
    """A mask that shows a sibling, a row or a slot that is not the token's own, positions counted
    by slot."""
    _, ours = pair
    texts, tokens, parents = (
        [TEXT[:30], TEXT[40:45]],
        [11, 12, 13, 14, 15, 16, 17],
        [-1, 0, 0, 1, 2, 4, -1],
    )
    cache = ours.new_cache(2, 64)
    last = ours.prefill(texts, cache)
    for row, text in enumerate(texts):
        assert close(last[row], read(ours, text)[0][-1])
    trees = ours.forward(
        torch.tensor([*tokens, *tokens]), cache, cache.layout([7, 7], [parents, parents])
    ).view(2, 7, -1)
    for row, text in enumerate(texts):
        for leaf in range(7):
            alone, _ = read(ours, text + [tokens[index] for index in a_path(parents, leaf)])
            assert close(trees[row, leaf], alone[-1]), f"row {row}, token {leaf}"


def test_cache_equals_a_fresh_prefill_after_rollback(pair):
    """Keys of rejected drafts that stay, or land in slots of their own counting."""
    _, ours = pair
    chance, text = random.Random(1), TEXT[:12]
    cache = ours.new_cache(1, 64)
    ours.prefill([text], cache)
    for _ in range(5):
        drafted = chance.choices(range(3, 259), k=chance.randint(1, 7))
        ours.forward(torch.tensor(drafted), cache, cache.layout([len(drafted)]))
        kept = chance.randint(0, len(drafted))
        cache.rollback(0, len(text) + kept)
        text = text + drafted[:kept]
    _, fresh = read(ours, text)
    assert all(close(a, b) for a, b in zip(contents(cache), contents(fresh), strict=True))


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("ctrl", {}, "ctrl.*made of ffn, layernorm1, layernorm2, multi_head_attention"),
        ("minimax", {}, "minimax.*kind linear_attention"),
        ("xglm", {}, "xglm.*embedding does more"),
        pytest.param(
            "granite_swa",
            {},
            "granite_swa.*one list of layers",
            marks=pytest.mark.skipif(OLD, reason="older versions of transformers do not have it"),
        ),
    ],
)
def test_what_is_not_recognised_runs_as_a_whole_with_the_reason(family, changes, reason):
    """A guess at an architecture, or a stray TypeError out of a model's insides."""
    with pytest.warns(UserWarning, match=f"(?s){reason}.*Drafts come from its text"):
        assert from_transformers(tiny_model(family, **changes)).whole


@pytest.mark.parametrize(
    "change",
    [
        {**_NO_SCALES, "embedding_multiplier": 3.0},
        {**_NO_SCALES, "residual_multiplier": 0.5},
        {**_NO_SCALES, "logits_scaling": 2.0},
    ],
)
def test_a_scale_that_no_name_tells_is_caught_by_the_self_check(change):
    """A model that looks like a known kind, and multiplies something on the way."""
    with pytest.warns(UserWarning, match="granitemoe.*by its modules it says something else"):
        assert from_transformers(tiny_model("granitemoe", **change)).whole


def test_attention_that_ignores_the_cache_is_not_run_by_modules(monkeypatch):
    """One that keeps its keys elsewhere gets a whole text right and every later token wrong."""
    monkeypatch.setattr(unlisted._Shelf, "update", lambda self, keys, values, *_: (keys, values))
    with pytest.warns(UserWarning, match="does not file its keys"):
        assert from_transformers(build("apertus")).whole


def test_a_cache_that_is_read_wrongly_is_caught_at_load(monkeypatch):
    """A self-check that reads the probe in one go sees nothing of the cache."""
    update = unlisted._Shelf.update

    def shifted(self, keys, values, *rest):
        keys, values = update(self, keys, values, *rest)
        return keys.roll(1, 2) if self.length > len(self.slots) else keys, values

    monkeypatch.setattr(unlisted._Shelf, "update", shifted)
    with pytest.warns(UserWarning, match="says something else"):
        assert from_transformers(build("apertus")).whole


@pytest.mark.filterwarnings("ignore:models of type")
def test_training_mode_kernels_and_attention_of_other_kinds_are_refused():
    """Dropout in what is called the model's own output; an option that would silently do
    nothing."""
    model = build("apertus")
    ours = from_transformers(model)
    model.train()
    with pytest.raises(OptionError, match=r"training mode.*model\.eval\(\)"):
        read(ours, TEXT[:5])
    model.eval()
    with pytest.raises(
        OptionError, match="'native' runs the families in the table, and models of type 'apertus'"
    ):
        from_transformers(model, kernel="native")
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(UnsupportedModel, match="'flex_attention'"):
        unlisted.module_ops("auto", model.config)


@pytest.mark.filterwarnings("ignore:models of type")
def test_products_are_counted():
    """A bandwidth floor computed from the head alone."""
    ours = from_transformers(build("apertus"))
    inside = sum(
        p.numel()
        for layer in build("apertus").model.layers
        for p in layer.parameters()
        if p.dim() == 2
    )
    assert (
        weight_bytes(ours) == 4 * (inside + ours.shape.vocabulary * ours.shape.width)
        and product_seconds(ours) > 0
    )
