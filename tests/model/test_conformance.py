"""Our forward against transformers' own, for every family and variant."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
import torch
from variants import RECURRENT, SHORT, VARIANTS, build

from selfspec.errors import SelfCheckFailed
from selfspec.model.compute.cache import RowSpan, TokenLayout
from selfspec.model.compute.hidden_states import StateCollector
from selfspec.model.compute.linear import Linear
from selfspec.model.compute.plan import LayerPlan
from selfspec.model.families import FAMILIES
from selfspec.model.from_transformers import from_transformers
from selfspec.model.layered import MANY, LayeredModel
from selfspec.model.weights import module
from selfspec.testing import families, tiny_model

every_variant = pytest.mark.parametrize("variant", VARIANTS)
TEXT = random.Random(0).choices(range(3, 259), k=90)  # longer than every window above


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request):
    """A Hugging Face model and ours, made from it."""
    model = build(request.param)
    return model, from_transformers(model)


def read(model: LayeredModel, tokens, size=None):
    """Logits of all tokens, read `size` at a time."""
    cache, tokens = model.new_cache(1, len(tokens)), torch.tensor(tokens)
    return torch.cat(
        [
            model.forward(piece, cache, cache.layout([len(piece)]))
            for piece in tokens.split(size or len(tokens))
        ]
    ), cache


def layers_of(model):
    """Of a Hugging Face model: the module that holds its layers, and under which name."""
    path, _, name = FAMILIES[model.config.model_type].layers.rpartition(".")
    return module(model, path), name


def contents(cache, row=0):
    """The keys and values of a row's text in all layers."""
    length = cache.length(row)
    layers = map(cache.of_layer, range(len(cache.keys)))
    return [room[row, :, :length] for layer in layers for room in layer]


def test_every_family_has_a_variant():
    """A family added to the table without joining this suite."""
    known = {family for each in (VARIANTS, SHORT, RECURRENT) for family, _ in each.values()}
    assert known == set(families())


@every_variant
@pytest.mark.parametrize("kernel", ["native", "mkl", "plain"])
def test_full_depth_logits_are_those_of_transformers(variant, kernel):
    """A wrong norm, scale, rotary scaling, window, bias or head. Tiny logits would pass by luck, so
    their size is checked too."""
    model = build(variant)
    ours, _ = read(from_transformers(model, kernel=kernel), TEXT)
    theirs = model(input_ids=torch.tensor([TEXT])).logits[0]
    assert theirs.abs().max() > 1, "the probe model says nothing, so agreement would mean nothing"
    assert torch.allclose(ours, theirs, atol=2e-4, rtol=1e-4), (
        f"largest difference {(ours - theirs).abs().max():.2e}"
    )


def test_greedy_tokens_are_those_of_generate(pair):
    """Positions that drift between prefill and decoding, or a cache that returns the wrong keys."""
    theirs, ours = pair
    prompt = TEXT[:40]
    expected = theirs.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, 40, dtype=torch.long),
        max_new_tokens=30,
        do_sample=False,
        eos_token_id=None,
    )[0, 40:].tolist()
    cache, written = ours.new_cache(1, 128), []
    logits = ours.prefill([prompt], cache)
    for _ in range(30):
        written.append(int(logits[-1].argmax()))
        logits = ours.forward(torch.tensor(written[-1:]), cache, cache.layout([1]))
    assert written == expected


def test_bits_do_not_depend_on_how_a_text_is_read(pair):
    """Kernels whose sums depend on the number of rows, which makes speculation change tokens in
    near-ties."""
    _, ours = pair
    assert ours.ops.kernel == "native" and ours.row_stable
    whole, cache = read(ours, TEXT)
    for size in (1, 2, 7, 13, 64):
        pieces, other = read(ours, TEXT, size)
        assert torch.equal(whole, pieces), f"logits differ when read {size} at a time"
        assert all(torch.equal(a, b) for a, b in zip(contents(cache), contents(other), strict=True))


def test_tokens_that_nobody_asks_about_leave_keys_of_the_same_bits(pair):
    """A prompt's last layer that is finished for nobody, or whose keys lack a norm, a rotation or
    what tokens bring along; a chunk of which no token is asked about."""
    _, ours = pair
    whole, cache = read(ours, TEXT)
    filed = ours.new_cache(1, len(TEXT))
    x = ours.embed(torch.tensor(TEXT))
    for begin, end in ((0, 66), (66, 70)):
        assert len(ours.read(x[begin:end], filed, filed.layout([end - begin]), [])) == 0
    assert filed.lengths.tolist() == [[70] * ours.layers]
    assert torch.equal(whole[70:], ours.forward(torch.tensor(TEXT[70:]), filed, filed.layout([20])))
    assert all(torch.equal(a, b) for a, b in zip(contents(cache), contents(filed), strict=True))


def test_a_prompt_finishes_its_last_layer_for_its_last_token_only():
    """A shortcut that is never taken, or taken where somebody looks on at states or halves."""
    ours, seen = from_transformers(tiny_model("llama")), StateCollector([3])
    counts = []
    for options in ({}, {"collectors": [seen]}, {"observer": lambda *_: None}):
        cache = ours.new_cache(1, 96)
        ours.prefill([TEXT], cache, **options)
        counts.append(cache.computed.tolist())
    assert counts == [[[90, 90, 90, 1]], [[90] * 4], [[90] * 4]]
    few = ours.new_cache(1, 96)
    ours.prefill([TEXT[:MANY]], few)
    assert few.computed.tolist() == [[MANY] * 4]


def check_neighbours(ours, texts):
    """Three rows that are read and go on together say what each says alone, bit for bit."""
    cache = ours.new_cache(3, 256)
    last = ours.prefill(texts, cache)
    step = ours.forward(torch.tensor([9, 9, 8, 7]), cache, cache.layout([1, 0, 3]))
    for row, extra in ((0, [9]), (1, []), (2, [9, 8, 7])):
        alone, _ = read(ours, texts[row] + extra)
        assert torch.equal(alone[len(texts[row]) - 1], last[row]), f"prefill of row {row}"
        offset = {0: 0, 2: 1}.get(row, 0)
        assert torch.equal(alone[len(texts[row]) :], step[offset : offset + len(extra)]), (
            f"step of row {row}"
        )


def test_bits_do_not_depend_on_neighbours_in_a_ragged_batch(pair):
    """Padding, or another row's entries, leaking into a row."""
    check_neighbours(pair[1], [TEXT[:50], TEXT[20:27], TEXT[5:80]])


def test_layers_in_pieces_equal_layers_in_one_go(pair):
    """Hidden state or positions lost between two runs of one pass: what exit-state reuse rests
    on."""
    _, ours = pair
    whole, cache = read(ours, TEXT)
    other = ours.new_cache(1, 128)
    layout = TokenLayout.chains([RowSpan(0, 0, len(TEXT))])
    x = ours.run(ours.embed(torch.tensor(TEXT)), LayerPlan(0, 1), other, layout)
    x = ours.run(x, LayerPlan(1, 3), other, layout)
    assert other.lengths[0].tolist() == [90, 90, 90, 0]
    x = ours.run(x, LayerPlan(3, 4), other, layout)
    assert torch.equal(ours.head(x), whole)
    assert all(torch.equal(a, b) for a, b in zip(contents(cache), contents(other), strict=True))


def test_early_exit_is_what_transformers_computes_with_fewer_layers(pair):
    """An exit that runs one layer too many, or skips the last norm. The reference is the same
    model, cut."""
    theirs, ours = pair
    cache = ours.new_cache(1, 128)
    x = ours.run(
        ours.embed(torch.tensor(TEXT)),
        LayerPlan(0, 2),
        cache,
        TokenLayout.chains([RowSpan(0, 0, len(TEXT))]),
    )
    holder, name = layers_of(theirs)
    layers = getattr(holder, name)
    setattr(holder, name, layers[:2])
    try:
        expected = theirs(input_ids=torch.tensor([TEXT]), use_cache=False).logits[0]
    finally:
        setattr(holder, name, layers)
    assert torch.allclose(ours.head(x), expected, atol=2e-4, rtol=1e-4)


def test_cache_equals_a_fresh_prefill_after_any_history(pair):
    """Rollback, rejection and kept tree paths that leave a trace in what later tokens see."""
    _, ours = pair
    chance = random.Random(1)
    for _ in range(4):
        cache, text = ours.new_cache(1, 64), TEXT[: chance.randint(1, 30)]
        ours.prefill([text], cache)
        for _ in range(12):
            drafted = chance.choices(range(3, 259), k=chance.randint(1, 7))
            if chance.random() < 0.5:
                ours.forward(torch.tensor(drafted), cache, cache.layout([len(drafted)]))
                kept = chance.randint(0, len(drafted))
                cache.rollback(0, len(text) + kept)
                text = text + drafted[:kept]
            else:
                parents = [-1] + [chance.randint(-1, i - 1) for i in range(1, len(drafted))]
                ours.forward(torch.tensor(drafted), cache, cache.layout([len(drafted)], [parents]))
                path = a_path(parents, chance.randrange(len(drafted)))
                cache.keep(0, len(text), path)
                text = text + [drafted[index] for index in path]
        assert cache.length(0) == len(text)
        _, fresh = read(ours, text)
        assert all(torch.equal(a, b) for a, b in zip(contents(cache), contents(fresh), strict=True))


def a_path(parents, leaf):
    path = [leaf]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def test_every_path_of_a_tree_sees_what_a_chain_sees(pair):
    """Tree masks that show a sibling, hide an ancestor, or count windows and positions by slot
    instead of depth."""
    _, ours = pair
    prompt = TEXT[:30]
    tokens, parents = [11, 12, 13, 14, 15, 16, 17], [-1, 0, 0, 1, 2, 4, -1]
    cache = ours.new_cache(1, 64)
    ours.prefill([prompt], cache)
    tree = ours.forward(torch.tensor(tokens), cache, cache.layout([7], [parents]))
    for leaf in range(7):
        path = [tokens[index] for index in a_path(parents, leaf)]
        alone, _ = read(ours, prompt + path)
        assert torch.equal(tree[leaf], alone[-1]), f"token {leaf}"


@pytest.mark.parametrize("kernel", ["plain", "static"])
def test_torch_operations_handle_trees_and_ragged_batches_too(pair, kernel):
    """The paths for GPUs and machines without a compiler, compared with the kernels; the steps that
    a GPU records (`static`) have a mask, a rotation and norms of their own. A tree, its kept path,
    then chains across every window."""
    model, ours = pair
    if kernel == "static" and "Experts" in {type(block._mlp).__name__ for block in ours.blocks}:
        pytest.skip("a mixture of experts has no static steps")
    if kernel == "static" and (ours.shape.kinds or ours.of_tokens is not None):
        pytest.skip("layers whose heads differ, or that read their tokens, have no static steps")
    results = []
    for layered in (ours, from_transformers(model, kernel=kernel, check=False)):
        cache = layered.new_cache(3, 64)
        found = [layered.prefill([TEXT[:30], TEXT[:3], TEXT[10:60]], cache)]
        layout = cache.layout([4, 0, 3], [[-1, 0, 0, 2], [], [-1, 0, -1]])
        found.append(layered.forward(torch.tensor([5, 6, 7, 8, 5, 6, 7]), cache, layout))
        cache.keep(0, 30, [0, 2, 3])
        cache.keep(2, 50, [0])
        for counts in ([1, 1, 1], [0, 7, 0], [3, 12, 5], [2, 0, 1]):
            text = torch.tensor(TEXT[: sum(counts)])
            found.append(layered.forward(text, cache, cache.layout(counts)))
        results.append(torch.cat(found))
    assert torch.allclose(*results, atol=2e-4, rtol=1e-4)


def test_skipped_halves_leave_the_stream_and_the_cache_alone():
    """A skipped half that still adds something, or a cache that claims to know what was never
    computed."""
    ours = from_transformers(build("llama"))
    x = ours.embed(torch.tensor(TEXT[:5]))
    layout = TokenLayout.chains([RowSpan(0, 0, 5)])
    cache = ours.new_cache(1, 64)
    y = ours.run(x, LayerPlan.skipping(4, attention=[0, 1, 2, 3], mlp=[0, 2, 3]), cache, layout)
    assert torch.equal(y, ours.blocks[1].mlp(x)) and cache.lengths.sum() == 0
    ours.run(x, LayerPlan.skipping(4, attention=[2]), cache, layout)
    assert cache.lengths[0].tolist() == [5, 5, 0, 5] and cache.length(0) == 0


def test_weights_that_are_no_numbers_are_named():
    """A damaged download reported to us as a family that we do not know."""
    model = tiny_model("llama")
    model.model.layers[1].mlp.down_proj.weight[3, 3] = torch.nan
    with pytest.raises(SelfCheckFailed, match=r"NaN or infinity .* its weights are damaged"):
        from_transformers(model)


def test_self_check_refuses_a_model_that_is_not_what_it_says(monkeypatch):
    """A family whose forward changed under us must not load and quietly write something else."""
    model = build("llama")
    monkeypatch.setattr(model.model.norm, "variance_epsilon", 5.0)
    from_transformers(model)  # our forward reads the same value, so this is still the same model
    model.model.layers[1].register_forward_hook(lambda module, inputs, output: output * 1.5)
    with pytest.raises(SelfCheckFailed, match="llama model gives logits that differ"):
        from_transformers(model)


@every_variant
def test_a_live_model_is_left_untouched(variant):
    """Packing or fusing that takes a user's model apart."""
    model = build(variant).train()
    last = module(model, FAMILIES[model.config.model_type].final_norm).eval()
    first = next(getattr(*layers_of(model)).children())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    from_transformers(model)
    assert model.training and first.training and not last.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("kernel", ["native", "plain"])
@pytest.mark.parametrize(
    "variant", ["llama-tied", "gpt2", "gpt-neox", "cohere", "qwen3-moe", "phi3"]
)
def test_an_owned_model_ends_as_one_copy(variant, kernel):
    """Packs beside the originals: twice the memory. Or the opposite: something released that is
    still needed."""
    model = build(variant)
    whole, _ = read(from_transformers(model, kernel=kernel), TEXT)
    small = sum(p.numel() for p in model.parameters() if p.dim() == 1)
    kept = model.transformer.wpe.weight.numel() if variant == "gpt2" else 0
    ours = from_transformers(model, owned=True, kernel=kernel)
    assert sum(p.numel() for p in model.parameters()) == small + kept
    assert torch.equal(read(ours, TEXT)[0], whole)
    tied = model.config.tie_word_embeddings
    assert isinstance(ours.embedding.source, Linear) == tied, (
        "a tied embedding is read from the head"
    )


HALF = [
    "qwen3",
    "gemma2",
    "gemma3",
    "gemma4-small",
    "olmo2",
    "granite",
    "cohere",
    "gpt-neox",
    "gpt2",
    "phi3",
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("variant", "kernel"),
    [
        *((each, "auto") for each in HALF),
        *((each, "static") for each in ("qwen3", "gemma2", "cohere")),
    ],
)
def test_half_precision_runs_and_agrees_roughly(variant, dtype, kernel):
    """A dtype lost on the way (float32 tables, norms) shows as an error or a large gap."""
    model = build(variant).to(dtype)
    ours, _ = read(
        from_transformers(model, kernel=kernel), TEXT, 40 if kernel == "static" else None
    )
    theirs = model(input_ids=torch.tensor([TEXT])).logits[0]
    assert ours.dtype == dtype and (ours - theirs).abs().max() < 0.06 * theirs.abs().max()


def test_the_docs_list_every_family():
    """A family that nobody can find, or one that is listed and gone."""
    table = (Path(__file__).parents[2] / "docs" / "models.md").read_text().split("## What")[0]
    assert set(re.findall(r"^\| `([\w-]+)` \|", table, re.MULTILINE)) == set(FAMILIES)
